"""Committing one path of a verified tree to the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer

from ..attention.path_state import advance_states
from ..attention.tree_pass import TreePass
from ..devices import on_device
from .cache_rows import CommittedRows
from .past_recording import stateful_layers


def commit(
    cache: DynamicCache | StaticCache,
    tree_pass: TreePass,
    paths: Sequence[Sequence[int]],
    rows: CommittedRows,
    keep_past: bool = False,
) -> None:
    """Makes the cache what it would be had only each path's nodes been fed, in order.

    Args:
        cache: The cache that the trees were fed to.
        tree_pass: The forward that fed them.
        paths: One per row, from the root on; empty for a row that stays as it is.
        rows: What the cache held before; brought up to date.
        keep_past: Whether layers with a window or a convolution keep all that they were fed, so that the caller can
            `crop` the cache. All rows must then have equally long paths.
    """
    before = rows.lengths
    rows.advance(list(map(len, paths)))
    committed = _CommittedPaths(paths, tree_pass.tree_batch.num_nodes, before, rows.num_cached)
    stateful = stateful_layers(cache)
    if not committed.is_empty:
        advance_alike(stateful, tree_pass, committed.on)
    _keep_conv_inputs(stateful, tree_pass, committed, keep_past)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            _commit_window(layer, committed, rows.num_cached, keep_past)
        elif isinstance(layer, DynamicLayer):
            layer.keys = committed.in_place(layer.keys)
            layer.values = committed.in_place(layer.values)
        elif isinstance(layer, StaticLayer):
            _commit_static(layer, committed, rows.num_cached)


def _commit_window(
    layer: DynamicSlidingWindowLayer, committed: _CommittedPaths, num_cached: int, keep_past: bool
) -> None:
    kept = min(layer.sliding_window - 1, num_cached)
    for name in ("keys", "values"):
        entries = getattr(layer, name)
        all_or_last = (
            committed.all_entries(entries, dim=-2) if keep_past else committed.last_entries(entries, kept, dim=-2)
        )
        setattr(layer, name, all_or_last)
    layer.cumulative_length = num_cached


def _commit_static(layer: StaticLayer, committed: _CommittedPaths, num_cached: int) -> None:
    for entries in (layer.keys, layer.values):
        committed.in_place(entries)
        if committed.is_empty:  # what was fed may be NaN, which no mask hides
            entries[..., num_cached:, :] = 0.0
    layer.cumulative_length.fill_(num_cached)


def advance_alike(
    layers: list[LinearAttentionLayer],
    tree_pass: TreePass,
    paths_on: Callable[[torch.device], tuple[Tensor, Tensor | None]],
) -> None:
    """Commits the recurrent states, layers that are alike together.

    Args:
        layers: All that keep the inputs of a convolution.
        tree_pass: The forward that fed them.
        paths_on: The paths and their lengths on a device, as `advance_states` takes them.
    """
    states = [layer.recurrent_states[0] for layer in layers if layer.recurrent_states[0] is not None]
    kinds = [
        (factors.left.device, factors.log_decay.shape, factors.left.shape, factors.right.shape)
        for factors in tree_pass.path_factors
    ]
    for (device, *_), indices in _alike(kinds):
        factors_of_kind = [tree_pass.path_factors[index] for index in indices]
        advance_states([states[index] for index in indices], factors_of_kind, *paths_on(device))


def _keep_conv_inputs(
    layers: list[LinearAttentionLayer], tree_pass: TreePass, committed: _CommittedPaths, keep_past: bool
) -> None:
    """Commits the last inputs of the convolutions, or all of them, layers that are alike together."""
    kinds = [
        (layer.conv_kernel_size[0], inputs.shape, inputs.dtype, inputs.device)
        for layer, inputs in zip(layers, tree_pass.conv_inputs)
    ]
    for (kernel_size, *_), indices in _alike(kinds):
        of_kind = torch.cat([tree_pass.conv_inputs[index] for index in indices], dim=1)
        if keep_past:
            kept = committed.all_entries(of_kind, dim=-1)
        else:
            kept = committed.last_entries(of_kind, kernel_size, dim=-1)
        for index, inputs in zip(indices, kept.chunk(len(indices), dim=1)):
            if layers[index].record_past:
                layers[index].conv_states[0] = inputs.contiguous()
            else:
                layers[index].conv_states[0].copy_(inputs)


def _alike(kinds: Sequence[Hashable]) -> Iterable[tuple[Any, list[int]]]:
    """Each kind with the places where it stands."""
    places: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places.items()


class _CommittedPaths:
    """The paths of a round as indices into what a cache layer holds after the verification.

    Args:
        paths: One per row.
        num_nodes: Number of entries that the verification appended.
        before: Committed entries of each row before the round.
        num_cached: Entries of the longest row after it.
    """

    def __init__(self, paths: Sequence[Sequence[int]], num_nodes: int, before: Sequence[int], num_cached: int) -> None:
        longest = max(1, *map(len, paths))
        # A path that is shorter than the longest repeats its last node; an empty one stands for the root.
        padded = [[*path, *[path[-1] if path else 0] * (longest - len(path))] for path in paths]
        self._path = np.array(padded, dtype=np.int64)
        self._lengths = np.array(list(map(len, paths)), dtype=np.int64)
        self._num_nodes = num_nodes
        self._before = before
        self._num_cached = num_cached
        self._indices: dict[tuple[Any, ...], Tensor] = {}
        self.is_empty = not any(paths)
        # True if kept entries need no move: every path is a prefix of the nodes and all rows have the same length. An
        # empty path moves nothing either: where a drafted token gave NaN, its root may hold NaN, which no mask hides.
        are_equally_long = min(before) == max(before)
        is_prefix = all(path == list(range(len(path))) for path in paths)
        self._is_prefix = self.is_empty or (are_equally_long and is_prefix)
        self._is_even = min(map(len, paths)) == longest

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The padded paths `(batch, longest)`, and their lengths `(batch,)` unless all are equally long."""
        path, lengths = torch.from_numpy(self._path), torch.from_numpy(self._lengths)
        return on_device(path, device), None if self._is_even else on_device(lengths, device)

    def last_entries(self, entries: Tensor, count: int, dim: int) -> Tensor:
        """The last `count` entries of each row, aligned at the end, along `dim` of `(batch, ...)`."""
        first = entries.shape[dim] - self._num_nodes
        start = first + self._path.shape[1] - count
        if self._is_prefix and self._is_even and start >= 0:
            return entries.narrow(dim, start, count)

        def index() -> np.ndarray:
            rows = []
            for path, length in zip(self._path, self._lengths):
                before = np.maximum(np.arange(first + length - count, first), 0)
                rows.append(np.concatenate((before, first + path[:length]))[-count:])
            return np.array(rows)

        return _gather(entries, self._cached_index(("last", first, count, entries.device), index), dim)

    def all_entries(self, entries: Tensor, dim: int) -> Tensor:
        """All entries that were committed before and those of the paths, along `dim` of `(batch, ...)`."""
        first = entries.shape[dim] - self._num_nodes
        return self.last_entries(entries, first + int(self._lengths[0]), dim)

    def in_place(self, entries: Tensor) -> Tensor:
        """Moves the paths' entries of `(batch, ..., n, dim)` after each row's committed ones; cuts off the rest."""
        if self._is_prefix:
            return entries[..., : self._num_cached, :]
        first = max(self._before)

        def source() -> np.ndarray:
            return first + self._path

        def target() -> np.ndarray:
            step = np.minimum(np.arange(self._path.shape[1]), (self._lengths - 1).clip(0)[:, None])
            return np.array(self._before)[:, None] + step

        moved = _gather(entries, self._cached_index(("source", entries.device), source), dim=-2)
        if len(self._path) == 1:
            entries[..., first : first + self._path.shape[1], :] = moved
        else:
            where = self._cached_index(("target", entries.device), target)
            entries.scatter_(-2, where[:, None, :, None].expand_as(moved), moved)
        return entries[..., : self._num_cached, :]

    def _cached_index(self, key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> Tensor:
        if key not in self._indices:
            self._indices[key] = on_device(torch.from_numpy(make()), key[-1])
        return self._indices[key]


def _gather(entries: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries `index (batch, count)` of each row along `dim` of `(batch, ...)`."""
    if len(index) == 1:
        return entries.index_select(dim, index[0])
    shape = [1] * entries.ndim
    shape[0], shape[dim] = index.shape
    expanded = list(entries.shape)
    expanded[dim] = index.shape[1]
    return entries.gather(dim, index.view(shape).expand(expanded))
