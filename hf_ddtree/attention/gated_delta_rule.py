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

from . import fused
from .path_state import PathFactors, TreePaths, path_decay

# Most nodes that the kernel takes, whose products with each other fit into a processor's registers.
MOST_FUSED_NODES = 128


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

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        return _gated_delta_rule(query, key, value, g, beta, paths, initial_state, use_qk_l2norm_in_kernel)

    if fused.can_run(query.device) and value.shape[1] <= MOST_FUSED_NODES:
        from .fused_gated_delta import form_of, fused_gated_delta_rule

        def by_kernel() -> tuple[Tensor, Tensor, Tensor]:
            return fused_gated_delta_rule(
                query, key, value, g, beta, paths.ancestor_mask, initial_state, use_qk_l2norm_in_kernel
            )

        output, keys, updates = fused.checked(form_of(query, value), by_kernel, plain)
    else:
        output, keys, updates = plain()
    return output, PathFactors(g.float().transpose(1, 2)[..., None], keys, updates)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    paths: TreePaths,
    initial_state: Tensor,
    is_normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By operations of PyTorch: the outputs, the normalised keys `(batch, key_heads, n, d_k)`, and the written values
    `(batch, heads, n, d_v)`."""
    batch_size, num_nodes, num_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    groups = num_heads // key_heads
    # Queries and keys meet the same matrices, so both go through them as one.
    query_key = torch.cat((query, key), dim=1).float().transpose(1, 2)
    if is_normalised:
        query_key = query_key * torch.rsqrt((query_key * query_key).sum(-1, keepdim=True) + 1e-6)
    keys = query_key[:, :, num_nodes:].contiguous()
    values = value.float().transpose(1, 2)
    strength = beta.float().transpose(1, 2)[..., None]
    between, from_root = path_decay(g, paths)

    products = (query_key @ keys.mT).view(batch_size, key_heads, 1, 2, num_nodes, num_nodes)
    products = products * between.view(batch_size, key_heads, groups, 1, num_nodes, num_nodes)
    attention, of_keys = products.flatten(1, 2).unbind(2)
    if groups > 1:
        query_key = query_key.repeat_interleave(groups, dim=1)
    of_state = (query_key @ initial_state.float()).view(batch_size, num_heads, 2, num_nodes, value_dim)
    from_state, predicted = (of_state * from_root[:, :, None]).unbind(2)
    updates = torch.linalg.solve_triangular(
        strength * of_keys, strength * (values - predicted), upper=False, unitriangular=True
    )
    output = torch.baddbmm(
        from_state.flatten(0, 1),
        attention.flatten(0, 1),
        updates.flatten(0, 1),
        beta=key_dim**-0.5,
        alpha=key_dim**-0.5,
    )
    output = output.view(batch_size, num_heads, num_nodes, value_dim)
    return output.transpose(1, 2).to(query.dtype), keys, updates
