"""The gated delta rule over a tree in one Triton kernel, which does what `gated_delta_rule` says.

A program does some of the columns of one head's values. Where row `i` of `L` is zero but for the ancestors of
node `i`, `(I + L)^-1 R` is what sweeps `U = R - L U` from `U = R` on give, as many as the tree is deep: each makes the
nodes of one level right (forward substitution by level).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .path_state import LOWEST_LOG_DECAY

# Channels of keys, and nodes, that are multiplied at once.
STEP = 32
_LOWEST_LOG_DECAY = tl.constexpr(LOWEST_LOG_DECAY)


@triton.jit
def _kernel(
    query,
    key,
    value,
    log_decay,
    strength,
    ancestors,
    state,
    output,
    kept_keys,
    updates,  # fmt: skip
    num_nodes,
    key_dim,
    value_dim,
    num_heads,
    groups,
    scale,  # fmt: skip
    query_row,
    query_node,
    query_head,
    key_row,
    key_node,
    key_head,
    value_row,
    value_node,
    value_head,  # fmt: skip
    decay_row,
    decay_node,
    decay_head,
    strength_row,
    strength_node,
    strength_head,  # fmt: skip
    NORMALISED: tl.constexpr,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,  # fmt: skip
):
    row, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    group_head = head // groups
    nodes, steps = tl.arange(0, NODES), tl.arange(0, STEP)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_node, is_column = nodes < num_nodes, columns < value_dim
    is_value = is_node[:, None] & is_column[None, :]
    query += row * query_row + group_head * query_head
    key += row * key_row + group_head * key_head
    ancestors += row * num_nodes * num_nodes
    state += (row * num_heads + head) * key_dim * value_dim

    # Products of queries and keys with keys and with the state, and their norms.
    query_keys = tl.zeros((NODES, NODES), tl.float32)
    key_keys = tl.zeros((NODES, NODES), tl.float32)
    query_state = tl.zeros((NODES, COLUMNS), tl.float32)
    key_state = tl.zeros((NODES, COLUMNS), tl.float32)
    query_norm = tl.zeros((NODES,), tl.float32)
    key_norm = tl.zeros((NODES,), tl.float32)
    for first in range(0, key_dim, STEP):
        channels = first + steps
        is_channel = channels < key_dim
        is_entry = is_node[:, None] & is_channel[None, :]
        queries = tl.load(query + nodes[:, None] * query_node + channels[None, :], is_entry, 0.0).to(tl.float32)
        keys = tl.load(key + nodes[:, None] * key_node + channels[None, :], is_entry, 0.0).to(tl.float32)
        of_state = tl.load(
            state + channels[:, None] * value_dim + columns[None, :], is_channel[:, None] & is_column[None, :], 0.0
        ).to(tl.float32)
        query_keys = tl.dot(queries, tl.trans(keys), query_keys, input_precision="ieee")
        key_keys = tl.dot(keys, tl.trans(keys), key_keys, input_precision="ieee")
        query_state = tl.dot(queries, of_state, query_state, input_precision="ieee")
        key_state = tl.dot(keys, of_state, key_state, input_precision="ieee")
        query_norm += tl.sum(queries * queries, 1)
        key_norm += tl.sum(keys * keys, 1)
    query_scale = tl.full((NODES,), 1.0, tl.float32)
    key_scale = tl.full((NODES,), 1.0, tl.float32)
    if NORMALISED:
        query_scale = 1.0 / tl.sqrt(query_norm + 1e-6)
        key_scale = 1.0 / tl.sqrt(key_norm + 1e-6)

    # Sums of decays: of whole paths, and over the nodes from below `j` down to `i`.
    between = tl.zeros((NODES, NODES), tl.float32)
    of_path = tl.zeros((NODES,), tl.float32)
    for first in range(0, num_nodes, STEP):
        some = first + steps
        is_some = some < num_nodes
        decays = tl.load(log_decay + row * decay_row + head * decay_head + some * decay_node, is_some, 0.0)
        decays = tl.maximum(decays.to(tl.float32), _LOWEST_LOG_DECAY)
        above = tl.load(
            ancestors + nodes[:, None] * num_nodes + some[None, :], is_node[:, None] & is_some[None, :], 0
        ).to(tl.float32)
        below = tl.load(
            ancestors + some[:, None] * num_nodes + nodes[None, :],
            is_some[:, None] & is_node[None, :] & (some[:, None] > nodes[None, :]),
            0,
        ).to(tl.float32)
        along = above * decays[None, :]
        of_path += tl.sum(along, 1)
        between = tl.dot(along, below, between, input_precision="ieee")
    is_above = tl.load(
        ancestors + nodes[:, None] * num_nodes + nodes[None, :], is_node[:, None] & is_node[None, :], 0
    ).to(tl.int1)
    between = tl.where(is_above, tl.exp(between), 0.0)
    from_root = tl.exp(of_path)

    write = tl.load(strength + row * strength_row + head * strength_head + nodes * strength_node, is_node, 0.0)
    write = write.to(tl.float32)
    values = tl.load(
        value + row * value_row + head * value_head + nodes[:, None] * value_node + columns[None, :], is_value, 0.0
    ).to(tl.float32)
    written = write[:, None] * (values - (from_root * key_scale)[:, None] * key_state)
    lower = key_keys * between * (write * key_scale)[:, None] * key_scale[None, :]
    lower = tl.where(nodes[:, None] > nodes[None, :], lower, 0.0)
    solved = written
    depth = tl.max(tl.sum(is_above.to(tl.int32), 1)) - 1
    for _ in range(0, depth):
        solved = written - tl.dot(lower, solved, input_precision="ieee")
    seen = query_keys * between * query_scale[:, None] * key_scale[None, :]
    result = (from_root * query_scale)[:, None] * query_state + tl.dot(seen, solved, input_precision="ieee")

    place = (row * num_nodes + nodes[:, None]) * num_heads + head
    tl.store(output + place * value_dim + columns[None, :], (scale * result).to(output.dtype.element_ty), is_value)
    place = (row * num_heads + head) * num_nodes + nodes[:, None]
    tl.store(updates + place * value_dim + columns[None, :], solved, is_value)
    if (tl.program_id(1) == 0) & (head % groups == 0):
        place = (row * (num_heads // groups) + group_head) * num_nodes + nodes[:, None]
        for first in range(0, key_dim, STEP):
            channels = first + steps
            is_entry = is_node[:, None] & (channels < key_dim)[None, :]
            keys = tl.load(key + nodes[:, None] * key_node + channels[None, :], is_entry, 0.0).to(tl.float32)
            tl.store(kept_keys + place * key_dim + channels[None, :], keys * key_scale[:, None], is_entry)


def form_of(query: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What there is one compiled kernel for."""
    nodes, columns = _block_sizes(value)
    return "gated delta rule", query.device, query.dtype, query.shape[-1], value.shape[-1], nodes, columns


