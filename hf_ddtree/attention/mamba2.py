"""The state space model of Mamba-2 over a tree in one pass.

Along a path the state is `S_i = exp(dt_i A) S_parent + dt_i x_i B_i^T` and the output `y_i = S_i C_i + D x_i`
(Mamba-2, arXiv:2405.21060, section 2). What is written does not depend on the state, so there is nothing to solve.
With `G_i` the sum of `dt A` over node `i` and its ancestors, and `P_ij = exp(G_i - G_j)` where `j` is `i` or an
ancestor of it and 0 elsewhere,

    Y = exp(G) (C S_0^T) + [(C_i . B_j) P_ij] (dt x) + D x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .path_state import PathFactors, TreePaths, path_decay


def tree_mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    paths: TreePaths,
    initial_state: Tensor,
    D: Tensor | None = None,
) -> tuple[Tensor, PathFactors]:
    """Outputs of all nodes of a tree, and the factors from which any path's state can be made.

    Args:
        hidden_states: `x`, `(batch, n, heads, rows)`, any floating dtype; computed in float32.
        dt: `(batch, n, heads)`, the step, bias and softplus applied; positive.
        A: `(heads,)`, negative.
        B, C: `(batch, n, groups, columns)`; `heads` is a multiple of `groups`, and a group's heads stand together.
        paths: Those of the trees.
        initial_state: `(batch, heads, rows, columns)`, the state above the root.
        D: `(heads,)`, what of `x` goes past the state; None for nothing.

    Returns:
        `(batch, n, heads, rows)`, contiguous, in the dtype of `hidden_states`, and the factors.
    """
    num_heads, num_groups = hidden_states.shape[2], B.shape[2]
    inputs = hidden_states.float()
    step = dt.float()
    log_decay = step * A.float()
    written = (inputs * step[..., None]).transpose(1, 2)
    keys, queries = (vectors.float().transpose(1, 2) for vectors in (B, C))

    between, from_root = path_decay(log_decay, paths)
    attention = (queries @ keys.transpose(-1, -2)).repeat_interleave(num_heads // num_groups, dim=1) * between
    queries = queries.repeat_interleave(num_heads // num_groups, dim=1)
    from_state = queries @ initial_state.float().transpose(-1, -2)
    output = torch.addcmul(attention @ written, from_root, from_state).transpose(1, 2)
    if D is not None:
        output = output + D.float()[:, None] * inputs
    factors = PathFactors(log_decay.transpose(1, 2)[..., None], written, keys)
    return output.to(hidden_states.dtype).contiguous(), factors
