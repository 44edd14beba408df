"""How far a drafter's probabilities can be trusted, learned from accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tree.draft_tree import DraftTree

# Running sums forget a round after about as many.
ROUNDS_REMEMBERED = 32


KEPT = 1.0 - 1.0 / ROUNDS_REMEMBERED


# Accepted tokens that it takes to doubt the drafter's probabilities.
TRUST_PRIOR = 1.0


# Deeper nodes count as if they were as deep.
DEEPEST = 32


class AcceptanceRate:
    """How far a drafter's probabilities can be believed, by depth: how many drafted tokens were right there, for each
    that the probabilities promised. Starts with full trust."""

    def __init__(self) -> None:
        self._right: np.ndarray = np.full(1 + DEEPEST, TRUST_PRIOR)
        self._promised: np.ndarray = np.full(1 + DEEPEST, TRUST_PRIOR)
        self._stated: np.ndarray = np.zeros(1 + DEEPEST)

    def state(self, nodes: DraftedNodes, size: int) -> None:
        """Takes what the trees that are verified promise."""
        taken = nodes.rank < size
        self._stated = np.bincount(nodes.depths[taken], nodes.probabilities[taken], minlength=1 + DEEPEST)

    def learn(self, accepted: Sequence[int]) -> None:
        """Takes how deep each row's tree was right."""
        depths = np.minimum(accepted, DEEPEST)
        right = np.bincount(depths, minlength=1 + DEEPEST)[::-1].cumsum()[::-1]
        for total, now in ((self._right, right), (self._promised, self._stated)):
            total += now - (1.0 - KEPT) * (total - TRUST_PRIOR)

    def by_depth(self) -> np.ndarray:
        """`(1 + DEEPEST,)`, never rising, as a node is right only if its parent is."""
        return np.concatenate(([1.0], np.minimum.accumulate(self._right[1:] / self._promised[1:])))

    def to_list(self) -> list[list[float]]:
        """What `from_list` takes."""
        return [self._right.tolist(), self._promised.tolist()]

    @classmethod
    def from_list(cls, counts: list[list[float]]) -> AcceptanceRate:
        """The trust whose `to_list` gave `counts`."""
        trust = cls()
        trust._right, trust._promised = (np.array(count, dtype=float) for count in counts)
        if trust._right.shape != (1 + DEEPEST,) or trust._promised.shape != (1 + DEEPEST,):
            raise ValueError("counts of another length")
        if not all(((count > 1e-3) & (count < 1e6)).all() for count in (trust._right, trust._promised)):
            raise ValueError("counts that drafting does not give")
        return trust


@dataclass(frozen=True)
class DraftedNodes:
    """The drafted nodes of all rows' trees.

    Attributes:
        rank: `(n,)`, place of each node among its tree's by falling probability, from 0; `truncate(size)` keeps those
            below `size`.
        depths: `(n,)`, at most `DEEPEST`.
        probabilities: `(n,)`, of their paths.
    """

    rank: np.ndarray
    depths: np.ndarray
    probabilities: np.ndarray

    def gains(self, trust: AcceptanceRate | None, sizes: np.ndarray) -> np.ndarray:
        """`(s,)`, the expected number of accepted tokens of all rows if `sizes (s,)` nodes of each tree are kept."""
        weights = self.probabilities if trust is None else self.probabilities * trust.by_depth()[self.depths]
        of_rank = np.concatenate(([0.0], np.bincount(self.rank, weights).cumsum()))
        return of_rank[np.minimum(sizes, len(of_rank) - 1)]


def nodes_by_probability(trees: Sequence[DraftTree]) -> DraftedNodes:
    ranks, depths, probabilities = [], [], []
    for tree in trees:
        log_probs = tree.log_probs.numpy()[1:]
        order = np.argsort(-log_probs, kind="stable")
        ranks.append(np.arange(len(order)))
        depths.append(tree.depths.numpy()[1:][order])
        probabilities.append(np.exp(log_probs[order]))
    return DraftedNodes(
        np.concatenate(ranks), np.minimum(np.concatenate(depths), DEEPEST), np.concatenate(probabilities)
    )
