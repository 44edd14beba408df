"""Quartiles, and what is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, the extremes included; of a single value, that three times."""
    values = list(values)
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def sign_test(faster: int, slower: int) -> float:
    """Two-sided p-value of a sign test: how likely as uneven a count is if both are equally likely."""
    total = faster + slower
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, count) for count in range(min(faster, slower) + 1)) / 2**total
    return min(1.0, 2 * tail)
