"""Drafters that are named by a string, in a keyword, a generation config or a file, and `attach`."""

import copy
import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from helpers.families import make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_prompt
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import hf_ddtree
from hf_ddtree import shared_drafters
from hf_ddtree.demo import demo_folders
from hf_ddtree.drafters import DFlashDraftModel

TARGET, DRAFTER = demo_folders()
ARGUMENTS = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def demo():
    """A target of its own for each test, and inputs."""
    model, _, tokenizer = hf_ddtree.load_demo()
    model.generation_config = copy.deepcopy(model.generation_config)
    return model, tokenizer("def read_lines(path):\n", return_tensors="pt")


@pytest.fixture
def loaded(monkeypatch):
    """The names that are loaded."""
    names = []
    original = shared_drafters.load_drafter

    def load(name, target_model):
        names.append(name)
        return original(name, target_model=target_model)

    monkeypatch.setattr(shared_drafters, "load_drafter", load)
    return names


def assert_drafted(output, expected, forwards=20):
    assert output.sequences.tolist() == expected.tolist()
    assert isinstance(output, hf_ddtree.DDTreeOutput) and output.ddtree_stats.target_forwards < forwards


@pytest.mark.core
@pytest.mark.parametrize("where", ["keyword", "call's config", "model's config", "file", "custom_generate"])
def test_a_folder(demo, where, loaded, tmp_path):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    knobs = {"generation_strategy": "ddtree", "drafter": DRAFTER, "tree_budget": 15}
    calls = ARGUMENTS
    if where == "keyword":
        calls = ARGUMENTS | knobs
    elif where == "call's config":
        calls = {"generation_config": GenerationConfig(**ARGUMENTS, **knobs, pad_token_id=0)}
    elif where == "custom_generate":
        calls = ARGUMENTS | {"custom_generate": hf_ddtree.ddtree(drafter=DRAFTER, tree_budget=15)}
    else:
        model.generation_config = GenerationConfig(pad_token_id=0, **knobs)
        if where == "file":
            model.save_pretrained(tmp_path)
            assert json.loads((tmp_path / "generation_config.json").read_text())["drafter"] == DRAFTER
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for _ in range(2):
        output = model.generate(**inputs, **calls)
        assert_drafted(output, expected)
        assert output.ddtree_stats.draft_forwards > 0
    assert loaded == [DRAFTER]


@pytest.mark.core
def test_lookup(demo, loaded):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    output = model.generate(**inputs, **ARGUMENTS, generation_strategy="ddtree", drafter="lookup", tree_budget=8)
    assert_drafted(output, expected, forwards=42)
    assert output.ddtree_stats.draft_forwards == 0 and max(output.ddtree_stats.tree_sizes) > 0 and not loaded
    with pytest.raises(ValueError, match='`drafter="lookup"` and `tree_lookup=False` contradict'):
        model.generate(**inputs, generation_strategy="ddtree", drafter="lookup", tree_lookup=False)


def test_a_small_model_of_the_family(tmp_path, loaded):
    target = make_model("qwen3_5", "sdpa")
    copy.deepcopy(target).save_pretrained(tmp_path)
    expected = target.generate(make_prompt(), max_new_tokens=40, do_sample=False)
    output = target.generate(make_prompt(), **ARGUMENTS, generation_strategy="ddtree", drafter=str(tmp_path))
    assert_drafted(output, expected)
    assert loaded == [str(tmp_path)]


def test_with_a_lookup_beside_it(demo):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    output = model.generate(
        **inputs, **ARGUMENTS, generation_strategy="ddtree", drafter=DRAFTER, tree_lookup=True, tree_budget=15
    )
    assert_drafted(output, expected)


def test_sampling_keeps_the_seed_s_promise_in_the_call_that_loads(demo):
    model, inputs = demo
    arguments = {"max_new_tokens": 24, "do_sample": True}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **arguments)
    for _ in range(2):
        torch.manual_seed(3)
        output = model.generate(**inputs, **arguments, generation_strategy="ddtree", drafter=DRAFTER, tree_budget=8)
        assert output.tolist() == expected.tolist()


