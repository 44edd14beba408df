"""Preallocated keys and values, so that a round writes its tokens instead of copying the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

# 256 entries, or a 256th of the length if that is more: so at most 256 entries are copied per new one.
LEAST_ROOM = 256
ROOM_DIVISOR = 256


class GrowingTensor:
    """A tensor `(..., length, size)` that is extended in place along its last but one dimension, while preallocated
    memory is left.

    What it was extended to before may have been cut at the end or changed in place. Anything else, such as another
    selection of rows, is copied.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def extended(self, entries: Tensor, new: Tensor, following: int = 0) -> Tensor:
        """`entries` followed by `new`, both `(..., length, size)`; a view that the next call extends.

        Where memory is allocated, it is for `following` more as well.
        """
        length, num_new = entries.shape[-2], new.shape[-2]
        buffer = self._buffer
        if buffer is None or not self.has_room(entries, num_new):
            room = num_new + following + max(LEAST_ROOM, length // ROOM_DIVISOR)
            buffer = entries.new_empty((*entries.shape[:-2], length + room, entries.shape[-1]))
            buffer[..., :length, :] = entries
            self._buffer = buffer
        buffer[..., length : length + num_new, :] = new
        return buffer[..., : length + num_new, :]

    def has_room(self, entries: Tensor, num_new: int) -> bool:
        """Whether `num_new` positions fit after `entries` in place."""
        buffer = self._buffer
        if buffer is None or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        return _begins(buffer, entries) and buffer.shape[-2] >= entries.shape[-2] + num_new


def _begins(buffer: Tensor, entries: Tensor) -> bool:
    """Whether `entries` are the first ones of `buffer`."""
    return (
        entries.data_ptr() == buffer.data_ptr()
        and entries.stride() == buffer.stride()
        and entries.shape[:-2] == buffer.shape[:-2]
        and entries.dtype == buffer.dtype
    )


class _GrowingUpdate:
    """Replaces a layer's `update`: the same keys and values, written after the cached ones in place."""

    def __init__(self, layer: DynamicLayer) -> None:
        self._layer = layer
        self._keys, self._values = GrowingTensor(), GrowingTensor()

    def __call__(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = self._layer
        layer.keys = self._keys.extended(layer.keys, key_states)
        layer.values = self._values.extended(layer.values, value_states)
        return layer.keys, layer.values


def preallocate(cache: Cache) -> list[DynamicLayer]:
    """Preallocates the layers of a filled cache that keep all their keys and values, for as long as the cache lives.

    Returns:
        The layers that were not preallocated before.
    """
    layers = [
        layer
        for layer in cache.layers
        if getattr(type(layer), "update", None) is DynamicLayer.update
        and layer.is_initialized
        and "update" not in vars(layer)
    ]
    for layer in layers:
        layer.update = _GrowingUpdate(layer)
    return layers


@contextmanager
def growing(cache: Cache) -> Iterator[None]:
    """Preallocates a filled cache inside the context.

    Afterwards the layers have their own `update` again; at most 256 entries or 0.4% of their memory is unused.
    """
    layers = preallocate(cache)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update
