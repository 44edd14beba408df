"""`hf-ddtree`: what it prints, and that it says so when tokens differ."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from rich.console import Console
from transformers import AutoTokenizer, GenerationMixin
from transformers.utils import logging
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree.benchmark import distinct_share
from hf_ddtree.cli import app
from hf_ddtree.cli.streaming import SideBySide
from hf_ddtree.demo import END_OF_FUNCTION, demo_folders, demo_prompts, varied_prompts


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
    first, *others = result.output.splitlines()
    assert first == f"hf-ddtree {hf_ddtree.__version__}"
    assert f"torch {torch.__version__}" in others and f"transformers {transformers.__version__}" in others


@pytest.mark.parametrize("module", ["hf_ddtree", "hf_ddtree.cli"])
def test_runs_as_a_module(module):
    finished = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith(f"hf-ddtree {hf_ddtree.__version__}\npython ")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"], ["replay", "--help"]])
def test_help_waits_for_no_model_library(arguments):
    code = "import sys; from hf_ddtree.cli import app\n"
    code += "try: app()\nfinally: print({'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    finished = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "set()\n")


@pytest.mark.parametrize("shell, words", [("bash", "COMP_WORDS"), ("zsh", "_TYPER_COMPLETE_ARGS")])
def test_the_shell_completes_commands(shell, words):
    # Completion is asked for by the name of the program.
    code = "from hf_ddtree.cli import app; app(prog_name='hf-ddtree')"
    asked = {"_HF_DDTREE_COMPLETE": f"complete_{shell}", words: "hf-ddtree rep", "COMP_CWORD": "1"}
    environment = {**os.environ, **asked}
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "replay" in finished.stdout and "bench" not in finished.stdout, finished.stderr


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
    assert "1 of 2" in result.output and "2 of 2" in result.output
    assert "sampled, each with the same seed" in result.output
    assert "Identical" in result.output
    assert "└── " in result.output
    for title, same in (("ddtree", "2 of 2"), ("prompt lookup", "2 of 2"), ("ddtree, sampled", "1 of 1")):
        assert re.search(rf"│ {title} +│ \d+\.\d +│ \d\.\d\dx +│ \d\.\d\d +│ {same} │", result.output), result.output
    # Prompts are printed as they are.
    prompts = "\n".join(entry["prompt"] for entry in varied_prompts())
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if line.strip() not in prompts)


def test_demo_streams_the_completion_of_a_given_prompt_twice():
    prompt = "def total(values):\n"
    result = run("demo", "--prompt", prompt, "--max-new-tokens", "16", "--budget", "4")
    assert result.exit_code == 0, result.output
    model, _, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    first_line = next(line for line in tokenizer.decode(tokens, skip_special_tokens=True).splitlines() if line.strip())
    assert "1 of 1" in result.output
    assert any(line.count(first_line[:38].rstrip()) == 2 for line in result.output.splitlines())


def test_demo_with_sampling_makes_the_same_draws():
    result = run("demo", "--prompts", "1", "--max-new-tokens", "16", "--sample")
    assert result.exit_code == 0, result.output
    assert "Identical" in result.output and result.output.count("each with the same seed") == 1


def test_demo_ends_before_a_tree_is_drafted():
    result = run("demo", "--prompts", "1", "--max-new-tokens", "1")
    assert result.exit_code == 0, result.output
    assert "ended before a tree was drafted" in result.output
    assert "1 token in" in result.output and "1 tokens" not in result.output and "0.00" not in result.output


def test_demo_fails_if_tokens_differ(monkeypatch):
    generate = GenerationMixin.generate

    def wrong(self, *args, generation_strategy=None, **kwargs):
        out = generate(self, *args, generation_strategy=generation_strategy, **kwargs)
        if generation_strategy is not None and kwargs.get("return_dict_in_generate"):
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(GenerationMixin, "generate", wrong)
    result = run("demo", "--prompts", "1", "--max-new-tokens", "4")
    assert result.exit_code == 1
    assert "Not identical in 4 of 4" in result.output


def test_the_default_prompts_are_varied_and_end_with_their_function():
    model, drafter, tokenizer = hf_ddtree.load_demo()
    for entry in varied_prompts()[:3]:
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        options = {"do_sample": False, "stop_strings": list(END_OF_FUNCTION), "tokenizer": tokenizer}
        new_tokens = model.generate(**inputs, max_new_tokens=128, **options)[0, inputs.input_ids.shape[1] :].tolist()
        assert distinct_share(new_tokens) > 0.8 and len(new_tokens) >= 64
        text = tokenizer.decode(new_tokens)
        assert len(new_tokens) == 128 or any(stop in text for stop in END_OF_FUNCTION)
    assert sorted(entry["prompt"] for entry in varied_prompts()) == sorted(entry["prompt"] for entry in demo_prompts())


def test_distinct_share():
    assert distinct_share([1, 2, 3, 4], 2) == 1.0
    assert distinct_share([1, 2] * 3, 2) == 2 / 5
    assert distinct_share([1], 2) == 1.0


@pytest.fixture
def chat_model(tmp_path):
    """A folder with a model of one's own: the target that ships, with a chat template."""
    folder = tmp_path / "chat"
    shutil.copytree(demo_folders()[0], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_drafter", [False, True])
def test_demo_of_a_model_of_ones_own(has_drafter, chat_model):
    drafter = ["--drafter", demo_folders()[1]] if has_drafter else []
    result = run("demo", "--target", str(chat_model), *drafter, "--max-new-tokens", "12", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "3 of 3: a question" in result.output and "merges two sorted lists" in result.output
    assert "Identical" in result.output
    assert ("ddtree " in result.output) == has_drafter and "prompt lookup " in result.output


def test_demo_of_a_chat_model_applies_its_template(chat_model):
    result = run("demo", "--target", str(chat_model), "--prompt", "sum", "--max-new-tokens", "8", "--dtype", "float32")
    model, _, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer("# sum\n", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0, inputs.input_ids.shape[1] :])
    line = next(line.rstrip() for line in text.splitlines() if line.strip())
    assert any(found.count(line) == 2 for found in result.output.splitlines()), (line, result.output)


def test_demo_in_half_precision_explains_what_differs(chat_model, monkeypatch):
    generate = GenerationMixin.generate

    def tipped(self, *args, generation_strategy=None, **kwargs):
        out = generate(self, *args, generation_strategy=generation_strategy, **kwargs)
        if generation_strategy is not None and kwargs.get("return_dict_in_generate"):
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(GenerationMixin, "generate", tipped)
    result = run("demo", "--target", str(chat_model), "--prompts", "1", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "Not identical" in result.output and "near ties" in result.output


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--target", "/no/such"], "Invalid value for --target: The target '/no/such' does not exist."),
        (["--target", demo_folders()[1]], "is a drafter."),
        (["--drafter", "/no/such"], "Invalid value for --drafter: The drafter '/no/such' does not exist."),
        (["--drafter", "mtp"], "holds no `mtp.*` tensors"),
        (["--prompt", " "], "The prompt is empty."),
        (["--dtype", "int3"], "'int3' is none of auto"),
    ],
)
def test_demo_says_what_is_wrong(arguments, expected):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize("arguments", [["--target", "demo"], ["--prompt", "def total(values):\n", "--sample"]])
def test_replay_writes_what_it_measured(arguments, tmp_path):
    result = run("replay", *arguments, "--max-new-tokens", "24", "--output", str(tmp_path / "run.html"))
    assert result.exit_code == 0 and "Identical" in result.output, result.output
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r"application/json\">(.*?)</script>", page, re.DOTALL)[1])
    assert [lane["title"] for lane in data["race"]] == ["standard decoding", "chain", "tree"]
    for lane in data["race"]:
        assert lane["pieces"] == data["pieces"] and len(lane["seconds"]) == 24
        assert 0 < lane["seconds"][0] and lane["seconds"] == sorted(lane["seconds"])
    assert sum(len(current["path"]) for current in data["rounds"]) == 23


