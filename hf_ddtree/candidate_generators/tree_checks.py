"""Validation of the trees that a candidate generator proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tree.draft_tree import DraftTree


def checked_trees(trees: Any, roots: Sequence[int], vocab_size: int | None = None) -> list[DraftTree]:
    """Refuses trees of a candidate generator that would give wrong tokens.

    Args:
        trees: What `propose` returned.
        roots: For each row the last token of what it was given.
        vocab_size: How many tokens the target knows; None if that is checked later.

    Returns:
        The same trees as new objects: a generator may hand out one object again with other tokens written into it,
        which would not be what the object remembers of itself.

    Raises:
        TypeError: If it is no list of trees.
        ValueError: If the trees are not one per row, or one is no tree below the row's last token.
    """
    if not isinstance(trees, list | tuple) or not all(isinstance(tree, DraftTree) for tree in trees):
        raise TypeError(
            "The candidate generator's `propose` must return a list of `hf_ddtree.DraftTree`, one per row, but "
            f"returned {trees!r}."
        )
    if len(trees) != len(roots):
        raise ValueError(
            f"The candidate generator proposed {len(trees)} trees for {len(roots)} rows. `propose` must return "
            "one per row; `DraftTree.root_only(token)` is a tree with nothing drafted."
        )
    for tree, root in zip(trees, roots):
        _check_tree(tree, root, vocab_size)
    return [DraftTree(tree.token_ids, tree.parents, tree.log_probs) for tree in trees]


def _check_tree(tree: DraftTree, root: int, vocab_size: int | None) -> None:
    if not _is_vector(tree.token_ids) or not _is_vector(tree.parents, len(tree.token_ids)) or not len(tree):
        raise ValueError(
            "The candidate generator proposed a tree whose `token_ids` and `parents` are no vectors of int64 "
            "on the CPU, of the same length. Build trees with `DraftTree.from_parents`, which checks."
        )
    if len(tree) == 1 and _is_vector(tree.log_probs, 1, torch.float32):
        if (tree.token_ids.item(), tree.parents.item(), tree.log_probs.item()) == (root, -1, 0.0):
            return  # the root alone, as in most rounds of a lookup that finds nothing
    tokens, parents = tree.token_ids.numpy(), tree.parents.numpy()
    if tokens[0] != root:
        raise ValueError(
            f"The candidate generator proposed a tree whose root is token {tokens[0]}, but must be the last token "
            f"of `context.input_ids`, {root}."
        )
    if tokens.min() < 0 or (vocab_size is not None and tokens.max() >= vocab_size):
        allowed = "0 and above" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise ValueError(
            f"The candidate generator proposed a tree with tokens from {tokens.min()} to {tokens.max()}, but the "
            f"target knows {allowed}."
        )
    if parents[0] != -1 or (parents[1:] >= np.arange(1, len(parents))).any() or (parents[1:] < 0).any():
        raise ValueError(
            "The candidate generator proposed a tree whose parents are not in order: `parents[0]` must be -1 and "
            "every other node must come after its parent. Build trees with `DraftTree.from_parents`, which checks."
        )
    if not _is_vector(tree.log_probs, len(tree), torch.float32) or not _never_rise(tree.log_probs.numpy(), parents):
        raise ValueError(
            "The candidate generator proposed a tree with `log_probs` that are no vector of float32 on the CPU with "
            "one per node, are not 0 at the root, are no numbers, or are greater at a node than at its parent: they "
            "belong to whole paths. Build trees with `DraftTree.from_parents`, which checks."
        )


def _is_vector(part: Any, length: int | None = None, dtype: torch.dtype = torch.int64) -> bool:
    return (
        isinstance(part, Tensor)
        and part.ndim == 1
        and part.dtype == dtype
        and part.device.type == "cpu"
        and not part.requires_grad
        and (length is None or len(part) == length)
    )


def _never_rise(log_probs: np.ndarray, parents: np.ndarray) -> bool:
    """Whether they are 0 at the root and at most the parent's elsewhere; NaN compares to nothing."""
    return bool(log_probs[0] == 0 and (log_probs[1:] <= log_probs[parents[1:]]).all())
