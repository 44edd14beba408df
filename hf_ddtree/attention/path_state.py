"""What all recurrences over a tree have in common: the decay between two nodes, and the state after a path.

Each of them keeps a matrix that every token decays and adds one outer product to, so along a path `p`, with `D_j` the
decay of the nodes of `p` after `j` and `D` that of all its nodes,

    S = exp(D) S_0 + sum over j in p of exp(D_j) left_j right_j^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# In float32, exp() of this and of anything lower is 0.
LOWEST_LOG_DECAY = -104.0
# What has decayed to less counts as gone. Products with it would be denormal numbers, which take ten times as long.
LEAST_DECAY = 1e-30
# Most numbers of a factor, for all nodes and layers, that are copied to take the path of all layers at once; 64 MB.
MOST_STACKED = 2**24


@dataclass(frozen=True)
class TreePaths:
    """Which nodes lie on which paths, made once for all layers of a round.

    Attributes:
        ancestor_mask: `(batch, n, n)` bool, nodes in topological order; row `i` marks node `i` and its ancestors.
        ancestors: `(batch, n, 1 + n)` float32, the same after a column of ones, for the state above the root.
        below: `(batch, n, 1 + n)` float32; row `k` marks what node `k` lies below: the state above the root, and its
            ancestors without the node itself.
    """

    ancestor_mask: Tensor
    ancestors: Tensor
    below: Tensor

    @classmethod
    def of(cls, ancestor_mask: Tensor) -> TreePaths:
        """The paths of an ancestor mask."""
        ancestors = nn.functional.pad(ancestor_mask.float(), (1, 0), value=1.0)
        return cls(ancestor_mask, ancestors, ancestors.tril())


@dataclass(frozen=True)
class PathFactors:
    """What a layer keeps of a tree until one path is committed, in float32; no state per node.

    Attributes:
        log_decay: Logarithm of each node's own decay, `(batch, heads, n, 1)`, or `(batch, heads, n, rows)` if each row
            of the state has its own.
        left: `(batch, heads, n, rows)`, or `(batch, groups, n, rows)`; `heads` is a multiple of `groups`, and the
            heads of a group stand together.
        right: `(batch, heads, n, columns)`, or `(batch, groups, n, columns)`.
    """

    log_decay: Tensor
    left: Tensor
    right: Tensor


def path_decay(log_decay: Tensor, paths: TreePaths) -> tuple[Tensor, Tensor]:
    """Decay along the paths of a tree, precise between nodes of any depth.

    The decay from node `j` down to node `i` is a sum over the nodes between them. It is taken as such, a product with
    the ancestor mask on both sides: the difference of two sums from the root on would be noise after a strong decay.

    Args:
        log_decay: `(batch, n, heads)`, at most 0.
        paths: Those of the trees.

    Returns:
        `(batch, heads, n, n)`: from each node `j` down to each node `i`, 0 where `j` is no ancestor; and
        `(batch, heads, n, 1)`: of each node's whole path, the node's own included. Both float32.
    """
    own = log_decay.float().clamp(min=LOWEST_LOG_DECAY).transpose(1, 2).contiguous()
    along_path = own[:, :, None] * paths.ancestors[:, None, :, 1:]
    summed = torch.bmm(along_path.flatten(1, 2), paths.below).view(*own.shape, -1)
    decay = summed.exp_().mul_(paths.ancestors[:, None])
    return decay[..., 1:], decay[..., :1]


def advance_states(
    states: Sequence[Tensor], factors: Sequence[PathFactors], path: Tensor, lengths: Tensor | None = None
) -> None:
    """Moves the recurrent states of several layers, in place, after the nodes of one path per row.

    Args:
        states: One per layer, `(batch, heads, rows, columns)` float32, the state above the root.
        factors: What the operators returned in each of these layers; all on one device and of equal shapes.
        path: `(batch, length)` int64 nodes from the root on; a shorter path repeats its last node.
        lengths: `(batch,)` int64, how many nodes each path has; an empty one leaves the state as it is. None if all
            have `length`.
    """
    # Backwards, so that the sum of all decays so far is the decay of what follows.
    backwards = path.flip(1)
    log_decay, left, right = (
        _along_path([getattr(layer, name) for layer in factors], backwards) for name in ("log_decay", "left", "right")
    )
    if lengths is not None:
        beyond = torch.arange(path.shape[1], 0, -1, device=path.device) > lengths[:, None]
        log_decay, left, right = (
            values.masked_fill(beyond[:, None, :, None], 0.0) for values in (log_decay, left, right)
        )
    decay = nn.functional.pad(log_decay.cumsum(3), (0, 0, 1, 0)).exp_()
    decay = nn.functional.threshold(decay, LEAST_DECAY, 0.0, inplace=True)
    num_heads = states[0].shape[1]
    left, right = (
        part if part.shape[2] == num_heads else part.repeat_interleave(num_heads // part.shape[2], dim=2)
        for part in (left, right)
    )
    written = (left * decay[..., :-1, :]).mT @ right
    torch._foreach_mul_(list(states), list(decay[..., -1:, :].mT))
    torch._foreach_add_(list(states), list(written))


def _along_path(values: Sequence[Tensor], path: Tensor) -> Tensor:
    """`(layers, batch, heads, length, size)` of `(batch, heads, n, size)` of each layer."""
    if len(values) > 1 and len(values) * values[0].numel() > MOST_STACKED:
        return torch.cat([_along_path([of_layer], path) for of_layer in values])
    stacked = torch.stack(list(values)) if len(values) > 1 else values[0][None]
    if len(path) == 1:
        return stacked.index_select(3, path[0])
    index = path.view(1, len(path), 1, -1, 1)
    return stacked.gather(3, index.expand(*stacked.shape[:1], -1, stacked.shape[2], -1, stacked.shape[4]))
