"""A tree that grows level by level, for drafters whose distributions depend on the branch.

Pure topology, as in `draft_tree`: the drafter itself is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .draft_tree import DraftTree
from .shape import TreeShape


class GrowingTree:
    """The `budget` most probable prefixes, found one depth at a time.

    The probability of a prefix is the product of its tokens' conditional probabilities. Adding a depth only pushes
    nodes out, so a node that is not among the `budget` most probable ones is never worth a distribution of its own.
    What is kept in the end is exactly the best-first tree (DDTree, arXiv:2604.12989, algorithm 1, with conditional
    probabilities), down to the depth that was reached. Ties go to the smaller depth, then to the more probable parent,
    then to the better candidate.

    Args:
        root_token_id: Token of the root, the last emitted one.
        budget: Most nodes to keep, the root excluded.
        shape: `"best_first"`; `"spine_first"` keeps the most probable child of every depth's most probable child
            besides, `"chain"` keeps nothing else.

    Attributes:
        frontier: The kept nodes of the deepest level, by falling probability. The caller gives a
            distribution for each. Empty once nothing deeper can be among the kept.
        frontier_parents: For each node of the frontier, the place of its parent in the frontier before.
    """

    def __init__(self, root_token_id: int, budget: int, shape: TreeShape = "best_first") -> None:
        self._budget = budget
        self._shape = shape
        self._token_ids = np.array([root_token_id], dtype=np.int64)
        self._parents = np.array([-1], dtype=np.int64)
        self._costs = np.zeros(1, dtype=np.float32)
        self._on_spine = np.ones(1, dtype=bool)
        self.frontier = np.zeros(1, dtype=np.int64)
        self.frontier_parents = np.zeros(1, dtype=np.int64)

    @property
    def frontier_tokens(self) -> np.ndarray:
        """`(len(frontier),)` int64, the tokens of the frontier's nodes."""
        return self._token_ids[self.frontier]

    def grow(self, log_probs: Tensor, token_ids: Tensor) -> None:
        """Adds the level below the frontier, and drops what is no longer among the best.

        Args:
            log_probs: `(len(frontier), k)` float32 on the CPU, what the drafter gives to the candidates after each
                node of the frontier, descending along `k`; -inf for what must not be drafted.
            token_ids: `(len(frontier), k)` int64, the candidates, distinct in each row.
        """
        width = 1 if self._shape == "chain" else log_probs.shape[1]
        costs = (self._costs[self.frontier][:, None] - log_probs[:, :width].numpy()).ravel()
        on_spine = np.zeros((len(self.frontier), width), dtype=bool)
        if self._shape != "best_first":
            on_spine[:, 0] = self._on_spine[self.frontier]
        order = costs.argsort(kind="stable")
        order = order[costs[order] < np.inf]
        num_old = len(self._costs)
        tokens = np.concatenate((self._token_ids, token_ids[:, :width].numpy().ravel()[order]))
        parents = np.concatenate((self._parents, self.frontier.repeat(width)[order]))
        costs = np.concatenate((self._costs, costs[order]))
        on_spine = np.concatenate((self._on_spine, on_spine.ravel()[order]))
        # The root, and the spine if there is one, come before all others whatever they cost.
        kept = np.sort(np.where(on_spine, -np.inf, costs).argsort(kind="stable")[: self._budget + 1])
        self._token_ids, self._costs, self._on_spine = tokens[kept], costs[kept], on_spine[kept]
        self._parents = np.concatenate(([-1], kept.searchsorted(parents[kept[1:]])))
        self.frontier = (kept >= num_old).nonzero()[0]
        self.frontier_parents = order[kept[self.frontier] - num_old] // width

    def branches(self) -> tuple[DraftTree, list[int]]:
        """The frontier and its ancestors as a tree, and which of its nodes are the frontier, in order."""
        wanted = np.zeros(len(self._parents), dtype=bool)
        level = self.frontier
        while len(level):
            wanted[level] = True
            level = np.unique(self._parents[level])
            level = level[level >= 0]
        wanted[0] = True
        nodes = wanted.nonzero()[0]
        parents = np.concatenate(([-1], nodes.searchsorted(self._parents[nodes[1:]])))
        tree = DraftTree(*map(torch.from_numpy, (self._token_ids[nodes], parents, -self._costs[nodes])))
        return tree, nodes.searchsorted(self.frontier).tolist()

    def tree(self) -> DraftTree:
        """All that is kept, ordered by depth, then by falling probability."""
        return DraftTree(*map(torch.from_numpy, (self._token_ids, self._parents, -self._costs)))


def grow_level(trees: Sequence[GrowingTree], log_probs: Tensor, token_ids: Tensor) -> None:
    """Grows every tree by a level.

    Args:
        trees: The trees.
        log_probs, token_ids: `(nodes, k)`, as `GrowingTree.grow` takes them, of the frontiers of all trees in turn.
    """
    sizes = [len(tree.frontier) for tree in trees]
    for tree, *candidates in zip(trees, log_probs.split(sizes), token_ids.split(sizes)):
        tree.grow(*candidates)
