"""The time of a target forward by number of nodes, learned while decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

# Candidate numbers of drafted nodes; 0 is standard decoding. With the root most make 8, 16, 32, ... rows, which suits
# matrix products.
SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)

# The first rounds on a model that has not been timed.
FIRST_SIZES = (15, 0, 15)

# Contexts of less than 512 tokens are in one class, and from there on those between two powers of two.
SHORT_CONTEXT = 256

# Times outside this range mean that the clock stood still or was set.
SHORTEST, LONGEST = 1e-9, 1e6

# Window of a median: of a size's times, of standard decoding's, which is timed less often, and of the machine's pace.
SAMPLES, SAMPLES_OF_STANDARD, SAMPLES_OF_PACE = 11, 5, 7
# With fewer samples a median means nothing.
FEW = 3


class ForwardTimes:
    """Times of a target's forwards by context, rows and size: moving medians.

    A machine's speed drifts, for forwards of all sizes alike. A size that was timed in a slow minute would look slow,
    and so would never be timed again. So times are kept in units of the machine's pace: the moving median of a
    forward's time divided by what its size usually takes.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], dict[int, deque[float]]] = {}
        self._tried: dict[int, int] = {}
        self._paces: deque[float] = deque(maxlen=SAMPLES_OF_PACE)
        self._pace = 1.0

    def next_to_try(self, num_rows: int) -> int | None:
        """The next of `FIRST_SIZES` to time; None if all have been."""
        tried = self._tried.get(num_rows, 0)
        if tried == len(FIRST_SIZES):
            return None
        return FIRST_SIZES[tried]

    def add(self, num_cached: int, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Takes the time of a forward over `num_drafted` nodes and the root."""
        size = SIZES[min(bisect_left(SIZES, num_drafted), len(SIZES) - 1)]
        samples = self._of_context(num_cached, num_rows).setdefault(size, _times_of(size))
        if len(samples) >= FEW:
            self._paces.append(seconds / median(samples))
            self._pace = median(self._paces)
        samples.append(seconds / self._pace)
        self._tried[num_rows] = min(self._tried.get(num_rows, 0) + 1, len(FIRST_SIZES))

    def estimate(self, num_cached: int, num_rows: int, most_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Sizes `(s,)`, from 0 up to twice the largest that was timed, and seconds of a forward `(s,)`.

        The seconds never fall with the size (isotonic regression). Sizes in between are interpolated; those beyond the
        largest are extrapolated with its mean time per node. The sizes always reach up to the first of `FIRST_SIZES`,
        as nothing may have been found to draft so far.
        """
        samples = self._of_context(num_cached, num_rows)
        timed = sorted(samples)
        seconds = self._pace * _never_falling([samples[size] for size in timed])
        largest = min(most_nodes, max(2 * timed[-1] + 1, FIRST_SIZES[0]))
        sizes = np.array([size for size in SIZES if size <= largest])
        per_node = (seconds[-1] - seconds[0]) / max(timed[-1] - timed[0], 1)
        return sizes, np.interp(sizes, timed, seconds) + per_node * np.maximum(sizes - timed[-1], 0)

    def to_list(self) -> list[tuple[int, int, int, float]]:
        """Rows, context, size and seconds of all that was timed."""
        return [
            (rows, context, size, self._pace * _typical(times))
            for (rows, context), of_size in self._samples.items()
            for size, times in of_size.items()
        ]

    def add_list(self, entries: Sequence[tuple[int, int, int, float]]) -> None:
        """Takes what `to_list` gave.

        Raises:
            ValueError: If an entry is none that it gives.
        """
        for rows, context, size, seconds in entries:
            if size not in SIZES or not SHORTEST <= seconds <= LONGEST or rows < 1:
                raise ValueError(f"{seconds!r} seconds for {size!r} nodes of {rows!r} rows")
            of_size = self._samples.setdefault((int(rows), int(context)), {})
            of_size[size] = _times_of(size, float(seconds))
            self._tried[int(rows)] = len(FIRST_SIZES)

    def _of_context(self, num_cached: int, num_rows: int) -> dict[int, deque[float]]:
        context = max(num_cached, SHORT_CONTEXT).bit_length()
        key = num_rows, context
        if key not in self._samples:
            # Until it has times of its own, a context class starts from the nearest that was timed.
            others = [other for rows, other in self._samples if rows == num_rows]
            nearest = min(others, key=lambda other: abs(other - context), default=None)
            known = {} if nearest is None else self._samples[num_rows, nearest]
            self._samples[key] = {size: _times_of(size, _typical(times)) for size, times in known.items()}
        return self._samples[key]


def _times_of(size: int, *seconds: float) -> deque[float]:
    return deque(seconds, maxlen=SAMPLES if size else SAMPLES_OF_STANDARD)


def _typical(times: deque[float]) -> float:
    """The median; of few samples the minimum, as the first forwards are slow."""
    return min(times) if len(times) < FEW else median(times)


def _never_falling(samples: Sequence[deque[float]]) -> np.ndarray:
    """`(n,)`, isotonic regression of the typical times by pooling adjacent violators, weighted by sample counts."""
    pools: list[tuple[float, int, int]] = []
    for times in samples:
        level, weight, count = _typical(times), len(times), 1
        while pools and pools[-1][0] > level:
            other, its_weight, its_count = pools.pop()
            level = (level * weight + other * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        pools.append((level, weight, count))
    return np.repeat([level for level, _, _ in pools], [count for _, _, count in pools])
