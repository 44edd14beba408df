"""The registry of drafters: what it says of formats is what the page says, and what the code does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from helpers.families import make_model
from helpers.heads import zlab_config

import hf_ddtree
from hf_ddtree.drafter_kinds import DRAFTER_KINDS, checkpoint_kind

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("drafter_table", ROOT / "scripts" / "drafter_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    assert script.page_with(text) == text, "run `python scripts/drafter_table.py`"


@pytest.mark.parametrize("parity", sorted({one.parity for kind in DRAFTER_KINDS for one in kind.formats}))
def test_every_format_is_compared(parity: str) -> None:
    file, _, name = parity.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 8}}, "DFlash 2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "DSpark"),
        ({"architectures": ["DSparkDraftModel"]}, "DSpark"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "DSpark"),
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "DSpark for Gemma 4"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9, "model_type": "llama"}, "EAGLE-3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9, "model_type": "llama"}, "EAGLE-3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "causal language model"),
        ({"model_type": "muse_glimmer_assistant"}, "DFlash of Transformers"),
        *(
            ({"speculators_model_type": name}, kind)
            for name, kind in (
                ("dflash", "DFlash"),
                ("dflash2", "DFlash 2"),
                ("dspark", "DSpark"),
                ("eagle3", "EAGLE-3"),
                ("peagle", "P-EAGLE"),
            )
        ),
    ],
)
def test_which_kind(config: dict, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_kind(tmp_path).name == kind


def test_the_report_names_the_kind_and_what_is_not_known(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    nested = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(zlab_config(target, "DominoDraftModel", nested)))
    report = hf_ddtree.check(target, tmp_path)
    assert (report.drafter_kind, report.drafter_fits) == ("Domino", True)
    assert report.drafter_tree is not None and "given its branch" in report.drafter_tree
    nested |= {"gru_layers": 2, "use_gate": True}
    (tmp_path / "config.json").write_text(json.dumps(zlab_config(target, "DominoDraftModel", nested)))
    report = hf_ddtree.check(target, tmp_path)
    assert (report.drafter_kind, report.drafter_fits) == ("Domino", False)
    assert (
        report.drafter_reason is not None
        and "has 'gru_layers', 'use_gate' in its config.json" in report.drafter_reason
    )