def test_loaded_in_inference_mode_and_used_outside(demo):
    model, inputs = demo
    arguments = {"generation_strategy": "ddtree", "drafter": DRAFTER, "max_new_tokens": 12, "do_sample": False}
    with torch.inference_mode():
        first = model.generate(**inputs, **arguments)
    assert not next(shared_drafters.shared_drafter(DRAFTER, model).parameters()).is_inference()
    assert model.generate(**inputs, **arguments).tolist() == first.tolist()


def test_dtype_of_the_target(demo):
    model, _ = demo
    assert shared_drafters.shared_drafter(DRAFTER, model.bfloat16()).dtype == torch.bfloat16


def test_threads_load_it_once(demo, loaded):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False).tolist()
    outputs, barrier = [], threading.Barrier(4)

    def call():
        barrier.wait()
        arguments = {"generation_strategy": "ddtree", "drafter": DRAFTER, "max_new_tokens": 12, "do_sample": False}
        outputs.append(model.generate(**inputs, **arguments).tolist())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [expected] * 4 and loaded == [DRAFTER]


def test_nothing_keeps_the_model_alive():
    model, _, tokenizer = hf_ddtree.load_demo()
    hf_ddtree.attach(model, DRAFTER)
    references = weakref.ref(model), weakref.ref(shared_drafters.shared_drafter(DRAFTER, model))
    model.generate(**tokenizer("x = ", return_tensors="pt"), max_new_tokens=4)
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# --- attach ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("given", ["name", "drafter"])
def test_attach(demo, given, loaded):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    drafter = DRAFTER if given == "name" else hf_ddtree.load_drafter(DRAFTER, target_model=model)
    hf_ddtree.attach(model, drafter, tree_budget=15, return_trees=True)
    assert loaded == [DRAFTER] * (given == "name")
    output = model.generate(**inputs, **ARGUMENTS)
    assert_drafted(output, expected)
    assert output.ddtree_stats.trees and max(output.ddtree_stats.tree_sizes) <= 15
    assert "drafter" in repr(model.generation_config)
    standard = model.generate(**inputs, **ARGUMENTS, generation_strategy="standard")
    assert standard.sequences.tolist() == expected.tolist() and not isinstance(standard, hf_ddtree.DDTreeOutput)
    assert len(loaded) <= 1


def test_attach_chains_and_a_lookup(demo):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    hf_ddtree.attach(model, DRAFTER, generation_strategy="dflash", tree_budget=7, return_trees=True)
    output = model.generate(**inputs, **ARGUMENTS)
    assert_drafted(output, expected)
    assert all((tree.parents[1:] == tree.parents[1:].sort().values).all() for (tree,) in output.ddtree_stats.trees)
    hf_ddtree.attach(model, "lookup", tree_budget=7)
    assert_drafted(model.generate(**inputs, **ARGUMENTS), expected, forwards=42)


def test_a_drafter_without_a_name():
    model = make_model.__wrapped__("llama", "sdpa")
    expected = model.generate(make_prompt(), max_new_tokens=8, do_sample=False)
    hf_ddtree.attach(model, make_drafter(model))
    assert model.generation_config.drafter == "DFlashDraftModel"
    assert model.generate(make_prompt(), max_new_tokens=8, do_sample=False).tolist() == expected.tolist()


def test_what_a_call_names_wins(demo):
    model, inputs = demo
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    hf_ddtree.attach(model, DRAFTER, tree_budget=15)
    other = hf_ddtree.load_drafter(DRAFTER, target_model=model)
    calls = []
    other.register_forward_hook(lambda *_: calls.append(1))
    assert_drafted(model.generate(**inputs, **ARGUMENTS, assistant_model=other), expected)
    assert calls
    output = model.generate(**inputs, **ARGUMENTS, prompt_lookup_num_tokens=4)
    assert_drafted(output, expected, forwards=42)
    assert output.ddtree_stats.draft_forwards == 0
    assert_drafted(model.generate(**inputs, **ARGUMENTS, drafter="lookup"), expected, forwards=42)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_call_loads_no_other_drafter_than_the_model_was_given(demo, loaded, tmp_path):
    model, inputs = demo
    hf_ddtree.attach(model, DRAFTER)
    other = str(tmp_path / "other")
    for arguments in ({"drafter": other}, {"generation_config": GenerationConfig(drafter=other, max_new_tokens=3)}):
        refusal = re.escape(f"`drafter` is {other!r}, but calls for this model may name no other")
        with pytest.raises(ValueError, match=refusal):
            model.generate(**inputs, **arguments)
    assert loaded == [DRAFTER]
    os.symlink(DRAFTER, other)
    hf_ddtree.attach(model, other)
    for name in (DRAFTER, other):
        assert model.generate(**inputs, drafter=name, max_new_tokens=3).shape[0] == 1
    assert loaded == [DRAFTER, other]