def _block_sizes(value: Tensor) -> tuple[int, int]:
    """Nodes and columns of values that a program has."""
    return (
        max(16, triton.next_power_of_2(value.shape[1])),
        max(16, min(32, triton.next_power_of_2(value.shape[-1]))),
    )


def fused_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    ancestor_mask: Tensor,
    initial_state: Tensor,
    is_normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of all nodes, and the normalised keys and the written values for the commit.

    Args:
        query, key, value, g, beta, initial_state: As of `tree_gated_delta_rule`, for at most 128 nodes.
        ancestor_mask: `(batch, n, n)` bool, nodes in topological order.
        is_normalised: Whether queries and keys are L2-normalised first.

    Returns:
        `(batch, n, heads, d_v)` in the dtype of `query`, `(batch, key_heads, n, d_k)` float32 and `(batch, heads, n,
        d_v)` float32.
    """
    batch_size, num_nodes, num_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    query, key, value = (
        vectors if vectors.stride(-1) == 1 else vectors.contiguous() for vectors in (query, key, value)
    )
    state, mask = initial_state.contiguous(), ancestor_mask.contiguous().view(torch.uint8)
    output = query.new_empty((batch_size, num_nodes, num_heads, value_dim))
    kept_keys = query.new_empty((batch_size, key_heads, num_nodes, key_dim), dtype=torch.float32)
    updates = query.new_empty((batch_size, num_heads, num_nodes, value_dim), dtype=torch.float32)
    nodes, columns = _block_sizes(value)
    launch: Any = _kernel[batch_size * num_heads, triton.cdiv(value_dim, columns)]
    launch(
        *(query, key, value, g, beta, mask, state, output, kept_keys, updates),
        *(num_nodes, key_dim, value_dim, num_heads, num_heads // key_heads, key_dim**-0.5),
        *(stride for vectors in (query, key, value, g, beta) for stride in vectors.stride()[:3]),
        NORMALISED=is_normalised,
        NODES=nodes,
        COLUMNS=columns,
        STEP=STEP,
        num_warps=4 if nodes <= 32 else 8,
    )
    return output, kept_keys, updates
