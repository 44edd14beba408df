"""How often the text that followed a match was right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

# Lengths of matches that are told apart; shorter ones are contexts of the tables.
MATCH_LENGTHS = (4, 8, 16, 32)
# How often a match of each length is believed to be right before any was seen, and what that weighs in observations.
PRIORS, PRIOR_WEIGHT = (0.55, 0.75, 0.88, 0.95), 4.0
# From this many observations on, older ones count half.
MOST_OBSERVATIONS = 64


class MatchAccuracy:
    """How often what followed the longest match was right: a Beta mean for each range of lengths."""

    def __init__(self) -> None:
        self._right = [prior * PRIOR_WEIGHT for prior in PRIORS]
        self._seen = [PRIOR_WEIGHT] * len(PRIORS)

    def __call__(self, length: int) -> float:
        """The probability that a match of a length is right."""
        place = max(bisect_right(MATCH_LENGTHS, length) - 1, 0)
        return self._right[place] / self._seen[place]

    def observe(self, length: int, was_right: bool) -> None:
        """Learns from a match."""
        place = max(bisect_right(MATCH_LENGTHS, length) - 1, 0)
        if self._seen[place] >= MOST_OBSERVATIONS:
            self._right[place], self._seen[place] = self._right[place] / 2, self._seen[place] / 2
        self._right[place] += was_right
        self._seen[place] += 1

    def to_array(self) -> np.ndarray:
        """`(2, lengths)` float64: how many were right, and how many were seen."""
        return np.array([self._right, self._seen])

    def set_array(self, array: np.ndarray) -> None:
        """Takes what `to_array` gave.

        Raises:
            ValueError: If it is something else.
        """
        if (
            array.shape != (2, len(MATCH_LENGTHS))
            or not ((array[0] >= 0) & (array[0] <= array[1]) & (array[1] >= 1) & (array[1] <= MOST_OBSERVATIONS)).all()
        ):
            raise ValueError("`match_accuracy` holds no counts")
        self._right, self._seen = array.tolist()

    def observe_prediction(self, length: int, predicted: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns from what followed a match and what came, up to the first token that differs.

        Args:
            length: Of the match; it is a token longer after each that is right.
            predicted: What followed, a negative number at the end of the text.
            tokens: What came.
        """
        for depth, (expected, token) in enumerate(zip(predicted, tokens)):
            if expected < 0:
                break
            self.observe(length + depth, expected == token)
            if expected != token:
                break
