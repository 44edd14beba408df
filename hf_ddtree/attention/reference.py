"""The recurrences as they are defined: one node at a time, from the state of its parent.

Slow and plain. Tests and benchmarks compare the operators with it; decoding never runs it. All of it computes in the
dtype of its arguments, for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def over_nodes(
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]], initial_state: Tensor, parents: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Runs a recurrence over a tree.

    Args:
        step: Gives the state after a node and the node's output, from the node and its parent's state.
        initial_state: `(heads, rows, columns)`, the state above the root.
        parents: Of each node, before its children; -1 for the root.

    Returns:
        `(n, heads, size)`, the outputs, and the state after each node.
    """
    states: list[Tensor] = []
    outputs = []
    for node, parent in enumerate(parents):
        state, output = step(node, initial_state if parent < 0 else states[parent])
        states.append(state)
        outputs.append(output)
    return torch.stack(outputs), states


def delta_rule_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule, `S' = (I - beta k k^T) exp(g) S + beta k v^T` and `o = q^T S' / sqrt(d_k)`
    (Gated Delta Networks, arXiv:2412.06464, equation 10), or of Kimi delta attention (arXiv:2510.26692), whose `g` has
    an entry per channel.

    Args:
        state: `(heads, d_k, d_v)`.
        query, key: `(heads, d_k)`, normalised where the layer does so.
        value: `(heads, d_v)`.
        g: `(heads, 1)`, or `(heads, d_k)` with a decay per channel.
        beta: `(heads,)`.

    Returns:
        The next state, and the output `(heads, d_v)`.
    """
    state = g.exp()[..., None] * state
    update = beta[:, None] * (value - (key[:, None] @ state)[:, 0])
    state = torch.baddbmm(state, key[:, :, None], update[:, None])
    return state, (query[:, None] @ state)[:, 0] * query.shape[-1] ** -0.5


def mamba2_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of Mamba-2, `S' = exp(dt A) S + dt x B^T` and `y = S' C + D x` (arXiv:2405.21060, section 2).

    Args:
        state: `(heads, rows, columns)`.
        x: `(heads, rows)`.
        dt, A: `(heads,)`.
        B, C: `(heads, columns)`.
        D: `(heads,)`, or None for nothing.

    Returns:
        The next state, and the output `(heads, rows)`.
    """
    state = (dt * A).exp()[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None]
    output = (state @ C[:, :, None])[..., 0]
    return state, output if D is None else output + D[:, None] * x
