"""Trees from a block drafter with a head that corrects each slot by the tokens on the branch, as in DSpark and Domino.

The block's layers run once. The head is small: it has a state per node, and runs once per level on all nodes of the
frontier. So each token's probability is the drafter's own, given its whole branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..devices import on_device
from ..drafters.sequential_head import SequentialHeadDraftModel
from ..tree.candidates import best_tokens
from ..tree.draft_tree import DraftTree
from ..tree.growing_tree import GrowingTree
from ..tree.shape import TreeShape
from .context import DraftContext
from .dflash import DFlashTreeCandidateGenerator
from .levelwise import LevelwiseTreeCandidateGenerator


class SequentialHeadTreeCandidateGenerator(DFlashTreeCandidateGenerator, LevelwiseTreeCandidateGenerator):
    """Drafts a block in one forward and grows a tree by the head's corrections, one level at a time.

    With `tree_probabilities="marginal"` trees are built on the uncorrected distributions, as for DFlash.
    """

    default_shape: ClassVar[TreeShape] = "best_first"
    drafter: SequentialHeadDraftModel

    @torch.no_grad()
    def trees_of(
        self,
        hidden_states: Tensor,
        roots: Tensor,
        root_ids: list[int],
        budget: int,
        context: DraftContext | None = None,
    ) -> list[DraftTree]:
        if not self._is_conditional:
            return super().trees_of(hidden_states, roots, root_ids, budget, context)
        trees = self._new_trees(root_ids, budget)
        levels = self._levels(trees, hidden_states, self._width(budget))
        return self._grow(trees, levels, None if context is None else context.tokens_left)

    def _levels(self, trees: list[GrowingTree], hidden_states: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level the candidates after the frontiers.

        Args:
            trees: One tree per row.
            hidden_states: `(batch, depth, hidden_size)`, of the slots to predict.
            width: Most candidates below a node.
        """
        device = hidden_states.device
        logits = self.drafter.compute_logits(hidden_states, self._head)
        states = self.drafter.start_states(len(trees))
        first_of_row = np.zeros(len(trees), dtype=np.int64)
        for depth in range(hidden_states.shape[1]):
            sizes = [len(tree.frontier) for tree in trees]
            rows = np.arange(len(trees)).repeat(sizes)
            # Where each node's parent stands among all nodes of the level above.
            parents = np.concatenate([tree.frontier_parents for tree in trees]) + first_of_row[rows]
            if depth == 0:
                parents = rows
            first_of_row = np.cumsum([0, *sizes[:-1]])
            tokens = np.concatenate([tree.frontier_tokens for tree in trees])
            row, parent, token = on_device(torch.from_numpy(np.stack((rows, parents, tokens))), device)
            of_slot = hidden_states[row, depth]
            bias, log_confidence, states = self.drafter.correct(
                of_slot, token, states[parent], depth, self._embeddings
            )
            corrected = logits[row.to(logits.device), depth].float()
            if bias is not None:
                corrected = corrected + bias.to(corrected)
            log_probs, token_ids = best_tokens(corrected, width)
            if log_confidence is not None:
                log_probs = log_probs + _log_share(corrected, log_confidence.to(corrected))[:, None]
            if self._target_token_ids is not None:
                self._target_token_ids = self._target_token_ids.to(token_ids.device)
                token_ids = self._target_token_ids[token_ids]
            log_probs, token_ids = self.on_host(log_probs, token_ids)
            yield log_probs, token_ids


def _log_share(logits: Tensor, log_confidence: Tensor) -> Tensor:
    """The logarithm of `min(1, c / sum of q^2)`, by which the probabilities `q` of a slot are scaled.

    The confidence `c` predicts the overlap of `q` with the target's distribution. If the target is sure of its token
    and `q` is right, that is `q` of this token, on average the sum of `q^2`. What `c` is below that is the share of
    the target's tokens that `q` does not foresee.

    Args:
        logits: `(n, vocab)` float32.
        log_confidence: `(n,)` float32.
    """
    log_overlap = (2 * logits).logsumexp(dim=-1) - 2 * logits.logsumexp(dim=-1)
    return (log_confidence - log_overlap).clamp(max=0.0).nan_to_num(nan=0.0)
