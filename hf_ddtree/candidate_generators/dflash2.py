"""Trees from a DFlash 2 drafter, whose selector scores pairs of neighbouring candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..drafters.dflash2 import DFlash2DraftModel
from ..drafters.mixture import Powers
from ..tree.candidates import best_tokens, conditional_candidates
from ..tree.draft_tree import DraftTree
from .context import DraftContext
from .dflash import DFlashTreeCandidateGenerator

# Candidates are no less probable than this for the power to learn from them, nor is what is outside of them.
LEAST_PROBABILITY = 1e-4


class DFlash2TreeCandidateGenerator(DFlashTreeCandidateGenerator):
    """Drafts as for DFlash, but builds trees on the probability of each token given the one before it.

    The selector's probabilities are raised to a power and normalised again. It is learned while decoding, apart for
    greedy decoding and for sampling (`Calibration.selector_powers`); with `calibrate=False` it is 1. With
    `tree_probabilities="marginal"` the scores of pairs are left out.
    """

    drafter: DFlash2DraftModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._power: Powers | None = None  # of the last round

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self._learn(context)
        if self._is_conditional and self.config.calibrate:
            self._power = self.drafter.calibration.selector_powers[context.do_sample]
            self._learns_from_candidates = True
        return super().propose(context, budget)

    def _candidates(self, hidden_states: Tensor, roots: Tensor, budget: int) -> tuple[Tensor, ...]:
        if not self._is_conditional:
            return super()._candidates(hidden_states, roots, budget)
        logits = self.drafter.compute_logits(hidden_states, self._head)
        top_k = self.drafter.config.selector_top_k
        log_probs, token_ids = best_tokens(logits, min(top_k, self.config.tree_top_k or top_k))
        pair_scores = self.drafter.pair_scores(hidden_states, roots, token_ids)
        power = 1.0 if self._power is None else self._power.values[0]
        return conditional_candidates(log_probs, token_ids, pair_scores, power)

    def _learn(self, context: DraftContext) -> None:
        """Lets the power learn from the emitted tokens that follow the last round's roots."""
        if self._power is not None and self._drafted is not None:
            for emitted, *candidates in zip(context.emitted, *(tensor.numpy() for tensor in self._drafted)):
                if emitted:
                    factors, chosen = factors_along(candidates, emitted, self._power.values[0])
                    self._power.learn([[0]] * len(chosen), factors, chosen)
        super()._learn(context)


def factors_along(
    candidates: Sequence[np.ndarray], emitted: Sequence[int], power: float
) -> tuple[list[list[list[float]]], list[int]]:
    """The candidates after each node that some emitted tokens pass, as `Powers.learn` takes them.

    Args:
        candidates: Log-probabilities, tokens and next states, `(depth, k, k)` each, of `conditional_candidates`.
        emitted: The tokens after the root.
        power: The power of the log-probabilities.

    Returns:
        Per node the logarithm of the factor of each candidate, and last of what is outside of them; and the place of
        the token that was emitted.
    """
    state, factors, chosen = 0, [], []
    for token, log_probs, token_ids, next_state in zip(emitted, *candidates):
        probs = np.exp(log_probs[state].astype(np.float64))
        probs = np.append(probs, 1.0 - probs.sum()).clip(min=LEAST_PROBABILITY)
        factors.append([(np.log(probs) / power).tolist()])
        places = (token_ids[state] == token).nonzero()[0]
        if not len(places):
            chosen.append(len(probs) - 1)
            break
        chosen.append(int(places[0]))
        state = next_state[state, places[0]]
    return factors, chosen
