"""The model card that is written with a trained drafter, and what is uploaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml
from helpers.families import make_model

from hf_ddtree.training import TrainingConfig, card, new_drafter, save_drafter
from hf_ddtree.training.report import Run


def held_out(chain, likelihood):
    figures = {"chain": chain, "tree:8": chain + 1}
    return {"negative_log_likelihood": likelihood, "hit_rates": [chain / 4, 0.25], "tokens_per_forward": figures}


RUN = Run(
    "run",
    [{"step": 5, "seconds": 60.0, "loss": 4.0}, {"step": 10, "seconds": 150.0, "loss": 3.5}],
    [{"step": 0, "held_out": held_out(1.0, 6.25)}, {"step": 10, "held_out": held_out(2.5, 3.75)}],
)


@pytest.fixture
def folder(tmp_path):
    drafter = new_drafter(make_model("qwen3", "sdpa"), 63, "dflash", layers=1)
    save_drafter(drafter, tmp_path / "mine")
    measured = card.speed_lines([("plain", 10.0, 1.0, None), ("chain", 25.0, 2.5, 2.75)])
    config = TrainingConfig(steps=10, seed=7)
    card.write_card(tmp_path / "mine", RUN, drafter.config, config, "someone/model", str(tmp_path), measured)
    return tmp_path / "mine"


def test_the_card_holds_the_figures(folder, tmp_path):
    text = (folder / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["base_model"] == "someone/model" and about["tags"] == ["speculative-decoding", "dflash"]
    for line in (
        "| tokens per forward, chain | 1.00 | 2.50 |",
        "| tokens per forward, tree:8 | 2.00 | 3.50 |",
        "| nats per slot | 6.25 | 3.75 |",
        "| right at offset 2, if all before it are | 0.25 | 0.25 |",
        "| chain | 25.0 | 2.50 | 2.75 |",
        "| `seed` | 7 |",
    ):
        assert line in body, line
    assert "10 steps in 2.5 minutes, to a loss of 3.500" in body
    assert f"From {tmp_path.name}, on the target's own answers." in body and str(tmp_path) not in body


def test_what_is_uploaded(folder, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repo_id, **options):
            calls.append(("create", repo_id, options))

        def upload_folder(self, **options):
            calls.append(("upload", options))
            return SimpleNamespace(commit_url="https://example.test/commit")

    monkeypatch.setattr(card, "HfApi", Api)
    assert card.push_drafter(folder, "someone/drafter", private=True) == "https://example.test/commit"
    assert calls[0] == ("create", "someone/drafter", {"private": True, "exist_ok": True})
    assert calls[1][1]["repo_id"] == "someone/drafter" and calls[1][1]["folder_path"] == folder
    assert sorted(calls[1][1]["allow_patterns"]) == sorted(path.name for path in folder.iterdir())
    (folder / "README.md").unlink()
    with pytest.raises(ValueError, match=r"has no README.md\. Save the drafter and its card first"):
        card.push_drafter(folder, "someone/drafter")
    assert len(calls) == 2
