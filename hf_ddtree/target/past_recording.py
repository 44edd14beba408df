"""Letting cache layers keep all that a tree feeds them until the commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionLayer


def stateful_layers(cache: Cache) -> list[LinearAttentionLayer]:
    """The layers that keep the inputs of a convolution and perhaps a recurrent state, some beside keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer) and layer.conv_kernel_size[0]]


def keeps_past(cache: Cache) -> bool:
    """Whether the caller has asked the cache to keep what `crop` needs (`activate_past_recording`)."""
    return isinstance(cache, DynamicCache) and any(layer.record_past for layer in _recording_layers(cache))


@contextmanager
def recording_past(cache: Cache) -> Iterator[None]:
    """Lets the cache's sliding and stateful layers keep all that a round feeds them until the commit.

    Meant for use after prefill: during prefill it would keep the whole prompt. A static cache keeps its shapes.
    """
    padded = []
    for layer in stateful_layers(cache):
        missing = layer.conv_kernel_size[0] - layer.conv_states[0].shape[-1]
        if missing > 0:  # a prompt shorter than the kernel, whose whole past is kept
            layer.conv_states[0] = nn.functional.pad(layer.conv_states[0], (missing, 0))
            padded.append((layer, missing))
    were_kept = keeps_past(cache)
    try:
        with set_past_recording(cache, isinstance(cache, DynamicCache)):
            yield
    finally:
        if were_kept:
            for layer, missing in padded:
                layer.conv_states[0] = layer.conv_states[0][..., missing:]


@contextmanager
def set_past_recording(cache: Cache, record_past: bool) -> Iterator[None]:
    """Switches past recording on or off in all layers that have it, and back afterwards."""
    layers = _recording_layers(cache)
    before = [layer.record_past for layer in layers]
    for layer in layers:
        layer.record_past = record_past
    try:
        yield
    finally:
        for layer, was in zip(layers, before):
            layer.record_past = was


def _recording_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "record_past")]
