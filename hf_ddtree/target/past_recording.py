"""Letting cache layers keep all that a tree feeds them until the commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer


def stateful_layers(cache: DynamicCache) -> list[LinearAttentionLayer]:
    """The layers that keep the inputs of a convolution and perhaps a recurrent state, some beside keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer) and layer.conv_kernel_size[0]]


@contextmanager
def recording_past(cache: DynamicCache) -> Iterator[None]:
    """Lets the cache's sliding and stateful layers keep all that a round feeds them until the commit.

    Meant for use after prefill: during prefill it would keep the whole prompt. A static cache keeps its shapes.
    """
    for layer in stateful_layers(cache):
        missing = layer.conv_kernel_size[0] - layer.conv_states[0].shape[-1]
        if missing > 0:
            layer.conv_states[0] = nn.functional.pad(layer.conv_states[0], (missing, 0))
    with set_past_recording(cache, type(cache) is DynamicCache):
        yield


@contextmanager
def set_past_recording(cache: DynamicCache, record_past: bool) -> Iterator[None]:
    layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    before = [layer.record_past for layer in layers]
    for layer in layers:
        layer.record_past = record_past
    try:
        yield
    finally:
        for layer, was in zip(layers, before):
            layer.record_past = was
