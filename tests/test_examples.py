"""The examples that show how to spread models and data."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import logging
from typer.testing import CliRunner

from hf_ddtree import load_demo
from hf_ddtree.cli import app
from hf_ddtree.demo import demo_prompts

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command):
    finished = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    assert "Loading weights" not in finished.stderr and "is not available" not in finished.stderr
    return finished.stdout


def test_the_plan_for_two_gpus():
    output = run(EXAMPLES / "two_gpus.py")
    assert 53 < float(re.search(r"weights ([\d.]+) GB", output)[1]) < 56
    together = [float(size) for size in re.findall(r"together ([\d.]+) GB of 48.0 GB", output)]
    assert len(together) == 2 and max(together) < 48 and "It fits" in output


def test_the_plan_on_cpu_and_disk():
    output = run(EXAMPLES / "two_gpus.py", "--cpu")
    assert re.search(r"drafter 4\.\d+ MB\ncpu: .*\ndisk: weights 4\.\d+ MB\n", output)
    assert int(re.search(r"(\d+) tensors are on the disk", output)[1]) > 10
    assert "The tokens are identical" in output


WITHOUT = "import runpy, sys; sys.modules[sys.argv[2]] = None; runpy.run_path(sys.argv[1], run_name='x')"
ACCELERATE = "This example needs Accelerate: pip install accelerate"
NEEDS = [
    ("data_parallel.py", "accelerate", ACCELERATE),
    ("two_gpus.py", "accelerate", ACCELERATE),
    ("ray_data.py", "ray", "This example needs Ray: pip install 'ray[data]'"),
    ("rollouts.py", "trl", "This example needs TRL: pip install trl"),
]


@pytest.mark.parametrize(("name", "package", "message"), NEEDS)
def test_a_missing_package_is_named_with_its_installation(name, package, message):
    command = [sys.executable, "-c", WITHOUT, EXAMPLES / name, package]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr == f"{message}\n"


def test_a_fine_tune_and_its_drafter(tmp_path, monkeypatch, capsys):
    """In this process, the training command as well."""
    example = runpy.run_path(str(EXAMPLES / "fine_tune_and_refit.py"))

    def train(command, check):
        assert command[1:3] == ["-m", "hf_ddtree"] and check
        result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output

    monkeypatch.setitem(example["main"].__globals__, "subprocess", SimpleNamespace(run=train))
    before = logging.get_verbosity()
    try:
        example["main"](tmp_path / "refit", 0.01, 0.01, prompts=6, held_out=1, new_tokens=8)
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
    figures = re.findall(r"(?:Python|English|drafter trained on): +([\d.]+)", capsys.readouterr().out)
    assert len(figures) == 4 and min(map(float, figures)) >= 1
    assert (tmp_path / "refit" / "run" / "drafter" / "model.safetensors").exists()


def test_wrong_prompts_are_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    command = [sys.executable, EXAMPLES / "data_parallel.py", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"]
    finished = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert finished.returncode == 2 and "prompts.jsonl, line 2: 'prompt' is empty." in finished.stderr


def test_data_parallel(tmp_path):
    """By two processes, of which one prompt is left to each by a run that was interrupted."""
    already_done = [1]
    entries = demo_prompts()[:3]
    prompts, completions = tmp_path / "prompts.jsonl", tmp_path / "completions.jsonl"
    entries[2] = {"turns": [entries[2]["prompt"], "and on"]}
    prompts.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    lines = (json.dumps({"line": line, "completion": "kept"}) + "\n" for line in already_done)
    (tmp_path / "completions.jsonl.part3").write_text("".join(lines))
    output = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / "data_parallel.py"),
        *(prompts, completions, "--max-new-tokens", "12"),
    )
    left = len(entries) - len(already_done)
    assert f"{left} of 3 prompts were left, 2 processes" in output
    model, _, tokenizer = load_demo()
    expected = []
    for number, entry in enumerate(entries):
        prompt = entry["prompt"] if "prompt" in entry else entry["turns"][0]
        inputs = tokenizer(prompt, return_tensors="pt")
        plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
        text = "kept" if number in already_done else tokenizer.decode(plain, skip_special_tokens=True)
        expected.append({**entry, "completion": text})
    assert [json.loads(line) for line in completions.read_text().splitlines()] == expected
    assert not list(tmp_path.glob("*.part*"))
