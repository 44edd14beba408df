"""Attention masks that let every node of a tree see the cached tokens and its own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree.tree_batch import TreeBatch


def tree_attention_mask(
    tree_batch: TreeBatch,
    num_cached: int,
    cached_mask: Tensor | None = None,
    window: int | Tensor | None = None,
    before_root: Tensor | None = None,
) -> Tensor:
    """Which keys each node sees, for the keys that a cache layer returns: the cached ones, then the nodes'.

    Through a window a node sees the keys, its ancestors' included, that lie less than `window` before it.

    Args:
        tree_batch: The round's trees.
        num_cached: Number of keys in the layer's cache.
        cached_mask: `(batch, num_cached)` bool, False where a cached key is not to be seen; None if all are.
        window: The layer's sliding window; or `(batch, n)` int64, one per node, as `chunk_windows` makes them; None
            for full attention.
        before_root: `(batch, num_cached)` int64, how far before its row's root each cached key lies. By default the
            keys are the last ones before the root.

    Returns:
        `(batch, 1, n, num_cached + n)` bool, True where a node may look.
    """
    batch_size, num_nodes = tree_batch.token_ids.shape
    device = tree_batch.token_ids.device
    mask = torch.ones((batch_size, num_nodes, num_cached + num_nodes), dtype=torch.bool, device=device)
    if cached_mask is not None:
        mask[..., :num_cached] = cached_mask[:, None]
    mask[..., num_cached:] = tree_batch.ancestor_mask
    if window is not None:
        if isinstance(window, Tensor):
            window = window[..., None]
        if before_root is None:
            before_root = torch.arange(num_cached, 0, -1, device=device)[None]
        mask[..., :num_cached] &= tree_batch.depths[..., None] + before_root[:, None] < window
        mask[..., num_cached:] &= tree_batch.depths[..., None] - tree_batch.depths[:, None] < window
    return mask[:, None]


def chunk_windows(tree_batch: TreeBatch, root_indices: Tensor, chunk_size: int) -> Tensor:
    """How many keys each node sees, itself included, where attention stays in chunks of the sequence.

    Args:
        tree_batch: The round's trees.
        root_indices: `(batch, 1)` int64, number of tokens in front of each row's root, padding not counted.
        chunk_size: Length of the chunks, the first of which begins with the first token.

    Returns:
        `(batch, n)` int64, the distance from each node to the beginning of its chunk, plus 1.
    """
    return (root_indices + tree_batch.depths) % chunk_size + 1


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that eager attention adds to its scores: 0 where `mask` is True, else the lowest number of `dtype`."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
