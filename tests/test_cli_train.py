"""`hf-ddtree train`: from prompts to a drafter that loads, and on from where it was."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.benchmark import Report
from hf_ddtree.cli import app
from hf_ddtree.cli.train import _split_texts as split_texts
from hf_ddtree.demo import demo_prompts, load_demo
from hf_ddtree.training import Document
from hf_ddtree.training.run_log import read_log

SMALL = ("--rows", "1", "--length", "128", "--anchors", "4", "--layers", "1", "--block-size", "4")
SMALL += ("--max-new-tokens", "16", "--held-out", "1", "--batch-size", "4")


@pytest.fixture(autouse=True)
def verbosity():
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


def run(*arguments):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write_prompts(path, count):
    path.write_text("".join(json.dumps({"prompt": entry["prompt"]}) + "\n" for entry in demo_prompts()[:count]))
    return path


def test_from_prompts_to_a_drafter(tmp_path):
    prompts, folder = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "run"
    result = run("demo", "--prompts", prompts, "--output", folder, "--steps", 2, *SMALL)
    assert result.exit_code == 0, result.output
    assert "tokens per forward after step 2: chain" in result.output and "plain" in result.output
    assert "Memory in each process: 0." in result.stderr
    for line in ("answers: 4 of 4 prompts", "step 2, 100% done, loss ", "tokens per forward after step 0: chain"):
        assert line in result.stderr
    assert "Decoding with the drafter: 4 of 4 runs" in result.stderr
    assert sorted(path.name for path in (folder / "drafter").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    card = (folder / "drafter" / "README.md").read_text()
    assert "| tree:16 |" in card and "2 steps in" in card and str(tmp_path) not in card
    assert str(hf_ddtree.demo.demo_folders()[0]) not in card and "# A drafter for target" in card
    drafter = hf_ddtree.load_drafter(folder / "drafter", target_model=load_demo()[0])
    assert (drafter.config.block_size, drafter.config.sliding_window, drafter.config.mask_token_id) == (4, 128, 2)
    summaries = Report.load(folder / "bench").summaries()
    assert [entry.method for entry in summaries] == ["plain", "chain", "tree:16", "auto"]
    assert not any(entry.differs for entry in summaries)
    # The same command finds everything done, and another does not mix with it.
    before = (folder / "drafter" / "model.safetensors").read_bytes()
    assert (
        "Going on after step 2." in run("demo", "--prompts", prompts, "--output", folder, "--steps", 2, *SMALL).output
    )
    assert (folder / "drafter" / "model.safetensors").read_bytes() == before
    result = run("demo", "--prompts", prompts, "--output", folder, "--steps", 3, *SMALL)
    assert result.exit_code == 2 and "`--steps` 2, but now it is 3" in " ".join(
        result.output.replace("│", " ").split()
    )
    assert {entry["step"] for entry in read_log(folder / "log.jsonl")} == {0, 2}


def test_on_from_the_drafter_that_ships(tmp_path):
    texts, folder = tmp_path / "t.jsonl", tmp_path / "run"
    texts.write_text("".join(json.dumps({"text": entry["prompt"]}) + "\n" for entry in demo_prompts()[:4]))
    shipped = hf_ddtree.demo.demo_folders()[1]
    result = run("demo", "--texts", texts, "--from", shipped, "--output", folder, "--steps", 1, *SMALL)
    assert result.exit_code == 0, result.output
    started, ended = (entry["held_out"] for entry in read_log(folder / "log.jsonl") if "held_out" in entry)
    assert started["hit_rates"][0] > 0.1
    assert started["negative_log_likelihood"] != ended["negative_log_likelihood"]
    config = json.loads((folder / "drafter" / "config.json").read_text())
    assert config == json.loads((hf_ddtree.demo._PAIR / "drafter" / "config.json").read_text())


def test_the_head_alone(tmp_path):
    texts, folder = tmp_path / "t.jsonl", tmp_path / "run"
    texts.write_text("".join(json.dumps({"text": entry["prompt"]}) + "\n" for entry in demo_prompts()[:4]))
    shipped = hf_ddtree.demo.demo_folders()[1]
    run_it = ("demo", "--texts", texts, "--from", shipped, "--head", "dflash2", "--output", folder, "--steps", 2)
    result = run(*run_it, *SMALL)
    assert result.exit_code == 0, result.output
    before, after = (load_file(where / "model.safetensors") for where in (Path(shipped), folder / "drafter"))
    changed = {name.split(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"candidate_selector"} and before.keys() == after.keys()


def test_on_what_was_recorded(tmp_path):
    target, drafter, tokenizer = load_demo()
    to = hf_ddtree.RecordingFolder(tmp_path / "recorded", features=True)
    for entry in [*demo_prompts()[:4], demo_prompts()[0]]:
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "do_sample": False}
        target.generate(**inputs, max_new_tokens=20, record_to=to, **arguments)
    shipped = hf_ddtree.demo.demo_folders()[1]
    command = ("demo", "--recorded", tmp_path / "recorded", "--from", shipped, "--output", tmp_path / "run")
    result = run(*command, "--head", "dflash2", "--steps", 2, *SMALL)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "5 recorded texts with 100 tokens of answers, 5 of them with features for this drafter." in told
    assert "5 are longer than `--length` and are cut." in told
    summaries = Report.load(tmp_path / "run" / "bench").summaries()
    assert [entry.method for entry in summaries] == ["plain", "chain", "tree:16", "auto"]
    before, after = (load_file(where / "model.safetensors") for where in (Path(shipped), tmp_path / "run" / "drafter"))
    changed = {name.split(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"candidate_selector"}


def test_prompts_that_are_measured_on_are_not_learnt_from():
    texts = [Document.answer([1, 2, 3 + number % 4, 9, number], 3) for number in range(8)]
    measured, learnt = split_texts(texts, 2)
    assert len(measured) == 2 and len(learnt) == 4
    assert not {tuple(one.prompt()) for one in measured} & {tuple(one.prompt()) for one in learnt}


def test_a_fault_is_told_before_training(tmp_path):
    shutil.copytree(hf_ddtree.demo.demo_folders()[1], tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 300
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    arguments = ("demo", "--prompts", prompts, "--from", tmp_path / "drafter", "--output", tmp_path / "run", *SMALL)
    result = run(*arguments, "--steps", 1)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "Look at this before training: It seems that the mask token is 2 ('<|mask|>'), not 300" in told
    assert "Look at this" not in run(*arguments, "--steps", 1).stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "there is nothing to train on. Give `--prompts`"),
        (("--prompts", "missing.jsonl"), "There is no file or folder 'missing.jsonl'"),
        (("--recorded", "missing"), "There is no folder 'missing'"),
        (("--prompts", "{bad}"), "line 1: the object has none of `prompt`"),
        (("--prompts", "{bad}", "--head", "dflash2"), "`--head` goes on top of a drafter that is trained already."),
        (("--prompts", "{bad}", "--tensorboard"), "pip install tensorboard"),
        (("--prompts", "{bad}", "--kind", "eagle"), "`--kind` must be one of 'dflash'"),
        (("--prompts", "{bad}", "--loss", "l2"), "`--loss` must be one of 'cross_entropy'"),
        (("--prompts", "{bad}", "--template-options", "["), "`--template-options` is no JSON"),
        (("--prompts", "{bad}", "--from", "nowhere/at/all"), "The drafter 'nowhere/at/all' does not exist."),
    ],
)
def test_what_is_wrong_is_said(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "?"}\n')
    result = run("demo", "--output", tmp_path, *(str(part).replace("{bad}", str(bad)) for part in arguments))
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]
