"""A round's masks in the form that tree attention adds to its scores, made once for all layers that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Kernels on CUDA copy a mask whose rows do not begin at multiples of this.
ALIGNMENT = 8


@dataclass(frozen=True)
class PackedMask:
    """What a round's attention adds to its scores.

    Attributes:
        scores: `(batch or 1, 1, groups * n, keys)`, 0 where a node may look and -inf elsewhere, the nodes of one query
            head after those of another. Covers the last keys: all of them, or the nodes.
        num_open: Number of keys in front of those, which every node sees.
    """

    scores: Tensor
    num_open: int = 0


@dataclass(frozen=True)
class _Entry:
    mask: Tensor
    groups: int
    dtype: torch.dtype
    in_parts: bool
    packed: PackedMask


class PackedMasks:
    """The masks of one forward over trees.

    Args:
        num_nodes: Number of nodes of each tree.
        open_masks: Those of the masks that the model is given under which every node sees all cached keys.
    """

    def __init__(self, num_nodes: int, open_masks: Sequence[Tensor]) -> None:
        self._num_nodes = num_nodes
        self._open_masks = open_masks
        self._entries: list[_Entry] = []

    def of(self, mask: Tensor, groups: int, dtype: torch.dtype, in_parts: bool) -> PackedMask:
        """The packed form of a mask.

        Args:
            mask: `(batch, 1, n, keys)`, as a layer gets it: bool, or what is added to scores.
            groups: Number of query heads that share a key head.
            dtype: That of the queries.
            in_parts: Whether attention can go in two parts.
        """
        # By identity: the masks of other layers may have the same shape.
        for entry in self._entries:
            if entry.mask is mask and (entry.groups, entry.dtype, entry.in_parts) == (groups, dtype, in_parts):
                return entry.packed
        num_open = 0
        if in_parts and any(mask is one for one in self._open_masks):
            num_open = mask.shape[-1] - self._num_nodes
        packed = PackedMask(_packed(mask[..., num_open:], groups, dtype), num_open)
        self._entries.append(_Entry(mask, groups, dtype, in_parts, packed))
        return packed


def _packed(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    rows, _, num_nodes, num_keys = mask.shape
    hidden = ~mask if mask.dtype == torch.bool else mask < 0
    aligned = -(-num_keys // ALIGNMENT) * ALIGNMENT
    scores = torch.zeros((rows, groups, num_nodes, aligned), dtype=dtype, device=mask.device)[..., :num_keys]
    scores.masked_fill_(hidden, float("-inf"))
    return scores.flatten(1, 2)[:, None]
