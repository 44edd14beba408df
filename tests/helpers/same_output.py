"""What standard decoding and tree decoding return besides tokens, compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

TOLERANCE = 1e-4


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal in shape and type, and in value up to rounding, which grows with the largest of the terms of a sum."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    largest = max(expected[expected.isfinite()].abs().flatten().tolist(), default=0.0)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, largest / 10))


def assert_same_details(got: Any, expected: Any) -> None:
    """The same hidden states or attentions: an entry per token, and in it one per layer."""
    assert (got is None) == (expected is None)
    assert len(got or ()) == len(expected or ())
    for step, step_expected in zip(got or (), expected or ()):
        assert type(step) is type(step_expected) and len(step) == len(step_expected)
        for layer, layer_expected in zip(step, step_expected):
            assert (layer is None) == (layer_expected is None)
            if layer is not None:
                assert_close(layer, layer_expected)


def assert_same_cache(got: DynamicCache, expected: DynamicCache) -> None:
    """The same tensors and lengths in every layer, and nothing left of what a round needs."""
    assert type(got) is type(expected) and len(got.layers) == len(expected.layers)
    assert got.get_seq_length() == expected.get_seq_length()
    for layer, layer_expected in zip(got.layers, expected.layers):
        assert type(layer) is type(layer_expected)
        assert not getattr(layer, "record_past", False)
        if isinstance(layer, LinearAttentionLayer):
            for states in ("conv_states", "recurrent_states"):
                state, state_expected = getattr(layer, states)[0], getattr(layer_expected, states)[0]
                assert (state is None) == (state_expected is None)
                if state is not None:
                    assert_close(state, state_expected)
        if getattr(layer_expected, "keys", None) is None:
            continue
        assert layer.get_seq_length() == layer_expected.get_seq_length()
        assert_close(layer.keys, layer_expected.keys)
        assert_close(layer.values, layer_expected.values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert layer.cumulative_length == layer_expected.cumulative_length
