"""What is returned besides tokens, scores and logits: hidden states, attentions, the cache."""

import copy

import pytest
import torch
from helpers.families import CASES, FAMILIES, VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_same_cache, assert_same_details

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register
from hf_ddtree.testing import OracleTreeCandidateGenerator

SOME_FAMILIES = ["llama", "qwen2", "gemma3", "qwen3_5"]
NEW_TOKENS = 24


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


def make_inputs(batch_size, length=11, seed=0):
    """Prompts, all but the first padded at the left."""
    input_ids = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(length) >= torch.arange(batch_size)[:, None] * 3).long()
    return {"input_ids": input_ids * mask, "attention_mask": mask}


def end_token_of(model, inputs, at=9):
    """A token that ends the first row in the middle of decoding."""
    length = inputs["input_ids"].shape[1]
    return model.generate(**inputs, max_new_tokens=at, do_sample=False)[0, length + at - 1].item()


def plain_and_tree(model, inputs, seed=0, **kwargs):
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **inputs, **kwargs}
    torch.manual_seed(seed)
    plain = model.generate(**arguments)
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE, seed=seed)
    torch.manual_seed(seed)
    tree = model.generate(**arguments, generation_strategy="ddtree", candidate_generator=oracle)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert tree.ddtree_stats.tokens_per_forward > 1.2
    return plain, tree


# --- hidden states and attentions -----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family, attention", [case for case in CASES if case[0] in SOME_FAMILIES])
def test_hidden_states_and_attentions(family, attention, batch_size):
    model = make_model(family, attention)
    inputs = make_inputs(batch_size)
    plain, tree = plain_and_tree(
        model,
        inputs,
        output_hidden_states=True,
        output_attentions=attention == "eager",
        eos_token_id=end_token_of(model, inputs) if batch_size > 1 else None,
    )
    assert len(tree.hidden_states) == tree.sequences.shape[1] - inputs["input_ids"].shape[1]
    assert_same_details(tree.hidden_states, plain.hidden_states)
    assert (tree.attentions is None) == (plain.attentions is None) == (attention != "eager")
    if attention == "eager":
        assert_same_details(tree.attentions, plain.attentions)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "olmo_hybrid", "falcon_h1", "nemotron_h", "gemma3n"])
def test_hidden_states_and_attentions_of_other_families(family):
    plain, tree = plain_and_tree(
        make_model(family, "eager"), make_inputs(1), output_hidden_states=True, output_attentions=True
    )
    assert_same_details(tree.hidden_states, plain.hidden_states)
    assert_same_details(tree.attentions, plain.attentions)


def test_attentions_when_the_window_is_crossed_in_a_round():
    """A prompt shorter than the window, and enough tokens to leave it."""
    model = make_model("gemma3", "eager")
    for seed in range(4):
        plain, tree = plain_and_tree(model, make_inputs(1, length=3, seed=seed), seed=seed, output_attentions=True)
        assert_same_details(tree.attentions, plain.attentions)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_only_what_is_asked_for_and_only_in_a_dict(asked):
    model = make_model("llama", "eager")
    plain, tree = plain_and_tree(model, make_inputs(2), **{asked: True})
    for name in ("hidden_states", "attentions", "scores", "logits"):
        assert (getattr(tree, name) is None) == (getattr(plain, name) is None) == (f"output_{name}" != asked)
    arguments = {**make_inputs(2), "max_new_tokens": NEW_TOKENS, "do_sample": False, asked: True}
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE)
    tokens = model.generate(**arguments, generation_strategy="ddtree", candidate_generator=oracle)
    assert tokens.tolist() == plain.sequences.tolist()


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_transition_scores(family, normalize):
    model = make_model(family, first_implementation(family))
    inputs = make_inputs(3)
    eos = end_token_of(model, inputs)
    for settings in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 9, "repetition_penalty": 1.2}):
        plain, tree = plain_and_tree(model, inputs, output_scores=True, eos_token_id=eos, **settings)
        expected = model.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=normalize)
        got = model.compute_transition_scores(tree.sequences, tree.scores, normalize_logits=normalize)
        assert got.shape == expected.shape == (3, len(tree.scores))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", [2, 13])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_that_of_plain_decoding(family, length, batch_size):
    """Rows that finish early are padded in it as standard decoding pads them, whether rows walk apart or together."""
    model = make_model(family, first_implementation(family))
    inputs = make_inputs(batch_size, length) if length > 6 else make_inputs(1, length)
    inputs = {name: value.expand(batch_size, -1) for name, value in inputs.items()}
    eos = end_token_of(model, inputs) if batch_size > 1 and length > 6 else None
    for output_scores in (False, True):
        plain, tree = plain_and_tree(model, inputs, eos_token_id=eos, output_scores=output_scores)
        assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])


@pytest.mark.core
@pytest.mark.parametrize("how", ["plain", "ddtree"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_later_call_continues_from_the_cache(family, batch_size, how):
    model = make_model(family, first_implementation(family))
    inputs = make_inputs(batch_size)
    plain, tree = plain_and_tree(model, inputs)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS), value=1)
    arguments = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    arguments["return_dict_in_generate"] = True
    expected = model.generate(plain.sequences, **arguments, **{CACHE_KEY: plain[CACHE_KEY]})
    if how == "ddtree":
        arguments |= {"generation_strategy": "ddtree", "assistant_model": make_drafter(model), "tree_budget": 40}
    got = model.generate(tree.sequences, **arguments, **{CACHE_KEY: tree[CACHE_KEY]})
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert_same_cache(got[CACHE_KEY], expected[CACHE_KEY])


def test_a_cache_passed_in_is_used_also_without_a_dict():
    """It is the caller's, so it must be left as standard decoding leaves it."""
    model = make_model("qwen3_5", "sdpa")
    inputs = make_inputs(3)
    eos = end_token_of(model, inputs)
    first = model.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    caches = [first[CACHE_KEY], copy.deepcopy(first[CACHE_KEY])]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    arguments = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": eos}
    expected = model.generate(first.sequences, **arguments, **{CACHE_KEY: caches[0]})
    oracle = OracleTreeCandidateGenerator(expected, VOCAB_SIZE)
    arguments |= {"generation_strategy": "ddtree", "candidate_generator": oracle}
    assert model.generate(first.sequences, **arguments, **{CACHE_KEY: caches[1]}).tolist() == expected.tolist()
    assert_same_cache(caches[1], caches[0])