@pytest.mark.parametrize("call", ["attach", "generate"])
def test_errors_of_loading(demo, call, tmp_path):
    model, inputs = demo
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    wrong = make_drafter(make_model("llama", "sdpa"))
    wrong.save_pretrained(tmp_path / "wrong")

    def use(name):
        if call == "attach":
            hf_ddtree.attach(model, name)
        else:
            model.generate(**inputs, generation_strategy="ddtree", drafter=name, max_new_tokens=3)

    for name, error, words in (
        (str(tmp_path / "nothing"), OSError, "nothing"),
        (str(tmp_path), ValueError, "is no drafter|not a drafter"),
        (str(tmp_path / "wrong"), ValueError, "does not fit the target"),
        ("mtp", ValueError, "MTP|multi-token"),
    ):
        with pytest.raises(error, match=words):
            use(name)
    assert getattr(model.generation_config, "generation_strategy", None) is None


def test_errors_of_the_arguments(demo):
    model, inputs = demo
    drafter = hf_ddtree.load_drafter(DRAFTER, target_model=model)
    for value in (drafter, 3, ""):
        with pytest.raises(ValueError, match="`drafter` must be a folder.*Pass a loaded drafter as `assistant_model`"):
            model.generate(**inputs, generation_strategy="ddtree", drafter=value)
    with pytest.raises(ValueError, match="Both `assistant_model` and `drafter` are given"):
        model.generate(**inputs, generation_strategy="ddtree", drafter=DRAFTER, assistant_model=drafter)
    with pytest.raises(ValueError, match="`drafter` is for tree decoding"):
        model.generate(**inputs, drafter=DRAFTER)
    with pytest.raises(ValueError, match="`tree_budget` must be"):
        hf_ddtree.attach(model, DRAFTER, tree_budget=0)
    with pytest.raises(TypeError, match="`attach` has no argument 'tree_bugdet'. Did you mean `tree_budget`?"):
        hf_ddtree.attach(model, DRAFTER, tree_bugdet=3)
    with pytest.raises(ValueError, match="`generation_strategy` is 'tree', but must be one of 'ddtree', 'dflash'"):
        hf_ddtree.attach(model, DRAFTER, generation_strategy="tree")
    with pytest.raises(ValueError, match="`drafter` must be a folder"):
        hf_ddtree.attach(model, 3)
    with pytest.raises(TypeError, match="`model` must be a model with a `generation_config`"):
        hf_ddtree.attach("model", DRAFTER)
    assert getattr(model.generation_config, "generation_strategy", None) is None
    assert isinstance(drafter, DFlashDraftModel) and isinstance(drafter, PreTrainedModel)


def test_a_program_that_knows_nothing_of_it(tmp_path):
    """Another process, which loads the model's folder by Transformers and calls `generate()`."""
    model, _, tokenizer = hf_ddtree.load_demo()
    model.generation_config = GenerationConfig(
        pad_token_id=0, generation_strategy="ddtree", drafter=DRAFTER, return_dict_in_generate=True
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    program = """
import sys, hf_ddtree, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
output = model.generate(**tokenizer("import os\\n", return_tensors="pt"), max_new_tokens=20, do_sample=False)
print(output.ddtree_stats.draft_forwards > 0, output.sequences.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    inputs = tokenizer("import os\n", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False, generation_strategy="standard")
    assert done.stdout.strip() == f"True {expected.sequences.tolist()}"
