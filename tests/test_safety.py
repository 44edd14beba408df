"""What use leaves behind: nothing. Threads, errors in mid-round, copies, and models that nobody needs any more."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers.families import make_config, make_model
from helpers.side_by_side import NEW_TOKENS, PROMPT_LENGTH, make_oracle, make_prompt
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, StoppingCriteria

import hf_ddtree
from hf_ddtree import DFlashTreeCandidateGenerator
from hf_ddtree.attention import active_pass
from hf_ddtree.interop.versions import CACHE_KEY

PROMPTS = ["def load(path):\n    ", "import os\n\n", "class Node:\n", "x = [1, 2, "]


@pytest.fixture(scope="module")
def pair():
    return hf_ddtree.load_demo()


def in_threads(functions):
    errors, barrier = [], threading.Barrier(len(functions))

    def guarded(function):
        barrier.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- threads --------------------------------------------------------------------------------------------------------


def test_four_threads_on_one_model_and_its_drafter(pair):
    model, drafter, tokenizer = pair
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    expected = [model.generate(**row, max_new_tokens=24).tolist() for row in inputs]
    by_tree = {"generation_strategy": "ddtree", "assistant_model": drafter, "return_dict_in_generate": True}

    def job(index):
        for _ in range(2):
            output = model.generate(**inputs[index], max_new_tokens=24, **by_tree, tree_budget=4 + 4 * index)
            assert output.sequences.tolist() == expected[index]
            assert output.ddtree_stats.draft_forwards == output.ddtree_stats.target_forwards - 1

    in_threads([lambda index=index: job(index) for index in range(4)])


def test_a_call_that_fails_harms_no_other(pair):
    """Calls that are refused, and that fail in the middle, on the model and the drafter of one that goes on."""
    model, drafter, tokenizer = pair
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    expected = [model.generate(**row, max_new_tokens=24, do_sample=False).tolist() for row in inputs]
    by_tree = {"generation_strategy": "ddtree", "assistant_model": drafter, "max_new_tokens": 24, "do_sample": False}
    length = inputs[2].input_ids.shape[1]

    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > length + 7:
                raise RuntimeError("full")
            return scores

    def right(index):
        for _ in range(3):
            assert model.generate(**inputs[index], **by_tree).tolist() == expected[index]

    def wrong(arguments, error, words):
        for _ in range(3):
            with pytest.raises(error, match=words):
                model.generate(**inputs[2], **by_tree, **arguments)

    in_threads(
        [
            lambda: right(0),
            lambda: wrong({"tree_budget": 0}, ValueError, "`tree_budget`"),
            lambda: wrong({"logits_processor": [Fails()]}, RuntimeError, "full"),
            lambda: right(1),
        ]
    )


def test_four_threads_on_two_models_that_share_the_drafter(pair):
    """Same weights, so that the drafter fits both; one of the four decodes plainly, and one assists Transformers."""
    model, drafter, tokenizer = pair
    models = [model, copy.deepcopy(model)]
    llama = make_model("llama", "sdpa")
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=24).tolist()
    expected_llama = llama.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)

    def by_tree(model):
        for _ in range(2):
            arguments = {"generation_strategy": "ddtree", "assistant_model": drafter}
            assert model.generate(**inputs, max_new_tokens=24, **arguments).tolist() == expected

    def plain():
        for _ in range(2):
            assert models[0].generate(**inputs, max_new_tokens=24).tolist() == expected

    def other():
        for seed in range(4):
            oracle = make_oracle(expected_llama, seed=seed)
            arguments = {"generation_strategy": "ddtree", "candidate_generator": oracle}
            output = llama.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)
            assert output.tolist() == expected_llama.tolist()

    in_threads([lambda: by_tree(models[0]), lambda: by_tree(models[1]), plain, other])
    assert not any(module._forward_hooks for model in models for module in model.modules())


# --- errors in mid-round --------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Recorder:
    """A streamer that keeps the emitted tokens, and is a processor, a criterion or a generator's call that fails."""

    def __init__(self, error, fuse):
        self.error, self.fuse, self.tokens = error, fuse, []

    def burn(self):
        self.fuse -= 1
        if self.fuse < 0:
            raise self.error

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def failing(kind, recorder):
    """The arguments that make decoding fail in a place, when the recorder's fuse has burnt down."""

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            recorder.burn()
            return scores

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores):
            recorder.burn()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    class Streamer(Recorder):
        def put(self, value):
            recorder.put(value)
            recorder.burn()

    return {
        "processor": lambda: {"logits_processor": [Processor()], "streamer": recorder},
        "criterion": lambda: {"stopping_criteria": [Criterion()], "streamer": recorder},
        "streamer": lambda: {"streamer": Streamer(None, 0)},
        "drafter": lambda: {"streamer": recorder},
    }[kind]()


