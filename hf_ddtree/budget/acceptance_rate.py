"""A drafter's acceptance rate by depth, relative to its own probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tree.draft_tree import DraftTree

# Time constant of the exponentially decaying sums.
ROUNDS_REMEMBERED = 32
DECAY = 1.0 - 1.0 / ROUNDS_REMEMBERED

# Pseudo-count of tokens that were both expected and accepted.
PRIOR = 1.0

# Deeper nodes count as nodes of this depth.
DEEPEST = 32


class AcceptanceRate:
    """Accepted by expected tokens at each depth, where the expected ones are the sum of the drafted nodes' path
    probabilities. Starts at 1."""

    def __init__(self) -> None:
        self._accepted: np.ndarray = np.full(1 + DEEPEST, PRIOR)
        self._expected: np.ndarray = np.full(1 + DEEPEST, PRIOR)
        self._expected_now: np.ndarray = np.zeros(1 + DEEPEST)

    def expect(self, nodes: DraftedNodes, size: int) -> None:
        """Takes the trees that are about to be verified, of which `size` nodes each are kept."""
        kept = nodes.rank < size
        self._expected_now = np.bincount(nodes.depths[kept], nodes.probabilities[kept], minlength=1 + DEEPEST)

    def learn(self, accepted: Sequence[int]) -> None:
        """Takes the number of accepted tokens of each row, which is the depth that its path reached."""
        depths = np.minimum(accepted, DEEPEST)
        accepted_now = np.bincount(depths, minlength=1 + DEEPEST)[::-1].cumsum()[::-1]
        for total, now in ((self._accepted, accepted_now), (self._expected, self._expected_now)):
            total += now - (1.0 - DECAY) * (total - PRIOR)

    def by_depth(self) -> np.ndarray:
        """`(1 + DEEPEST,)`, never rising: a node is accepted only if its parent is."""
        return np.concatenate(([1.0], np.minimum.accumulate(self._accepted[1:] / self._expected[1:])))

    def to_list(self) -> list[list[float]]:
        """The counts, as `from_list` takes them."""
        return [self._accepted.tolist(), self._expected.tolist()]

    @classmethod
    def from_list(cls, counts: list[list[float]]) -> AcceptanceRate:
        """The acceptance rate whose `to_list` gave `counts`.

        Raises:
            ValueError: If they are no such counts.
        """
        rate = cls()
        rate._accepted, rate._expected = (np.array(count, dtype=float) for count in counts)
        if rate._accepted.shape != (1 + DEEPEST,) or rate._expected.shape != (1 + DEEPEST,):
            raise ValueError("counts of another length")
        if not all(((count > 1e-3) & (count < 1e6)).all() for count in (rate._accepted, rate._expected)):
            raise ValueError("counts that drafting does not give")
        return rate


@dataclass(frozen=True)
class DraftedNodes:
    """The drafted nodes of all rows' trees.

    Attributes:
        rank: `(n,)`, rank of each node in its tree by falling probability, from 0; `truncate(size)` keeps the ranks
            below `size`.
        depths: `(n,)`, at most `DEEPEST`.
        probabilities: `(n,)`, path probabilities.
    """

    rank: np.ndarray
    depths: np.ndarray
    probabilities: np.ndarray

    def gains(self, rate: AcceptanceRate | None, sizes: np.ndarray) -> np.ndarray:
        """`(s,)`, expected number of accepted tokens of all rows if `sizes (s,)` nodes of each tree are kept.

        With an acceptance rate the probabilities are corrected by it.
        """
        weights = self.probabilities
        if rate is not None:
            weights = np.minimum(weights * rate.by_depth()[self.depths], 1.0)
        of_rank = np.concatenate(([0.0], np.bincount(self.rank, weights).cumsum()))
        return of_rank[np.minimum(sizes, len(of_rank) - 1)]


def nodes_by_probability(trees: Sequence[DraftTree]) -> DraftedNodes:
    """The drafted nodes of all trees, ranked within each."""
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
