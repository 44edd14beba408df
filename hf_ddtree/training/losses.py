"""What a block's slots are trained on: the loss of a slot, and how much each position of a block weighs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["cross_entropy", "total_variation", "lk"]
LOSSES: tuple[str, ...] = get_args(LossName)
WeightsName = Literal["d_pace", "decay", "uniform"]
WEIGHTS: tuple[str, ...] = get_args(WeightsName)


def slot_losses(
    logits: Tensor,
    labels: Tensor,
    truth: Tensor | None = None,
    loss: LossName = "cross_entropy",
    distribution_share: float = 0.0,
    lk_eta: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """The loss of each slot against what follows.

    With `q` the drafter's distribution and `p` what it is compared with, the overlap is `a = sum min(p, q)`, the
    probability that a token drawn from `q` is accepted, and

        cross_entropy      - sum p log q
        total_variation    1 - a
        lk                 l KL(p, q) + (1 - l) (1 - a), where l = exp(-eta a) is held fixed
                           (LK losses, arXiv:2602.23881)

    `p` is the token that follows, or `(1 - s)` of it and `s` of the target's distribution.

    Args:
        logits: `(..., vocab)`, the drafter's, any floating dtype.
        labels: `(...)` int64, the tokens that follow.
        truth: `(..., vocab)`, the target's logits; needed if `distribution_share` is above 0.
        loss: Which loss.
        distribution_share: `s`.
        lk_eta: `eta`.

    Returns:
        `(...)` float32 each: the losses, and `a`, which carries no gradient.
    """
    log_q = logits.float().log_softmax(dim=-1)
    of_label = log_q.gather(-1, labels[..., None])[..., 0]
    if distribution_share == 0 or truth is None:
        hard = of_label.exp()
        if loss == "cross_entropy":
            return -of_label, hard.detach()
        tv, divergence, overlap = 1 - hard, -of_label, hard.detach()
    else:
        p = truth.float().softmax(dim=-1) * distribution_share
        p = p.scatter_add(-1, labels[..., None], torch.full_like(p[..., :1], 1 - distribution_share))
        shared = torch.minimum(p, log_q.exp()).sum(dim=-1)
        if loss == "cross_entropy":
            return -(p * log_q).sum(dim=-1), shared.detach()
        tv, overlap = 1 - shared, shared.detach()
        divergence = F.kl_div(log_q, p, reduction="none").sum(dim=-1)
    if loss == "total_variation":
        return tv, overlap
    share = torch.exp(-lk_eta * overlap)
    return share * divergence + (1 - share) * tv, overlap


def position_weights(
    of_label: Tensor,
    counts: Tensor,
    weights: WeightsName = "d_pace",
    smoothing: float = 0.5,
    decay: float = 4.0,
) -> Tensor:
    """How much each slot of a block weighs. A late slot matters only when all before it are right.

    With `q_k` the drafter's probability of the token at offset `k`,

        d_pace     w_k = sum over j >= k of prod over i <= j of ((1 - smoothing) q_i + smoothing)
                   (D-PACE, arXiv:2605.18810): what the logarithm of q_k adds to a smoothed accepted length. So the
                   weights move to late slots as early ones are learnt.
        decay      w_k = exp(-(k - 1) / decay)     (DFlash, arXiv:2602.06036)
        uniform    w_k = 1

    Args:
        of_label: `(..., depth)`, `q`.
        counts: `(..., depth)` bool: the slots that count, true up to some depth.
        weights: Which weights.
        smoothing: Between 0 and 1; what an unlikely token leaves of the slots after it.
        decay: In slots.

    Returns:
        `(..., depth)` float32 without a gradient, 0 where nothing counts.
    """
    q = of_label.detach().float()
    if weights == "d_pace":
        reached = ((1 - smoothing) * q + smoothing).cumprod(dim=-1) * counts
        return reached.flip(-1).cumsum(dim=-1).flip(-1) * counts
    if weights == "decay":
        return torch.exp(-torch.arange(q.shape[-1], device=q.device) / decay) * counts
    return counts.float()
