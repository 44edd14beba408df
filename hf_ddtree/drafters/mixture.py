"""Log-linear mixtures of distributions, whose powers are learned while decoding.

    P(t) ~ product over i of f_i(t)^w_i

The gradient of the log-likelihood of the target's token `y` by `w_i` is `log f_i(y) - E_P[log f_i]`, and the curvature
is the variance of `log f_i` under `P`. Each observation takes a step of the gradient over the sum of the curvatures so
far, a stochastic Newton step, which averages over what was seen.

With one factor this is a temperature, `1 / w`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Curvature that the initial powers weigh.
PRIOR_CURVATURE = 100.0
LEAST_POWER, LARGEST_POWER = 0.05, 3.0


class Powers:
    """The powers of a mixture.

    Calls that run at the same time may lose each other's evidence. They change trees, and so the speed; never a token.

    Args:
        initial: What they are before there is evidence.
        memory: Observations after which those before have decayed to 1/e.

    Attributes:
        values: The powers. Replaced and never written to.
    """

    def __init__(self, initial: Sequence[float], memory: int = 4096) -> None:
        self.values = tuple(map(float, initial))
        self._memory = memory
        self._curvatures = (PRIOR_CURVATURE,) * len(self.values)

    def to_dict(self) -> dict[str, list[float]]:
        """What was learned, as JSON takes it."""
        return {"values": list(self.values), "curvatures": list(self._curvatures)}

    def set_dict(self, learned: dict[str, list[float]]) -> None:
        """Takes what `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        values, curvatures = (tuple(map(float, learned[name])) for name in ("values", "curvatures"))
        if not len(values) == len(curvatures) == len(self.values) or not all(
            LEAST_POWER <= value <= LARGEST_POWER and 0 < curvature < float("inf")
            for value, curvature in zip(values, curvatures)
        ):
            raise ValueError("no powers of this mixture")
        self.values, self._curvatures = values, curvatures

    def learn(
        self, used: Sequence[Sequence[int]], log_factors: Sequence[Sequence[Sequence[float]]], chosen: Sequence[int]
    ) -> None:
        """Learns from some of the target's choices.

        Args:
            used: For each choice which of the powers make its mixture.
            log_factors: For each of these powers `log f_i` of each candidate, and last of what is outside of them.
            chosen: For each choice the place of the target's token.
        """
        counts = [len(of_choice[0]) for of_choice in log_factors]
        # (choices, factors, candidates); what is padded has probability zero.
        factors = np.zeros((len(counts), len(log_factors[0]), max(counts)))
        for place, (of_choice, count) in enumerate(zip(log_factors, counts)):
            factors[place, :, :count] = of_choice
        powers = np.array(self.values)[np.array(used)]
        scores = np.einsum("cf,cfn->cn", powers, factors)
        scores[np.arange(max(counts)) >= np.array(counts)[:, None]] = -np.inf
        probs = np.exp(scores - scores.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        means = np.einsum("cn,cfn->cf", probs, factors)
        gradients = factors[np.arange(len(counts)), :, chosen] - means
        curvatures = np.einsum("cn,cfn->cf", probs, factors**2) - means**2
        slopes, bends = np.zeros(len(self.values)), np.zeros(len(self.values))
        np.add.at(slopes, np.array(used), gradients)
        np.add.at(bends, np.array(used), curvatures)
        sums = np.maximum(np.array(self._curvatures) * (1 - 1 / self._memory) ** len(counts) + bends, PRIOR_CURVATURE)
        values = (np.array(self.values) + slopes / sums).clip(LEAST_POWER, LARGEST_POWER)
        self.values, self._curvatures = tuple(values.tolist()), tuple(sums.tolist())
