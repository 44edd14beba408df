"""The loss of a drafter over many blocks, in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashDraftModel
from .anchors import block_masks, block_positions, labels_behind
from .config import TrainingConfig
from .documents import Rows
from .losses import position_weights, slot_losses
from .teacher_forcing import logits_given_tokens


@dataclass
class BlockStatistics:
    """What a forward tells besides its loss; all can be added up.

    Attributes:
        loss: `()`, the sum over slots of the weighted losses, without a gradient.
        negative_log_likelihood: `()`, the sum over slots of that of the token that follows, in nats.
        num_slots: `()`, the slots that count.
        reached: `(depth,)`, in how many blocks the tokens before a slot are all right and the slot counts.
        right: `(depth,)`, in how many of them the slot's best token is right as well.
    """

    loss: Tensor
    negative_log_likelihood: Tensor
    num_slots: Tensor
    reached: Tensor
    right: Tensor

    def packed(self) -> Tensor:
        """All of them in a row, to be added up over processes."""
        parts = (self.loss, self.negative_log_likelihood, self.num_slots, self.reached, self.right)
        return torch.cat([part.detach().float().flatten() for part in parts])


class _OfChunk(NamedTuple):
    """What some blocks give: the sums of `BlockStatistics`, the first with a gradient."""

    loss: Tensor
    negative_log_likelihood: Tensor
    reached: Tensor
    right: Tensor


class BlockLoss(nn.Module):
    """A drafter with what it takes from its target, and its loss.

    Args:
        drafter: The drafter, the only part that is trained.
        target_model: The target, whose embeddings and output head the drafter uses.
        config: The loss.

    Raises:
        ValueError: If the drafter has a vocabulary of its own.
    """

    def __init__(self, drafter: DFlashDraftModel, target_model: PreTrainedModel, config: TrainingConfig) -> None:
        super().__init__()
        if drafter.config.draft_vocab_size is not None:
            raise ValueError(
                f"The drafter predicts {drafter.config.draft_vocab_size} of the target's tokens alone "
                "(`draft_vocab_size`), which cannot be trained here. Train one that has the target's vocabulary."
            )
        self.drafter = drafter
        self._config = config
        # In a list, so that they are no parts of this module.
        self._of_target = [target_model.get_input_embeddings(), target_model.get_output_embeddings()]

    def forward(
        self, rows: Rows, features: Tensor, anchors: Tensor, is_used: Tensor, target_logits: Tensor | None = None
    ) -> tuple[Tensor, BlockStatistics]:
        """Drafts a block at every root.

        Args:
            rows: The rows.
            features: `(rows, length, features)`, of the target's layers that the drafter reads.
            anchors, is_used: `(rows, blocks)`, of `sample_anchors`.
            target_logits: `(rows, length, vocab)`, what the target predicts after each token, if the loss needs it.

        Returns:
            `()`, the sum over all slots of their weighted losses; and what else there is to tell.
        """
        return self.compare(self.draft(rows, features, anchors), rows, anchors, is_used, target_logits)

    def compare(
        self, hidden_states: Tensor, rows: Rows, anchors: Tensor, is_used: Tensor, target_logits: Tensor | None = None
    ) -> tuple[Tensor, BlockStatistics]:
        """What `forward` gives, of what `draft` has given."""
        depth = self.drafter.config.draft_length
        places, labels, counts = labels_behind(rows, anchors, is_used, depth)
        row, block = is_used.nonzero(as_tuple=True)
        if len(row) == 0:  # a block that does not count, so that each weight has a gradient, as other processes expect
            row = block = torch.zeros(1, dtype=torch.int64, device=is_used.device)
        hidden_states, labels, counts = hidden_states[row, block], labels[row, block], counts[row, block]
        before = rows.token_ids[row[:, None], places[row, block] - 1]
        truth = None if target_logits is None else (target_logits, row[:, None], places[row, block] - 1)
        return self.compare_blocks(hidden_states, labels, before, counts, truth)

    def compare_blocks(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        before: Tensor,
        counts: Tensor,
        truth: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, BlockStatistics]:
        """The same of some blocks alone.

        Args:
            hidden_states: `(blocks, depth, hidden_size)`.
            labels, before, counts: `(blocks, depth)`: the tokens that follow, those before them, and what counts.
            truth: The target's logits of rows, and the row and the place where each slot's are.
        """
        at_once = max(self._config.logits_at_once // (labels.shape[1] * self.drafter.config.vocab_size), 1)
        in_chunks = len(labels) > at_once
        sums: list[_OfChunk] = []
        for at in range(0, len(labels), at_once):
            here = slice(at, at + at_once)
            true_logits = None if truth is None else truth[0][truth[1][here], truth[2][here]]
            arguments = hidden_states[here], labels[here], before[here], counts[here], true_logits
            if in_chunks and torch.is_grad_enabled():
                sums.append(_OfChunk(*checkpoint(self._of_chunk, *arguments, use_reentrant=False)))
            else:
                sums.append(self._of_chunk(*arguments))
        loss, nll, reached, right = (torch.stack(parts).sum(0) for parts in zip(*sums))
        return loss, BlockStatistics(loss.detach(), nll, counts.sum(), reached, right)

    def draft(self, rows: Rows, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of the slots that predict, `(rows, blocks, draft_length, hidden_size)`."""
        drafter, config = self.drafter, self.drafter.config
        block = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=anchors.device)
        block[..., 0] = rows.token_ids.gather(1, anchors)
        hidden_states = drafter(
            drafter.embed(block.flatten(1), self._of_target[0]),
            features.to(drafter.device, drafter.dtype),
            block_positions(rows, anchors, config.block_size),
            attention_mask=block_masks(config, rows.documents, anchors),
        )
        return hidden_states.unflatten(1, (-1, config.block_size))[:, :, config.first_slot :]

    def _of_chunk(
        self, hidden_states: Tensor, labels: Tensor, before: Tensor, counts: Tensor, truth: Tensor | None
    ) -> _OfChunk:
        config, (embeddings, head) = self._config, self._of_target
        logits = self.drafter.compute_logits(hidden_states, head)
        given, log_confidence = logits_given_tokens(self.drafter, hidden_states, logits, before, embeddings)
        labels, counts = labels.to(logits.device), counts.to(logits.device)
        loss = logits.new_zeros((), dtype=torch.float32)
        shares = [(logits, 1.0)]
        if given is not None:
            shares = [(logits, 1 - config.conditional_share), (given, config.conditional_share)]
        for scores, share in shares:
            losses, overlap = slot_losses(scores, labels, truth, config.loss, config.distribution_share, config.lk_eta)
            of_label = (scores.detach().float().gather(-1, labels[..., None])[..., 0]) - (
                scores.detach().float().logsumexp(dim=-1)
            )
            weights = position_weights(of_label.exp(), counts, config.weights, config.smoothing, config.position_decay)
            loss = loss + share * (losses * weights).sum()
        if log_confidence is not None:  # the probability that a token is accepted, which is the overlap
            accepted = log_confidence.to(overlap)
            rejected = torch.log(-torch.expm1(accepted.clamp(max=-1e-6)))
            loss = loss - ((overlap * accepted + (1 - overlap) * rejected) * weights).sum()
        # What a chain drafts: the best tokens given those before.
        is_right = (scores.detach().argmax(dim=-1) == labels) & counts
        right = is_right.int().cumprod(dim=-1)
        reached = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), dim=-1) * counts
        return _OfChunk(loss, -(of_label * counts).sum(), reached.sum(0).float(), right.sum(0).float())
