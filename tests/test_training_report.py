"""The page that compares runs, and what trackers are told."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from helpers.families import make_model
from helpers.training_run import make_documents, make_trainer
from typer.testing import CliRunner

from hf_ddtree.cli import app
from hf_ddtree.training import DrafterTrainer, Evaluator, PackedDocuments, TrainingConfig
from hf_ddtree.training.run_log import scalars_of

CHAIN = {0: 1.0, 10: 2.25}


def write_run(folder, losses, evaluated=CHAIN):
    folder.mkdir(parents=True)
    lines = [{"step": step, "seconds": 60.0 * step, "loss": loss} for step, loss in losses.items()]
    for step, value in evaluated.items():
        figures = {"chain": value, "tree:8": 2 * value}
        held_out = {"negative_log_likelihood": 3.0, "hit_rates": [0.5, 0.25], "tokens_per_forward": figures}
        lines.append({"step": step, "held_out": held_out})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_one_page_with_all_runs(tmp_path):
    runs = [write_run(tmp_path / "a" / "run", {5: 4.0, 10: 3.5}), write_run(tmp_path / "b" / "<run>", {5: 4.5})]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", *runs, "--output", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "<td>run</td><td>10</td><td>10.0</td><td>3.500</td><td>1.00 → 2.25</td><td>2.00 → 4.50</td>" in text
    assert "<td>&lt;run&gt;</td><td>5</td>" in text
    figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        ET.fromstring(figure)
    assert not re.search(r"""(src|href)\s*=\s*["']http""", text)


def test_runs_of_one_name_and_runs_without_evaluations(tmp_path):
    runs = [write_run(tmp_path / name / "run", {1: 2.0}, {}) for name in "ab"]
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", *runs, "--output", str(page)]).exit_code == 0
    assert all(f"<td>{run}</td>" in page.read_text() for run in runs)


@pytest.mark.parametrize(
    "content, message", [(None, "holds no `log.jsonl`"), ("", "is empty: nothing was logged yet")]
)
def test_folders_without_a_run(content, message, tmp_path):
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


class Kept(GeneralTracker):
    """Keeps what it is told."""

    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self):
        super().__init__()
        self.entries = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.entries.append((step, values))


def test_trackers_get_the_numbers_of_the_log():
    target, tracker = make_model("qwen3_5", "sdpa"), Kept()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    documents = make_documents()
    evaluator = Evaluator(target, documents[:2], (4,), 48)
    entries = []
    trainer = DrafterTrainer(
        *(target, make_trainer(None).drafter, PackedDocuments(documents, 48)),
        TrainingConfig(steps=2, rows=1, anchors=4, log_every=1),
        evaluator=evaluator,
        accelerator=accelerator,
        on_log=entries.append,
    )
    trainer.train()
    assert [(entry["step"], scalars_of(entry)) for entry in entries] == tracker.entries
    names = set().union(*(values for _, values in tracker.entries))
    assert {"loss", "hit_rates/1", "held_out/tokens_per_forward/tree:4", "held_out/hit_rates/3"} <= names
