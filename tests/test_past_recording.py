"""A cache whose caller records its past to roll it back: it comes back as standard decoding leaves it."""

from __future__ import annotations

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from transformers import DynamicCache

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.testing import OracleTreeCandidateGenerator

# With sliding windows, with convolutions alone and with recurrences; the last cannot be cropped in Transformers.
FAMILIES = [
    # With a window, the oldest supported Transformers fails on such a cache in standard decoding.
    *("gemma3", "mistral", "gpt_oss"),
    *(pytest.param(family, marks=pytest.mark.core) for family in ("llama", "lfm2", "qwen3_5")),
]
NEW_TOKENS = 20


def recording(model):
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def generate(model, input_ids, attention_mask=None, **kwargs):
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    return model.generate(input_ids, attention_mask=mask, **kwargs)


def drafting(expected, how):
    if how == "lookup":
        return {"generation_strategy": "ddtree", "tree_lookup": True}
    oracle = OracleTreeCandidateGenerator(expected, VOCAB_SIZE, accuracy=0.7, max_depth=4)
    return {"generation_strategy": "ddtree", "candidate_generator": oracle, "tree_budget": 8}


def assert_equal_layers(got, expected):
    for layer, layer_expected in zip(got.layers, expected.layers, strict=True):
        assert getattr(layer, "cumulative_length", 0) == getattr(layer_expected, "cumulative_length", 0)
        assert getattr(layer, "record_past", None) == getattr(layer_expected, "record_past", None)
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value, value_expected = getattr(layer, name, None), getattr(layer_expected, name, None)
            if isinstance(value, dict):
                value, value_expected = value[0], value_expected[0]
            if value_expected is not None:
                torch.testing.assert_close(value, value_expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["oracle", "lookup"])
@pytest.mark.parametrize("length", [2, 5, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_past_is_kept(family, length, how):
    """Prompts shorter than a convolution's kernel and a window, around them, and longer."""
    model = make_model(family, first_implementation(family))
    prompt = torch.randint(1, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(length))
    cache, cache_expected = recording(model), recording(model)
    expected = generate(model, prompt, **{CACHE_KEY: cache_expected})
    got = generate(model, prompt, **{CACHE_KEY: cache}, **drafting(expected, how))
    assert torch.equal(got, expected)
    assert_equal_layers(cache, cache_expected)

    # A second turn over the same cache, and then back to where it began.
    longer = torch.cat((expected, prompt), dim=1)
    expected = generate(model, longer, **{CACHE_KEY: cache_expected})
    assert torch.equal(generate(model, longer, **{CACHE_KEY: cache}, **drafting(expected, how)), expected)
    assert_equal_layers(cache, cache_expected)
    if any(getattr(layer, "recurrent_states", {0: None})[0] is not None for layer in cache.layers):
        return
    removed = cache.get_seq_length() - longer.shape[1] + 1
    cache.crop(-removed)
    assert torch.equal(generate(model, longer, **{CACHE_KEY: cache}, **drafting(expected, how)), expected)


@pytest.mark.parametrize("family", ["mistral", "lfm2"])
def test_a_padded_batch(family):
    model = make_model(family, first_implementation(family))
    prompt = torch.randint(1, VOCAB_SIZE, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :5] = mask[2, :11] = 0
    cache, cache_expected = recording(model), recording(model)
    expected = generate(model, prompt, mask, **{CACHE_KEY: cache_expected})
    got = generate(model, prompt, mask, **{CACHE_KEY: cache}, **drafting(expected, "oracle"))
    assert torch.equal(got, expected)
    assert cache.get_seq_length() == cache_expected.get_seq_length()
    cache.crop(-3)
    kept = expected[:, : cache.get_seq_length() + 1]
    mask = torch.cat((mask, mask.new_ones((3, kept.shape[1] - 14))), dim=1)
    left = expected.shape[1] - kept.shape[1]
    assert torch.equal(generate(model, kept, mask, max_new_tokens=left, **{CACHE_KEY: cache}), expected)
