"""Blocks at many roots of a row, drafted in one forward: where the roots are, and what each block sees.

As DFlash (arXiv:2602.06036) is trained: a block stands at a random root, sees the features of its document's tokens
before the root, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..drafters.dflash.config import DFlashConfig
from .documents import Rows


def possible_anchors(rows: Rows) -> Tensor:
    """`(rows, length)` bool: the tokens that can be roots. The next token of the document counts, and the document has
    a token before the root, as while decoding."""
    possible = torch.zeros_like(rows.is_counted)
    same = rows.documents[:, 1:] == rows.documents[:, :-1]
    possible[:, 1:-1] = same[:, :-1] & same[:, 1:] & rows.is_counted[:, 2:]
    return possible


def sample_anchors(rows: Rows, count: int, seeds: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Random roots, each at most once, in order.

    Args:
        rows: The rows, on the CPU.
        count: Most roots in a row.
        seeds: Per row what its random numbers depend on.

    Returns:
        `(rows, count)` int64, the places of the roots, and `(rows, count)` bool, whether there is one.
    """
    anchors = np.zeros((len(seeds), count), dtype=np.int64)
    is_used = np.zeros((len(seeds), count), dtype=bool)
    for row, (possible, seed) in enumerate(zip(possible_anchors(rows).numpy(), seeds)):
        chosen = np.random.default_rng(list(seed)).permutation(np.flatnonzero(possible))[:count]
        anchors[row, : len(chosen)] = np.sort(chosen)
        is_used[row, : len(chosen)] = True
    return torch.from_numpy(anchors), torch.from_numpy(is_used)


def labels_behind(rows: Rows, anchors: Tensor, is_used: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the blocks are to predict.

    Args:
        rows: The rows.
        anchors, is_used: `(rows, blocks)`, of `sample_anchors`.
        depth: Tokens that a block predicts.

    Returns:
        `(rows, blocks, depth)` each: the places of the tokens after the roots, cut off at the end of the row; the
        tokens; and whether they count, which they do up to the first that does not or that is of another document.
    """
    length = rows.token_ids.shape[1]
    places = anchors[..., None] + torch.arange(1, depth + 1, device=anchors.device)
    inside = places < length
    places = places.clamp(max=length - 1)
    flat = places.flatten(1)
    of_root = rows.documents.gather(1, anchors)[..., None]
    counts = inside & (rows.documents.gather(1, flat).view_as(places) == of_root) & is_used[..., None]
    counts &= rows.is_counted.gather(1, flat).view_as(places)
    return places, rows.token_ids.gather(1, flat).view_as(places), counts.int().cumprod(-1).bool()


def block_positions(rows: Rows, anchors: Tensor, block_size: int) -> Tensor:
    """`(rows, length + blocks * block_size)` int64: positions in their documents of the row's tokens, then of the
    slots of all blocks."""
    positions = rows.positions()
    slots = positions.gather(1, anchors)[..., None] + torch.arange(block_size, device=anchors.device)
    return torch.cat((positions, slots.flatten(1)), dim=1)


def block_masks(config: DFlashConfig, documents: Tensor, anchors: Tensor) -> dict[str, Tensor]:
    """What the slots of all blocks see, for each kind of layer that the drafter has.

    Args:
        config: Of the drafter: its windows, and whether its blocks are causal.
        documents: `(rows, length)`, of `Rows`.
        anchors: `(rows, blocks)` int64.

    Returns:
        By the kinds in `config.layer_types`, `(rows, 1, blocks * block_size, length + blocks * block_size)` bool, the
        row's tokens first, as `DFlashDraftModel.forward` takes it.
    """
    size, device = config.block_size, anchors.device
    slots = torch.arange(size, device=device).repeat(anchors.shape[1])
    owners = torch.arange(anchors.shape[1], device=device).repeat_interleave(size)
    root_places = anchors.repeat_interleave(size, dim=1)
    before_root = root_places[..., None] - torch.arange(documents.shape[1], device=device)
    in_context = (before_root > 0) & (documents[:, None] == documents.gather(1, root_places)[..., None])
    in_block = owners[:, None] == owners
    distance = slots[:, None] - slots
    masks = {}
    for kind in sorted(set(config.layer_types)):
        context, block = in_context, in_block
        window = config.sliding_window if kind == "sliding_attention" else None
        if kind == "sliding_attention" if config.is_causal is None else config.is_causal:
            block = block & (distance >= 0)
        if window is not None and config.window_from_root:
            context = context & (before_root <= window)
        elif window is not None:
            context = context & (before_root + slots[:, None] < window)
            block = block & (distance.abs() < window)
        masks[kind] = torch.cat((context, block.expand(len(context), -1, -1)), dim=-1)[:, None]
    return masks
