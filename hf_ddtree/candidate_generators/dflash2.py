"""Trees from a DFlash 2 drafter, whose selector scores pairs of neighbouring candidates."""

from __future__ import annotations

from torch import Tensor

from ..drafters.dflash2 import DFlash2DraftModel
from ..tree.candidates import best_tokens, conditional_candidates
from .dflash import DFlashTreeCandidateGenerator


class DFlash2TreeCandidateGenerator(DFlashTreeCandidateGenerator):
    """Drafts as for DFlash, but builds trees on the probability of each token given the one before it.

    With `tree_probabilities="marginal"` the scores of pairs are left out.
    """

    drafter: DFlash2DraftModel

    def _candidates(self, hidden_states: Tensor, roots: Tensor, budget: int) -> tuple[Tensor, ...]:
        if not self._is_conditional:
            return super()._candidates(hidden_states, roots, budget)
        logits = self.drafter.compute_logits(hidden_states, self._head)
        top_k = self.drafter.config.selector_top_k
        log_probs, token_ids = best_tokens(logits, min(top_k, self.config.tree_top_k or top_k))
        return conditional_candidates(log_probs, token_ids, self.drafter.pair_scores(hidden_states, roots, token_ids))
