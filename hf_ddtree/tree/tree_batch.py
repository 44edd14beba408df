"""The trees of one round as rectangular tensors, one row per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import on_device
from .draft_tree import DraftTree


@dataclass(frozen=True)
class TreeBatch:
    """Trees padded to one size. A padding node repeats its tree's root token and sees nothing but itself.

    Attributes:
        token_ids: `(batch, n)` int64.
        depths: `(batch, n)` int64; 0 for the root and for padding.
        parents: `(batch, n)` int64; -1 for the root and for padding.
        ancestor_mask: `(batch, n, n)` bool; row `i` marks node `i` and its ancestors.
    """

    token_ids: Tensor
    depths: Tensor
    parents: Tensor
    ancestor_mask: Tensor

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], device: torch.device, least_nodes: int = 1) -> TreeBatch:
        """Packs one tree per row, padded to the largest or to `least_nodes`, and moves the result to `device`."""
        if len(trees) == 1 and len(trees[0]) >= least_nodes:
            tree = trees[0]
            nodes = tree.token_ids.unsqueeze(0), tree.depths.unsqueeze(0), tree.parents.unsqueeze(0)
            ancestor_mask = tree.ancestor_mask.unsqueeze(0)
        else:
            size = max(least_nodes, *map(len, trees))
            token_ids = torch.stack([_pad(tree.token_ids, size, int(tree.token_ids[0])) for tree in trees])
            depths = torch.stack([_pad(tree.depths, size, 0) for tree in trees])
            parents = torch.stack([_pad(tree.parents, size, -1) for tree in trees])
            ancestor_mask = torch.eye(size, dtype=torch.bool, device="cpu").repeat(len(trees), 1, 1)
            for row, tree in zip(ancestor_mask, trees):
                row[: len(tree), : len(tree)] = tree.ancestor_mask
            nodes = token_ids, depths, parents
        if device.type != "cpu":
            nodes = tuple(on_device(torch.stack(nodes), device))
        return cls(*nodes, on_device(ancestor_mask, device))

    def accepted(self, chosen: Tensor) -> Tensor:
        """`(batch, n)` bool, which nodes are accepted, if `chosen (batch, n)` is what follows each node.

        The root is, and every node that holds what follows its parent and whose ancestors are.
        """
        token_ids, depths, parents, ancestor_mask = (
            part.to(chosen.device) for part in (self.token_ids, self.depths, self.parents, self.ancestor_mask)
        )
        # Only the root and padding have depth 0.
        is_right = (chosen.gather(1, parents.clamp(min=0)) == token_ids) & (depths > 0)
        is_right |= torch.arange(is_right.shape[1], device=chosen.device) == 0
        return (is_right[:, None] | ~ancestor_mask).all(dim=-1)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of each tree with its padding, `n`."""
        return self.token_ids.shape[1]


def _pad(values: Tensor, size: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)), value=fill)
