"""Quartiles, what is more than chance, and how varied a text is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


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


def distinct_share(token_ids: Sequence[int], length: int = 6) -> float:
    """The share of distinct n-grams of this length among all: 1 if none is repeated, near 0 in a loop."""
    grams = [tuple(token_ids[at : at + length]) for at in range(len(token_ids) - length + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
