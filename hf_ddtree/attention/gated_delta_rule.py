"""The gated delta rule over a tree in one pass.

Along a path the state is `S_i = exp(g_i) (I - b_i k_i k_i^T) S_parent + b_i k_i v_i^T` and the output
`o_i = q_i^T S_i / sqrt(d_k)` (Gated Delta Networks, arXiv:2412.06464, equation 10). The chunked form of the rule holds
for a tree as well once the ancestor mask takes the place of the causal triangle: with `G_i` the sum of `g` over node
`i` and its ancestors, and `P_ij = exp(G_i - G_j)` where `j` is `i` or an ancestor of it and 0 elsewhere,

    U = (I + strictly_lower[b_i (k_i . k_j) P_ij])^-1 [b_i v_i - b_i exp(G_i) k_i^T S_0]
    O = exp(G) (Q S_0) + [(q_i . k_j) P_ij] U

and the state after a path `p` that ends in node `l` is

    S = exp(G_l) S_0 + sum over j in p of exp(G_l - G_j) k_j u_j^T.

A node has one `u` whatever path goes on below it, so nothing is computed again when the path is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .path_state import PathFactors, TreePaths, path_decay


def tree_gated_delta_rule(
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
        query, key: `(batch, n, key_heads, d_k)`, any floating dtype; computed in float32.
        value: `(batch, n, heads, d_v)`; `heads` is a multiple of `key_heads`.
        g: `(batch, n, heads)`, logarithm of the decay, at most 0.
        beta: `(batch, n, heads)`, write strength.
        paths: Those of the trees.
        initial_state: `(batch, heads, d_k, d_v)`, the state above the root.
        use_qk_l2norm_in_kernel: Whether to L2-normalise queries and keys.

    Returns:
        `(batch, n, heads, d_v)` in the dtype of `query`, and the factors.
    """
    batch_size, num_nodes, num_heads, value_dim = value.shape
    # Queries and keys meet the same matrices, so both go through them as one.
    query_key = torch.cat((query, key), dim=1).float().transpose(1, 2)
    if use_qk_l2norm_in_kernel:
        query_key = query_key * torch.rsqrt((query_key * query_key).sum(-1, keepdim=True) + 1e-6)
    if num_heads > key.shape[2]:
        query_key = query_key.repeat_interleave(num_heads // key.shape[2], dim=1)
    # Rows and heads as one dimension: all that follows are products of batches of matrices.
    query_key = query_key.flatten(0, 1)
    keys = query_key[:, num_nodes:]
    values = value.float().transpose(1, 2).flatten(0, 1)
    strength = beta.float().transpose(1, 2).flatten(0, 1)[..., None]
    between, from_root = (decay.flatten(0, 1) for decay in path_decay(g, paths))

    products = torch.bmm(query_key, keys.mT).view(-1, 2, num_nodes, num_nodes) * between[:, None]
    of_state = torch.bmm(query_key, initial_state.float().flatten(0, 1)).view(-1, 2, num_nodes, value_dim)
    from_state, predicted = (of_state * from_root[:, None]).unbind(1)
    updates = torch.linalg.solve_triangular(
        strength * products[:, 1], strength * (values - predicted), upper=False, unitriangular=True
    )
    scale = key.shape[-1] ** -0.5
    output = torch.baddbmm(from_state, products[:, 0], updates, beta=scale, alpha=scale)
    output, keys, updates = (part.unflatten(0, (batch_size, num_heads)) for part in (output, keys, updates))
    factors = PathFactors(g.float().transpose(1, 2)[..., None], keys, updates)
    return output.transpose(1, 2).to(query.dtype), factors
