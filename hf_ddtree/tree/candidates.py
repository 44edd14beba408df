"""A drafter's best tokens per depth, from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..validation import require_positive_int


def best_tokens(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens at each depth, with one top-k and one log-normaliser, on the device of the logits.

    Args:
        logits: `(..., depth, vocab)`, any floating dtype. Leading dimensions are rows of a batch.
        top_k: Number of candidates per depth; a smaller vocabulary gives as many as it has. A tree of `budget` nodes
            never holds a token that is not among the `budget` best of its depth.

    Returns:
        `log_probs (..., depth, k)` float32, descending along `k`, normalised over the whole vocabulary, -inf where
        the logits give no distribution, and
        `token_ids (..., depth, k)` int64.

    Raises:
        ValueError: If `top_k` is no integer of at least 1.
    """
    require_positive_int("top_k", top_k)
    log_probs, token_ids = logits.detach().float().log_softmax(dim=-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    return _or_impossible(log_probs), token_ids


def top_candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`best_tokens` on the CPU, with one transfer, for `build_tree`."""
    log_probs, token_ids = on_host(*best_tokens(logits, top_k))
    return log_probs, token_ids


def conditional_candidates(
    log_probs: Tensor, token_ids: Tensor, pair_scores: Tensor, power: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions given the token before, from `best_tokens` and scores of pairs of neighbours, on their device.

    The score of a pair is added to the logit of its second token. The scores of a predecessor's candidates are
    raised to a power and normalised together with the mass outside of the candidates, which no pair changes.

    Args:
        log_probs, token_ids: `(..., depth, k)`, the candidates of each depth.
        pair_scores: `(..., depth, k, k)`, by predecessor, then by token. Predecessors are the candidates of the depth
            above in their order; at the first depth only the first row counts, which is that of the root.
        power: What the probabilities are raised to before they are normalised.

    Returns:
        `log_probs (..., depth, k, k)` float32, descending along the last dimension, `token_ids` int64 and
        `next_state` int64 of the same shape, as `build_tree` takes them. A prefix's state is the place of its last
        token among its depth's candidates.
    """
    scores = log_probs[..., None, :] + pair_scores
    outside = (1.0 - log_probs.exp().sum(dim=-1)).clamp(min=0.0).log()[..., None, None]
    scores = torch.cat((scores, outside.expand_as(scores[..., :1])), dim=-1)
    scores = _or_impossible((power * scores).log_softmax(dim=-1)[..., :-1])
    order = _descending_order(scores)
    return scores.gather(-1, order), token_ids[..., None, :].expand_as(order).gather(-1, order), order


def _descending_order(scores: Tensor) -> Tensor:
    """Where the scores stand by falling value along the last dimension; with NumPy where that is faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy((-scores.numpy()).argsort(axis=-1))
    return scores.argsort(dim=-1, descending=True)


def _or_impossible(log_probs: Tensor) -> Tensor:
    """Probability zero where there is none."""
    return log_probs.nan_to_num(nan=-float("inf"), neginf=-float("inf"))


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one device, float32 or int64 that fit 32 bits, on the CPU, with one transfer."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    is_float = [tensor.is_floating_point() for tensor in tensors]
    packed = torch.cat(
        [
            (tensor.contiguous().view(torch.int32) if is_real else tensor.int()).flatten()
            for tensor, is_real in zip(tensors, is_float)
        ]
    ).cpu()
    parts = (
        part.view(tensor.shape) for part, tensor in zip(packed.split([tensor.numel() for tensor in tensors]), tensors)
    )
    return [part.view(torch.float32) if is_real else part.long() for part, is_real in zip(parts, is_float)]
