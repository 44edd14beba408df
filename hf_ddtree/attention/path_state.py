"""What all recurrences over a tree have in common: the decay between two nodes, and the state behind a path.

Each of them keeps a matrix that every token decays and adds one outer product to, so along a path `p`, with `D_j` the
decay of the nodes of `p` behind `j` and `D` that of all its nodes,

    S = exp(D) S_0 + sum over j in p of exp(D_j) left_j right_j^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# In float32, exp() of this and of anything lower is 0.
LOWEST_LOG_DECAY = -104.0


@dataclass(frozen=True)
class PathFactors:
    """What a layer keeps of a tree until one path is committed, in float32; no state for any node.

    Attributes:
        log_decay: Logarithm of each node's own decay, `(batch, heads, n, 1)`, or `(batch, heads, n, rows)` if each row
            of the state has its own.
        left: `(batch, heads, n, rows)`.
        right: `(batch, groups, n, columns)`; `heads` is a multiple of `groups`, and a group's heads stand together.
    """

    log_decay: Tensor
    left: Tensor
    right: Tensor


def path_decay(log_decay: Tensor, ancestor_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Decay along the paths of a tree, precise between nodes of any depth.

    The decay from node `j` down to node `i` is a sum over the nodes between them. It is taken as such, a product with
    the ancestor mask on both sides: the difference of two sums from the root on would be noise after a strong decay.

    Args:
        log_decay: `(batch, n, heads)`, at most 0.
        ancestor_mask: `(batch, n, n)` bool, nodes in topological order; row `i` marks node `i` and its ancestors.

    Returns:
        `(batch, heads, n, n)`: from each node `j` down to each node `i`, 0 where `j` is no ancestor; and
        `(batch, heads, n, 1)`: of each node's whole path, the node's own included. Both float32.
    """
    ancestors = ancestor_mask.float()
    own = log_decay.float().clamp(min=LOWEST_LOG_DECAY).transpose(1, 2)
    summed = ((ancestors[:, None] * own[:, :, None]).flatten(1, 2) @ ancestors.tril(-1)).view(*own.shape, -1)
    return summed.exp_().mul_(ancestors[:, None]), (own @ ancestors.mT).exp_()[..., None]


def advance_states(
    states: Sequence[Tensor], factors: Sequence[PathFactors], path: Tensor, lengths: Tensor | None = None
) -> None:
    """Moves the recurrent states of several layers, in place, behind the nodes of one path a row.

    Args:
        states: One a layer, `(batch, heads, rows, columns)` float32, the state above the root.
        factors: What the operators returned in each of these layers; all on one device and of equal shapes.
        path: `(batch, length)` int64 nodes from the root on; a shorter path repeats its last node.
        lengths: `(batch,)` int64, how many nodes each path has; an empty one leaves the state as it is. None if all
            have `length`.
    """
    log_decay, left, right = (
        _along_path(torch.stack([getattr(layer, name) for layer in factors]), path)
        for name in ("log_decay", "left", "right")
    )
    if lengths is not None:
        beyond = torch.arange(path.shape[1], device=path.device) >= lengths[:, None]
        log_decay, left = (values.masked_fill(beyond[:, None, :, None], 0.0) for values in (log_decay, left))
    decay = log_decay.flip(3).cumsum(3).flip(3)
    behind = torch.nn.functional.pad(decay[..., 1:, :], (0, 0, 0, 1))
    if left.shape[2] != right.shape[2]:
        right = right.repeat_interleave(left.shape[2] // right.shape[2], dim=2)
    written = (left * behind.exp()).transpose(-1, -2) @ right
    torch._foreach_mul_(list(states), list(decay[..., :1, :].exp().transpose(-1, -2)))
    torch._foreach_add_(list(states), list(written))


def _along_path(values: Tensor, path: Tensor) -> Tensor:
    """`(layers, batch, heads, length, size)` of `(layers, batch, heads, n, size)`."""
    if len(path) == 1:
        return values.index_select(3, path[0])
    index = path.view(1, len(path), 1, -1, 1)
    return values.gather(3, index.expand(*values.shape[:1], -1, values.shape[2], -1, values.shape[4]))
