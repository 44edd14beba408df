"""Query scales that grow with the place in the sequence, for the nodes of a tree.

Llama 4 multiplies the queries of its layers without rotary embedding by `1 + a log(1 + floor((i + 1) / f))` (after
Scalable-Softmax, arXiv:2501.19399), where `i` counts the entries of the cache in front of the query. The nodes of a
tree are entries as well, siblings included, so the layer counts too many. What it multiplies by can be foreseen, so
its queries are multiplied beforehand by what is due and divided by that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scales_queries(module: nn.Module) -> bool:
    """Whether a module is an attention layer that scales its queries so."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def scale_correction(num_before: Tensor, depths: Tensor, attn_scale: float, floor_scale: float) -> Tensor | None:
    """What the queries of a tree's nodes must be multiplied by before the layer scales them.

    Args:
        num_before: `(batch, 1)` int64, entries in the cache in front of each row's root; the layer counts from the
            longest row.
        depths: `(batch, n)` int64.
        attn_scale: `a`.
        floor_scale: `f`.

    Returns:
        `(batch, n, 1)` float32; None if the layer's own scale is right for all nodes.
    """
    due = ((num_before + depths + 1) // floor_scale).float()
    entries = torch.arange(depths.shape[1], device=depths.device)
    applied = ((num_before.max() + entries + 1) // floor_scale).float()
    if torch.equal(due, applied.expand_as(due)):
        return None
    return ((1 + attn_scale * due.log1p()) / (1 + attn_scale * applied.log1p()))[..., None]
