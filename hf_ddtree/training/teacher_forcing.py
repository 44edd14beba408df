"""What a drafter gives a slot when the tokens before it are known, for drafters that look at them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..drafters.dflash import DFlashDraftModel
from ..drafters.dflash2 import DFlash2DraftModel
from ..drafters.sequential_head import SequentialHeadDraftModel


def logits_given_tokens(
    drafter: DFlashDraftModel, hidden_states: Tensor, logits: Tensor, previous: Tensor, target_embeddings: nn.Embedding
) -> tuple[Tensor | None, Tensor | None]:
    """The slots' logits, each given the true tokens from the root to the one before it.

    Args:
        drafter: The drafter.
        hidden_states: `(blocks, depth, hidden_size)`, of the slots to predict.
        logits: `(blocks, depth, vocab)`, what the slots give by themselves.
        previous: `(blocks, depth)` int64, the tokens before the slots' own; the first is the root.
        target_embeddings: The target's input embeddings.

    Returns:
        `(blocks, depth, vocab)`, None if the drafter does not look at the tokens before; and `(blocks, depth)`, the
        logarithm of the probability that the slot's token is accepted, None if the drafter does not predict it.
    """
    if isinstance(drafter, DFlash2DraftModel):
        return _selected(drafter, hidden_states, logits, previous), None
    if not isinstance(drafter, SequentialHeadDraftModel) or not drafter.is_conditional:
        return None, None
    states = drafter.start_states(len(previous))
    corrected, confidences = [], []
    for depth in range(previous.shape[1]):
        bias, log_confidence, states = drafter.correct(
            hidden_states[:, depth], previous[:, depth], states, depth, target_embeddings
        )
        corrected.append(logits[:, depth] if bias is None else logits[:, depth] + bias.to(logits))
        confidences.append(log_confidence)
    known = [confidence for confidence in confidences if confidence is not None]
    return torch.stack(corrected, dim=1), torch.stack(known, dim=1) if known else None


def _selected(drafter: DFlash2DraftModel, hidden_states: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
    """The selector's scores added to the best candidates, the only ones that it scores while decoding."""
    selector = drafter.candidate_selector
    hidden_states = hidden_states.to(drafter.dtype)
    before = F.embedding(previous, selector.predecessor_codebook) * selector.hidden_projection(hidden_states)
    scores = (before @ selector.successor_codebook.mT).to(logits)
    candidates = logits.detach().topk(drafter.config.selector_top_k, dim=-1).indices
    return logits + scores * torch.zeros_like(scores).scatter_(-1, candidates, 1.0)
