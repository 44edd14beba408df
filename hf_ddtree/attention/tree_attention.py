"""Attention of a tree's nodes to the cached tokens and to each other, which reads every key and value once.

The query heads that share a key head become one head with as many times the queries, so keys and values need no copy
for each query head. Where every node sees the whole context, attention can go in two parts: the context without a
mask, by a kernel that also gives the logarithm of the sum of its exponentiated scores, and the nodes among themselves.
With `l` that logarithm and `o` the output of each part, the output over all keys is

    o = w o_context + (1 - w) o_nodes,    w = sigmoid(l_context - l_nodes),

the merging of partial softmaxes (Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1). A learned
sink is a key without a value, so it scales the output by `sigmoid(l - sink)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softplus

from ..interop.attention_kernels import open_kernel
from .packed_mask import PackedMask

# Most scores that are held at once where no kernel does the whole of it, 64 MB in float32.
MOST_SCORES = 2**24


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all nodes of a tree.

    Args:
        query: `(batch, heads, n, d_k)`, any floating dtype.
        key: `(batch, key_heads, keys, d_k)`, those of the nodes after the cached ones; `heads` is a multiple of
            `key_heads`, and the heads of a group stand together.
        value: `(batch, key_heads, keys, d_v)`.
        mask: Made for `heads / key_heads` groups.
        scaling: What the products of queries and keys are multiplied by.
        softcap: Scores `s` become `softcap * tanh(s / softcap)` before they are masked; None if they stay.
        sinks: `(heads,)`, the score of each head's sink; None without sinks.

    Returns:
        `(batch, heads, n, d_v)` in the dtype of `query`.
    """
    batch_size, num_heads, num_nodes, _ = query.shape
    key_heads = key.shape[1]
    queries = query.reshape(batch_size, key_heads, num_heads // key_heads * num_nodes, -1)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
        sinks = sinks.view(key_heads, -1, 1).expand(-1, -1, num_nodes).reshape(1, key_heads, -1, 1)
    kernel = open_kernel(queries, key, value) if mask.num_open and softcap is None else None
    if kernel is not None:
        output = _in_two_parts(kernel, queries, key, value, mask, scaling, sinks)
    elif softcap is None and sinks is None and not mask.num_open:
        output = scaled_dot_product_attention(queries, key, value, attn_mask=mask.scores, scale=scaling)
    else:
        output = _by_scores(queries, key, value, mask, scaling, softcap, sinks)
    return output.reshape(batch_size, num_heads, num_nodes, -1)


def _in_two_parts(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    of_context, log_sum = kernel(queries, key[..., : mask.num_open, :], value[..., : mask.num_open, :], scale=scaling)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = (queries @ key[..., mask.num_open :, :].mT).to(dtype) * scaling + mask.scores
    log_sum_nodes = scores.logsumexp(-1, keepdim=True)
    of_nodes = (scores - log_sum_nodes).exp_().to(value.dtype) @ value[..., mask.num_open :, :]
    ahead = log_sum.to(dtype)[..., : queries.shape[2], None] - log_sum_nodes
    output = torch.lerp(of_nodes.to(dtype), of_context.to(dtype), ahead.sigmoid())
    if sinks is not None:
        # log(exp(l_context) + exp(l_nodes)) = l_nodes + softplus(l_context - l_nodes)
        output = output * (log_sum_nodes + softplus(ahead) - sinks).sigmoid()
    return output.to(queries.dtype)


def _by_scores(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With all scores of some of the queries at a time."""
    batch_size, key_heads, num_queries, _ = queries.shape
    at_once = max(1, MOST_SCORES // (batch_size * key_heads * key.shape[2]))
    outputs = []
    for first in range(0, num_queries, at_once):
        some = slice(first, first + at_once)
        scores = (queries[:, :, some] @ key.mT).to(torch.promote_types(queries.dtype, torch.float32)) * scaling
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores[..., mask.num_open :] += mask.scores[:, :, some]
        if sinks is not None:
            sink = sinks[:, :, some].expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outputs.append(weights.to(value.dtype) @ value)
    return torch.cat(outputs, dim=2)
