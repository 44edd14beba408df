"""Kimi delta attention over a tree in one pass.

The gated delta rule with a decay for each key channel `c` (Kimi Linear, arXiv:2510.26692, equation 1): along a path
the state is `S_i = (I - b_i k_i k_i^T) Diag(exp(g_i)) S_parent + b_i k_i v_i^T` and the output
`o_i = q_i^T S_i / sqrt(d_k)`. The equations of `gated_delta_rule` hold with the decay inside the products of queries
and keys: with `G_i` the sum of `g` over node `i` and its ancestors, and sums over the ancestors `j` of `i` alone,

    U = (I + strictly_lower[b_i sum_c k_ic k_jc exp(G_ic - G_jc)])^-1 [b_i v_i - b_i (k_i exp(G_i))^T S_0]
    O = (Q exp(G)) S_0 + [sum_c q_ic k_jc exp(G_ic - G_jc)] U.

`exp(G_i) exp(-G_j)` would be a single matrix product, but its second factor overflows where the decay is strong. The
difference is never positive between a node and its ancestor, so it is taken first, for a block of nodes at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .path_state import LOWEST_LOG_DECAY, PathFactors, TreePaths

# Most elements of the products of queries and keys that are held at once, 256 MB in float32.
BLOCK_ELEMENTS = 2**26
COARSE_STEP = 1 / 64


def tree_kimi_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    paths: TreePaths,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, PathFactors]:
    """Outputs of all nodes of a tree, and the factors from which any path's state can be made.

    Args:
        query, key: `(batch, n, heads, d_k)`, any floating dtype; computed in float32.
        value: `(batch, n, heads, d_v)`.
        g: `(batch, n, heads, d_k)`, logarithm of the decay, at most 0.
        beta: `(batch, n, heads)`, write strength.
        paths: Those of the trees.
        initial_state: `(batch, heads, d_k, d_v)`, the state above the root.
        use_qk_l2norm_in_kernel: Whether to L2-normalise queries and keys.

    Returns:
        `(batch, n, heads, d_v)` in the dtype of `query`, and the factors.
    """
    num_nodes, key_dim = key.shape[1], key.shape[-1]
    queries, keys = (vectors.float().transpose(1, 2) for vectors in (query, key))
    if use_qk_l2norm_in_kernel:
        queries, keys = (
            vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6) for vectors in (queries, keys)
        )
    queries = queries * key_dim**-0.5
    values = value.float().transpose(1, 2)
    strength = beta.float().transpose(1, 2)[..., None]

    decay = PathDecay(g, paths)
    # Queries and keys meet the same decayed keys, so both go through them as the two columns of a matrix.
    query_key = torch.stack((queries, keys), dim=-1)
    products = keys.new_zeros((*keys.shape[:2], num_nodes, num_nodes, 2))
    block = max(1, BLOCK_ELEMENTS // max(1, keys.numel()))
    for first in range(0, num_nodes, block):
        nodes = slice(first, min(first + block, num_nodes))
        decayed_keys = decay.between(nodes).mul_(keys[:, :, None, : nodes.stop])
        products[:, :, nodes, : nodes.stop] = decayed_keys @ query_key[:, :, nodes]
    attention, key_products = products.unbind(-1)

    from_root = decay.from_root()
    updates = torch.linalg.solve_triangular(
        strength * key_products,
        strength * (values - (keys * from_root) @ initial_state.float()),
        upper=False,
        unitriangular=True,
    )
    output = attention @ updates + (queries * from_root) @ initial_state.float()
    factors = PathFactors(g.float().transpose(1, 2), keys, updates)
    return output.transpose(1, 2).to(query.dtype), factors


class PathDecay:
    """Sums of logarithmic decays along the paths of a tree, precise between nodes of any depth.

    The decay from node `j` down to node `i` is the difference of two sums from the root on. After a strong decay both
    are large and a small difference of them would be noise. So the sums are kept in two parts, one of multiples of
    1/64, which float32 adds and subtracts without error, and one of what is left, which stays small.

    Args:
        log_decay: `(batch, n, ...)`, at most 0.
        paths: Those of the trees.
    """

    def __init__(self, log_decay: Tensor, paths: TreePaths) -> None:
        self._visible = paths.ancestor_mask[:, None, :, :, None]
        bounded = log_decay.float().clamp(min=LOWEST_LOG_DECAY)
        coarse = (bounded / COARSE_STEP).round() * COARSE_STEP
        parts = torch.stack((coarse, bounded - coarse)).flatten(3)
        sums = (paths.ancestors[..., 1:] @ parts).view(2, *log_decay.shape)
        self._coarse, self._fine = sums.transpose(2, 3)

    def from_root(self) -> Tensor:
        """`(batch, heads, n, ...)`: decay of each node's whole path, the node's own included."""
        return (self._coarse + self._fine).exp()

    def between(self, nodes: slice = slice(None)) -> Tensor:
        """Decay from each node `j` down to each of `nodes`, 0 where `j` is no ancestor.

        Args:
            nodes: Which nodes `i`; ancestors are looked for among those up to the last of them.

        Returns:
            `(batch, heads, len(nodes), last + 1, ...)`.
        """
        ancestors = slice(nodes.stop)
        difference = self._coarse[:, :, nodes, None] - self._coarse[:, :, None, ancestors]
        difference += self._fine[:, :, nodes, None] - self._fine[:, :, None, ancestors]
        return difference.masked_fill_(~self._visible[:, :, nodes, ancestors], float("-inf")).exp_()