@pytest.mark.core
@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("fuse", [1, 7, 12])
@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer", "drafter"])
def test_after_an_error_the_cache_goes_on_from_what_was_emitted(pair, kind, fuse, error, monkeypatch):
    """With the shipped drafter; plainly and by tree."""
    model, drafter, tokenizer = pair
    inputs = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    expected = model.generate(inputs, max_new_tokens=30, do_sample=False)
    recorder = Recorder(error, fuse)
    cache = DynamicCache(config=model.config)
    if kind == "drafter":
        recorder.fuse = fuse // 3
        propose = DFlashTreeCandidateGenerator.propose
        monkeypatch.setattr(DFlashTreeCandidateGenerator, "propose", lambda *args: recorder.burn() or propose(*args))
    by_tree = {"generation_strategy": "ddtree", "assistant_model": drafter, "do_sample": False}
    with pytest.raises(type(error)):
        model.generate(inputs, max_new_tokens=30, **by_tree, **failing(kind, recorder), **{CACHE_KEY: cache})
    monkeypatch.undo()

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in drafter.modules())
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert active_pass._active.get() is None
    emitted = recorder.tokens
    assert emitted == expected[0, : len(emitted)].tolist() and len(emitted) > inputs.shape[1]
    length = cache.get_seq_length()
    assert inputs.shape[1] <= length < expected.shape[1]
    for kwargs in ({}, by_tree):
        known = expected[:, : max(len(emitted), length + 1)]
        output = model.generate(
            known,
            max_new_tokens=expected.shape[1] - known.shape[1],
            **{"do_sample": False, CACHE_KEY: copy.deepcopy(cache), **kwargs},
        )
        assert output.tolist() == expected.tolist()


# --- the models after use -------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save_pretrained"])
def test_copies_of_a_used_pair(pair, how, tmp_path):
    model, drafter, tokenizer = pair
    inputs = tokenizer(PROMPTS[2], return_tensors="pt")

    def decode(model, drafter):
        return model.generate(
            **inputs,
            max_new_tokens=20,
            generation_strategy="ddtree",
            assistant_model=drafter,
            calibrate=False,  # so that drafts are the same in every call
            return_dict_in_generate=True,
        )

    output = decode(model, drafter)
    attributes = {name: set(vars(module)) for name, module in drafter.named_modules()}
    decode(model, drafter)
    assert attributes == {name: set(vars(module)) for name, module in drafter.named_modules()}
    if how == "save_pretrained":
        model.save_pretrained(tmp_path / "model")
        drafter.save_pretrained(tmp_path / "drafter")
        twin = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        twins = twin, hf_ddtree.load_drafter(tmp_path / "drafter", target_model=twin)
    else:
        copied = copy.deepcopy if how == "deepcopy" else lambda module: pickle.loads(pickle.dumps(module))
        twins = copied(model), copied(drafter)
    twin_output = decode(*twins)
    assert twin_output.sequences.tolist() == output.sequences.tolist()
    assert twin_output.ddtree_stats.accepted_lengths == output.ddtree_stats.accepted_lengths


@pytest.mark.core
def test_calls_leave_no_objects_behind(pair):
    """Once the budget has tried its sizes, neither those that end nor those that are refused."""
    model, drafter, tokenizer = pair
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    arguments = {"generation_strategy": "ddtree", "assistant_model": drafter, "max_new_tokens": 8, "do_sample": False}

    def objects_after(calls):
        for number in range(calls):
            model.generate(**inputs[number % len(inputs)], **arguments)
            with pytest.raises(ValueError, match="`tree_budget`"):
                model.generate(**inputs[0], **arguments, tree_budget=0)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(16)
    assert objects_after(40) - before < 20


def test_nothing_keeps_a_used_model():
    model = AutoModelForCausalLM.from_config(make_config("qwen3_5")).eval()
    plain = model.generate(make_prompt(), max_new_tokens=8, do_sample=False)
    oracle = make_oracle(plain)
    output = model.generate(
        make_prompt(),
        max_new_tokens=8,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=oracle,
        return_dict_in_generate=True,
    )
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert output.sequences.shape[1] == PROMPT_LENGTH + 8  # the output and the generator live on


@pytest.mark.core
def test_nothing_keeps_a_used_drafter():
    model, drafter, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=8,
        generation_strategy="ddtree",
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    alive = weakref.ref(model), weakref.ref(drafter)
    del model, drafter
    gc.collect()
    assert output.draft_state is not None
    assert [reference() for reference in alive] == [None, None]
