"""`hf-ddtree`: what it prints, and that it says so when tokens differ."""

import re
import subprocess
import sys

import pytest
from transformers import GenerationMixin
from transformers.utils import logging
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.cli import app


@pytest.fixture(autouse=True)
def verbosity():
    """The demo silences Transformers; other tests may not want that."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


def run(*arguments, charset="utf-8"):
    result = CliRunner(charset=charset).invoke(app, list(arguments), env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"hf-ddtree {hf_ddtree.__version__}"


@pytest.mark.parametrize("module", ["hf_ddtree", "hf_ddtree.cli"])
def test_runs_as_a_module(module):
    finished = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, f"hf-ddtree {hf_ddtree.__version__}\n", "")


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize("option", ["--budget", "--max-new-tokens", "--prompts"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_refuses_counts_below_one(option, value):
    result = run("demo", option, value)
    assert result.exit_code == 2
    assert option in result.output


def test_demo_compares_and_draws():
    result = run("demo", "--prompts", "2", "--max-new-tokens", "24")
    assert result.exit_code == 0, result.output
    assert "1 of 2" in result.output
    assert "2 of 2" in result.output
    assert "Identical" in result.output
    assert "└── " in result.output
    assert re.search(r"ddtree .*\d+\.\d .*\d\.\d\dx .*\d\.\d\d", result.output)


def test_demo_streams_the_completion_of_a_given_prompt_twice():
    prompt = "def total(values):\n"
    result = run("demo", "--prompt", prompt, "--max-new-tokens", "16", "--budget", "4")
    assert result.exit_code == 0, result.output
    model, _, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    first_line = next(line for line in tokenizer.decode(tokens, skip_special_tokens=True).splitlines() if line.strip())
    assert "1 of 1" in result.output
    assert result.output.count(first_line) >= 2


def test_demo_with_sampling_makes_the_same_draws():
    result = run("demo", "--prompts", "1", "--max-new-tokens", "16", "--sample")
    assert result.exit_code == 0, result.output
    assert "Identical" in result.output


def test_demo_ends_before_a_tree_is_drafted():
    result = run("demo", "--prompts", "1", "--max-new-tokens", "1")
    assert result.exit_code == 0, result.output
    assert "before a tree was drafted" in result.output


def test_demo_fails_if_tokens_differ(monkeypatch):
    generate = GenerationMixin.generate

    def wrong(self, *args, generation_strategy=None, **kwargs):
        out = generate(self, *args, generation_strategy=generation_strategy, **kwargs)
        if generation_strategy is not None:
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(GenerationMixin, "generate", wrong)
    result = run("demo", "--prompts", "1", "--max-new-tokens", "4")
    assert result.exit_code == 1
    assert "Not identical on 1 of 1" in result.output


MEASURED = ("--max-new-tokens", "8", "--prompts", "1")


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["demo", *MEASURED],
        ["demo", "--prompt", "# café ✓ 漢字\n", *MEASURED],
        ["check", "demo"],
        ["bench", "--limit", "1", "--max-new-tokens", "8", "--method", "tree:4"],
        ["bench", "--bûdget"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_any_encoding(arguments, charset):
    result = run(*arguments, charset=charset)
    assert result.exit_code == (2 if "--bûdget" in arguments else 0), result.output
    assert charset != "ascii" or result.output.isascii()
    # Code that was completed, and calls to be pasted, are not broken.
    assert arguments[0] in ("demo", "check") or max(map(len, result.stdout.splitlines()), default=0) <= 80
