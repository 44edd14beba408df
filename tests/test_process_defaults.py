"""The defaults of a process, and `hf-ddtree run` and `serve`, which start programs with them."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from helpers.families import make_model
from helpers.side_by_side import make_prompt
from transformers import GenerationConfig
from typer.testing import CliRunner

import hf_ddtree
from hf_ddtree import strategy
from hf_ddtree.cli import app, run
from hf_ddtree.demo import demo_folders
from hf_ddtree.process_defaults import VARIABLE, to_variable

TARGET, DRAFTER = demo_folders()
ARGUMENTS = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture
def defaults(monkeypatch):
    """Sets the defaults of this process."""
    return lambda **knobs: monkeypatch.setenv(VARIABLE, to_variable(**knobs))


@pytest.fixture
def warned(monkeypatch):
    """The warnings that a call is decoded by the standard method."""
    texts = []
    monkeypatch.setattr(strategy.logger, "warning_once", lambda text, *_: texts.append(text))
    return texts


def generate(model, **arguments):
    return model.generate(make_prompt(), **ARGUMENTS | {"return_dict_in_generate": True} | arguments)


# --- what a call gets -----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_call_that_names_nothing_is_decoded_by_tree(family, sampled, defaults, warned):
    model = make_model(family, "sdpa")
    torch.manual_seed(0)
    expected = generate(model, do_sample=sampled)
    defaults(drafter="lookup", tree_budget=8)
    torch.manual_seed(0)
    output = generate(model, do_sample=sampled)
    assert isinstance(output, hf_ddtree.DDTreeOutput) and max(output.ddtree_stats.tree_sizes) == 8
    assert output.sequences.tolist() == expected.sequences.tolist() and not warned


@pytest.mark.core
@pytest.mark.parametrize("switch", [None, "standard"])
@pytest.mark.parametrize("where", ["keyword", "config"])
def test_a_call_switches_them_off(switch, where, defaults):
    model = make_model("llama", "sdpa")
    defaults(drafter="lookup")
    if where == "keyword":
        output = generate(model, generation_strategy=switch)
    else:
        output = generate(model, generation_config=GenerationConfig(generation_strategy=switch, pad_token_id=0))
    # None in a generation config says nothing.
    assert isinstance(output, hf_ddtree.DDTreeOutput) == (where == "config" and switch is None)


@pytest.mark.core
def test_a_call_s_and_a_model_s_knobs_come_first(defaults, monkeypatch):
    model = make_model("llama", "sdpa")
    defaults(drafter="lookup", tree_budget=8)
    assert max(generate(model, tree_budget=3).ddtree_stats.tree_sizes) == 3
    monkeypatch.setattr(model, "generation_config", GenerationConfig(tree_budget=5, pad_token_id=0))
    assert max(generate(model).ddtree_stats.tree_sizes) == 5


@pytest.mark.core
def test_what_cannot_be_decoded_by_tree_is_decoded_by_the_standard_method(defaults, warned):
    model = make_model("llama", "sdpa")
    expected = generate(model, num_beams=2)
    defaults(drafter="lookup")
    assert generate(model, num_beams=2).sequences.tolist() == expected.sequences.tolist()
    assert len(warned) == 1 and "`num_beams` is 2" in warned[0] and "set by default" in warned[0]


def test_a_model_that_the_drafter_does_not_fit_is_decoded_by_the_standard_method(defaults, warned):
    model = make_model("llama", "sdpa")
    expected = generate(model)
    defaults(drafter=DRAFTER)
    assert generate(model).sequences.tolist() == expected.sequences.tolist()
    assert len(warned) == 1 and f"The default drafter {DRAFTER!r} cannot draft for this model." in warned[0]


def test_a_program_s_own_assisted_generation_stays(defaults, warned):
    model = make_model("llama", "sdpa")
    expected = generate(model, prompt_lookup_num_tokens=3)
    defaults(drafter="lookup")
    output = generate(model, prompt_lookup_num_tokens=3)
    assert not isinstance(output, hf_ddtree.DDTreeOutput) and not warned
    assert output.sequences.tolist() == expected.sequences.tolist()
    output = generate(model, assistant_model=make_model("llama", "sdpa"))
    assert not isinstance(output, hf_ddtree.DDTreeOutput)
    assert output.sequences.tolist() == expected.sequences.tolist()


def test_a_call_names_no_other_drafter(defaults):
    model = make_model("llama", "sdpa")
    defaults(drafter="lookup")
    config = GenerationConfig(**json.loads('{"drafter": "evil/drafter", "pad_token_id": 0}'))
    with pytest.raises(ValueError, match="`drafter` is 'evil/drafter', but calls for this model may name no other"):
        generate(model, generation_config=config)
    assert isinstance(generate(model, drafter="lookup"), hf_ddtree.DDTreeOutput)


@pytest.mark.parametrize(
    "value, reason",
    [
        ("{", "Expecting property name"),
        ("[]", "it is no JSON object"),
        ('{"tree_bugdet": 3}', "Did you mean `tree_budget`"),
        ('{"tree_budget": 0}', "`tree_budget` must be"),
        ('{"generation_strategy": "fast"}', "`generation_strategy` is 'fast'"),
    ],
)
def test_a_wrong_value_is_named(value, reason, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError) as raised:
        generate(make_model("llama", "sdpa"))
    assert VARIABLE in str(raised.value) and reason in str(raised.value)


def test_a_call_says_in_the_log_what_it_gained(defaults, caplog):
    caplog.set_level(logging.INFO, logger="hf_ddtree")
    defaults(drafter="lookup", tree_budget=8)
    stats = generate(make_model("llama", "sdpa")).ddtree_stats
    assert f"{stats.target_forwards} forwards of the target" in caplog.text
    assert f"{stats.tokens_per_forward:.2f} tokens per forward" in caplog.text


# --- programs -------------------------------------------------------------------------------------------------------


def started(*arguments):
    """A program that `hf-ddtree` runs."""
    command = [sys.executable, "-m", "hf_ddtree", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_program_and_its_children_have_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "sitecustomize.py").write_text("import builtins\nbuiltins.was_there = 'before'\n")
    (tmp_path / "child.py").write_text(
        "import os, sys\n"
        f"print('hf_ddtree' in sys.modules, was_there, os.environ[{VARIABLE!r}], sys.argv[1:], flush=True)\n"
    )
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, sys.argv[1], *sys.argv[2:]])\n"
        "print('torch' in sys.modules)\n"
        "sys.exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path / "others"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    budget = ["--tree-budget", "9"]
    finished = started(
        "run", *budget, tmp_path / "parent.py", tmp_path / "child.py", "--port", "80", "--tree-budget=1"
    )
    child, parent = finished.stdout.splitlines()
    settings = '{"generation_strategy": "ddtree", "drafter": "lookup", "tree_budget": 9}'
    assert child == f"True before {settings} ['--port', '80', '--tree-budget=1']"
    assert (parent, finished.returncode, finished.stderr) == ("False", 7, "")


PROGRAM = f"""
import json
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained({TARGET!r}, dtype="float32")
inputs = AutoTokenizer.from_pretrained({TARGET!r})("def read_lines(path):\\n", return_tensors="pt")
print(json.dumps(model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()))
"""


def test_a_program_decodes_by_tree_with_its_code_as_it_is(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    model, _, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
    finished = started("run", "--drafter", DRAFTER, "--log", tmp_path / "program.py")
    assert json.loads(finished.stdout) == expected
    (line,) = (line for line in finished.stderr.splitlines() if line.startswith("hf-ddtree: "))
    assert int(line.split()[1]) < 20 and "forwards of the target" in line


@pytest.fixture
def executed(monkeypatch):
    """What the process would go on as: command and environment."""
    calls = []
    monkeypatch.setattr(run.os, "execve", lambda _, command, environment: calls.append((command, environment)))
    return calls


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "words, command",
    [
        (["-m", "json.tool", "x.json"], [sys.executable, "-m", "json.tool", "x.json"]),
        (["ls", "-l"], ["/ls", "-l"]),
        (["pip", "list"], ["/pip", "list"]),
    ],
)
def test_commands(words, command, executed):
    result = invoke("run", "--tree-lookup", *(["--"] if words[0] == "-m" else []), *words)
    assert result.exit_code == 0, result.output
    ((found, environment),) = executed
    assert found[0].endswith(command[0]) and found[1:] == command[1:]
    assert json.loads(environment[VARIABLE])["tree_lookup"] is True
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(run.AT_START)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["nothing.py"], "There is no file 'nothing.py'."),
        (["no-such-command"], "'no-such-command' is no Python file, and no command that is installed"),
        (["--drafter", "./nowhere", "ls"], "The drafter './nowhere' does not exist."),
        (["--no-tree-lookup", "ls"], "Without a drafter there is nothing else to draft with."),
        (["--tree-budget", "0", "ls"], "neither `auto` nor an integer"),
    ],
)
def test_what_cannot_be_run_is_named(words, reason, executed):
    result = invoke("run", *words)
    assert result.exit_code == 2 and reason in " ".join(result.output.replace("│", " ").split()) and not executed


def test_the_server(executed, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    result = invoke("serve", TARGET, "--drafter", DRAFTER, "--port", "8001", "--tree-budget", "12")
    assert result.exit_code == 0, result.output
    ((command, environment),) = executed
    assert command == [sys.executable, "-m", "transformers.cli.transformers", "serve", TARGET, "--port", "8001"]
    assert json.loads(environment[VARIABLE]) == {
        "generation_strategy": "ddtree",
        "drafter": DRAFTER,
        "tree_budget": 12,
    }


def test_a_server_that_records(executed, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    arguments = ("--drafter", DRAFTER, "--record-to", str(tmp_path / "r"), "--record-gib", "0.5")
    result = invoke("serve", TARGET, *arguments, "--record-features")
    assert result.exit_code == 0, result.output
    # Four layers of 128 numbers.
    told = f"1,028 bytes per token, 0.50 GiB at most, which is up to {2**29 // 1028:,} tokens."
    assert told in " ".join(result.stderr.split())
    ((_, environment),) = executed
    recording = {"path": str(tmp_path / "r"), "max_bytes": 2**29, "features": True}
    assert json.loads(environment[VARIABLE])["record_to"] == recording
    assert not (tmp_path / "r").exists()
    result = invoke("serve", TARGET, "--record-to", str(tmp_path / "r"))
    assert "4 bytes per token, 1.00 GiB at most" in " ".join(result.stderr.split())


def test_a_server_that_cannot_serve_is_refused_before_it_starts(executed, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    output = " ".join(invoke("serve", TARGET).output.replace("│", " ").split())
    assert "pip install 'hf-ddtree[serve]', or in a clone pip install '.[serve]'" in output
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    assert "The target './nowhere' does not exist." in invoke("serve", "./nowhere").output
    make_model("llama", "sdpa").save_pretrained(tmp_path)
    assert "`hidden_size`" in invoke("serve", str(tmp_path), "--drafter", DRAFTER).output
    assert not executed
