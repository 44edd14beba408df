"""Trees that grow level by level, for drafters whose distributions depend on the branch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from ..tree.draft_tree import DraftTree
from ..tree.growing_tree import GrowingTree, grow_level
from ..tree.shape import TreeShape
from .base import TreeCandidateGenerator

# Levels of a tree if `draft_length` does not say how many and each costs a forward of the drafter.
DEFAULT_DRAFT_LENGTH = 5


class LevelwiseTreeCandidateGenerator(TreeCandidateGenerator):
    """Expands trees one level at a time, with a distribution for each node of the frontier."""

    default_shape: ClassVar[TreeShape] = "spine_first"

    def _new_trees(self, roots: list[int], budget: int) -> list[GrowingTree]:
        return [GrowingTree(root, budget, self._shape) for root in roots]

    def _width(self, budget: int) -> int:
        """Most candidates below a node."""
        return min(budget, self.config.tree_top_k or budget)

    def _num_levels(self, tokens_left: int | None) -> int:
        """How deep trees may grow.

        Args:
            tokens_left: Most tokens that a row may still emit; None if it is not known. The last is the target's own.
        """
        return self._draft_length if tokens_left is None else max(0, min(self._draft_length, tokens_left - 1))

    def _grow(
        self, trees: list[GrowingTree], levels: Iterator[tuple[Tensor, Tensor]], tokens_left: int | None = None
    ) -> list[DraftTree]:
        """Grows one tree per row.

        Args:
            trees: The trees, which hold their roots alone.
            levels: Yields for each level the log-probabilities and tokens of the candidates after the nodes of all
                frontiers in turn, `(nodes, k)`, as `top_candidates` gives them.
            tokens_left: As of `_num_levels`.
        """
        for log_probs, token_ids in itertools.islice(levels, self._num_levels(tokens_left)):
            with self.building():
                grow_level(trees, log_probs, token_ids)
            if not any(len(tree.frontier) for tree in trees):
                break
        return [tree.tree() for tree in trees]
