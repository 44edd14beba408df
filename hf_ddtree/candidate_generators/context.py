"""What a generator may know when it proposes the trees of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target.committed_cache import CommittedCache
from ..tree.draft_tree import DraftTree


@dataclass(frozen=True)
class DraftContext:
    """What a generator may know when it proposes the trees of a round.

    Attributes:
        input_ids: `(batch, length)` int64, every token so far; the last one of each row is its root, which the target
            has not seen yet. Shorter rows are padded at the left.
        root_positions: For each row, the number of tokens that the target has seen, padding included. More than
            `length - 1` after a prompt of embeddings.
        features: `(batch, tokens, len(feature_layers) * hidden_size)`, what the target's hooked layers gave for the
            tokens committed since the last call, aligned at the left; or what the generator's `reduce_features` has
            made of them. None if the generator hooks no layers, or is asked outside of tree decoding.
        num_features: For each row, how many entries of `features` are its own; they end right before its root.
        attention_mask: `(batch, length)` bool, False where `input_ids` hold padding. None if they hold none, or
            only in front of shorter rows.
        emitted: For each row, the tokens that it has emitted since the last call; none if it had finished. Empty
            before there was a round, or outside of tree decoding.
        last_tokens: For each row the last of `input_ids`, if the host knows them; see `roots`.
        target_cache: What the target keeps of the tokens that it has seen, to be read alone. None outside of tree
            decoding.
        tokens_left: Most tokens that a row may still emit, so that no tree need be as deep; None if it is not known.
        do_sample: Whether the target's tokens are sampled.
    """

    input_ids: Tensor
    root_positions: Sequence[int]
    features: Tensor | None = None
    num_features: Sequence[int] = ()
    attention_mask: Tensor | None = None
    emitted: Sequence[Sequence[int]] = ()
    last_tokens: Sequence[int] = ()
    target_cache: CommittedCache | None = None
    tokens_left: int | None = None
    do_sample: bool = False

    @property
    def roots(self) -> list[int]:
        """The token of each row's root; without asking the device of `input_ids` if the host knows them."""
        return list(self.last_tokens) or self.input_ids[:, -1].tolist()

    def newest(self, row: int, most: int) -> list[int]:
        """The last tokens of a row, at most so many; without asking the device if the host knows them."""
        emitted = self.emitted[row] if self.emitted else ()
        if most <= len(emitted):
            return list(emitted[len(emitted) - most :])
        return self.sequence(row)[-most:].tolist()

    def sequence(self, row: int) -> Tensor:
        """`(length,)` int64, a row's tokens without padding, on the CPU."""
        if self.attention_mask is not None:
            return self.input_ids[row, self.attention_mask[row]].cpu()
        return self.input_ids[row, max(self.root_positions) - self.root_positions[row] :].cpu()


def join_features(rounds: Sequence[tuple[Tensor | None, Sequence[int]]]) -> tuple[Tensor | None, list[int]]:
    """The features of several rounds, one after the other in each row.

    Args:
        rounds: For each round the `features` and `num_features` of a `DraftContext`.

    Returns:
        The same for all of them.
    """
    counts = [sum(of_row) for of_row in zip(*(counts for _, counts in rounds))]
    parts = [features for features, _ in rounds if features is not None]
    if not parts:
        return None, counts
    if len(parts) == 1:
        return parts[0], counts
    if len(counts) == 1:
        return torch.cat(parts, dim=1), counts
    rows = [
        torch.cat([part[row, : count[row]] for part, (_, count) in zip(parts, rounds)]) for row in range(len(counts))
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), counts


@dataclass(frozen=True)
class VerifiedRound:
    """What came of a round, for candidate generators that learn from it.

    Attributes:
        trees: The trees that were verified, one per row; roots alone where nothing was drafted.
        logits: `(batch, n, vocab)`, what the target predicts after each node, on its device. Trees of fewer than `n`
            nodes are padded.
        paths: For each row the nodes that were accepted, from the root on; empty for a row that had finished.
    """

    trees: Sequence[DraftTree]
    logits: Tensor
    paths: Sequence[Sequence[int]]
