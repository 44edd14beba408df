"""The interface of everything that proposes trees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from ..draft_tree import DraftTree


@dataclass(frozen=True)
class DraftContext:
    """What a generator may know when it proposes the trees of a round.

    Attributes:
        input_ids: `(batch, length)` int64, every token so far; the last one of each row is its root, which the target
            has not seen yet. Rows that are behind are padded at the left.
        root_positions: For each row, the number of tokens that the target has seen, padding included. More than
            `length - 1` after a prompt of embeddings.
        features: `(batch, tokens, len(feature_layers) * hidden_size)`, what the target's hooked layers gave for the
            tokens committed since the last call, aligned at the left. None if the generator hooks no layers, or is
            asked outside of tree decoding.
        num_features: For each row, how many entries of `features` are its own; they end right before its root.
    """

    input_ids: Tensor
    root_positions: Sequence[int]
    features: Tensor | None = None
    num_features: Sequence[int] = ()


class TreeCandidateGenerator(CandidateGenerator):
    """Proposes a token tree a row and round.

    A generator that keeps something between rounds serves one `generate()` call at a time.

    Attributes:
        feature_layers: Decoder layers of the target, from 0, whose outputs the generator needs.
        build_seconds: Time spent on turning distributions into trees since the last `start`.
        num_forwards: Forwards of the drafter since the last `start`.
        state: What it knows of the sequences, for a later call that goes on with them; None if nothing.
    """

    feature_layers: tuple[int, ...] = ()
    state: Any = None
    default_budget: ClassVar[int] = 16

    def __init__(self) -> None:
        self.build_seconds = 0.0
        self.num_forwards = 0

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        """Proposes one tree a row, with the row's last token as its root and at most `budget` drafted nodes.

        Must not draw from PyTorch's default random generator: sampling with a seed would give other tokens.
        """

    def start(self, input_ids: Tensor, num_cached: int) -> None:
        """Called before the first round of a `generate()` call.

        Args:
            input_ids: `(batch, length)`, the prompts; or their part that the target has not seen, if the caller passed
                no more.
            num_cached: Number of tokens in the target's cache. The generator hears nothing more of them.
        """
        self.build_seconds = 0.0
        self.num_forwards = 0

    def finish(self, context: DraftContext) -> None:
        """Called after the last round, with what `propose` would get now."""

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The most probable chain of the proposed tree, for Transformers' own assisted decoding.

        Args:
            input_ids: `(1, length)` int64.

        Returns:
            `(1, length + drafted)`: `input_ids` and the drafted tokens; and None, as there are no draft logits, which
            makes Transformers accept a drafted token where the target chooses the same.
        """
        tree = self.propose(DraftContext(input_ids, [input_ids.shape[1] - 1]), self.default_budget)[0]
        node, tokens = 0, []
        while children := tree.children(node):
            node = max(children, key=lambda child: float(tree.log_probs[child]))
            tokens.append(int(tree.token_ids[node]))
        drafted = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat((input_ids, drafted), dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to update: what a generator learns it learns from `DraftContext`."""