def test_replay_without_a_drafter_looks_up(chat_model, tmp_path):
    arguments = ["--target", str(chat_model), "--max-new-tokens", "8", "--dtype", "float32"]
    result = run("replay", *arguments, "--output", str(tmp_path / "run.html"))
    assert result.exit_code == 0 and "merges two sorted lists" in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--output", "/no/such/run.html"], "Invalid value for --output: The folder '/no/such' does not exist."),
        (["--target", "/no/such"], "Invalid value for --target: The target '/no/such' does not exist."),
        (["--prompt", ""], "The prompt is empty."),
    ],
)
def test_replay_says_what_is_wrong(arguments, expected):
    result = run("replay", *arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", "").split())


def test_columns_scroll_with_the_text():
    console = Console(file=io.StringIO(), force_terminal=True, width=20, height=10, _environ={})
    view = SideBySide(console, [("a", "cyan"), ("b", "green")])
    with view:
        for number in range(30):
            view.add(0, f"line {number}\n")
        view.end(0, "30 lines")
        console.file.truncate(0)
        view.add(1, "x")
        growing = [line.plain for line in view.__rich_console__(console, console.options)]
        assert len(growing) <= 9 and growing[-3].startswith("line 29")
    whole = [line.plain for line in view.__rich_console__(console, console.options)]
    assert whole[0] == "a          b" and whole[1].startswith("line 0     x") and len(whole) >= 32


MEASURED = ("--max-new-tokens", "8", "--prompts", "1")


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["demo", *MEASURED],
        ["demo", "--prompt", "# café ✓ 漢字\n", *MEASURED],
        ["check", "demo"],
        ["doctor"],
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
