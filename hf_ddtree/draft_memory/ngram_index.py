"""An index of the n-grams of a growing sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Occurrence(NamedTuple):
    """Where the last tokens of a sequence occurred before.

    Attributes:
        end: Place of the last of them.
        length: How many of them match, at least.
    """

    end: int
    length: int


class NgramIndex:
    """A growing sequence, and where its last tokens occurred in it before.

    A match counts as being as long as the longest of the indexed n-grams that it reaches. For each indexed length, a
    hash table holds where every n-gram ended last, and a list where the n-gram that ends at a place ended the time
    before. So each token costs the same, wherever it is appended.

    Args:
        lengths: Lengths of the n-grams that are indexed, rising.

    Attributes:
        tokens: The sequence; grows by `extend` alone.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = list(lengths)
        self._last_end: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        self._end_before: list[list[int]] = [[] for _ in self._lengths]

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Appends tokens."""
        tokens, first = self.tokens, len(self.tokens)
        tokens.extend(new_tokens)
        for length, last_end, end_before in zip(self._lengths, self._last_end, self._end_before):
            recent = tokens[max(0, first + 1 - length) :]
            end_before += [-1] * (min(len(tokens), length - 1) - first)
            for end, ngram in enumerate(zip(*(recent[place:] for place in range(length))), start=len(end_before)):
                end_before.append(last_end.get(ngram, -1))
                last_end[ngram] = end

    def occurrences(self, most: int) -> list[Occurrence]:
        """Where the last tokens occurred before, the longest matches first, the most recent first among equals.

        Of each indexed length the `most` most recent are looked at, of shorter ones only if the longer are fewer.
        """
        ends = [end_before[-1] if end_before else -1 for end_before in self._end_before]
        return self._chains(ends, most)

    def occurrences_of(self, last_tokens: Sequence[int], most: int) -> list[Occurrence]:
        """The same for the last tokens of another sequence."""
        ends = [
            last_end.get(tuple(last_tokens[-length:]), -1) if len(last_tokens) >= length else -1
            for length, last_end in zip(self._lengths, self._last_end)
        ]
        return self._chains(ends, most)

    def predictions(self, first: int) -> list[tuple[int, bool]]:
        """For each place from `first` on but the last: the length of its longest match before it, 0 if there is none,
        and whether the most recent one was followed by the same token."""
        tokens, found = self.tokens, []
        for place in range(max(first, 0), len(tokens) - 1):
            for length, end_before in zip(reversed(self._lengths), reversed(self._end_before)):
                if (end := end_before[place]) >= 0:
                    found.append((length, tokens[end + 1] == tokens[place + 1]))
                    break
            else:
                found.append((0, False))
        return found

    def _chains(self, ends: Sequence[int], most: int) -> list[Occurrence]:
        length_at: dict[int, int] = {}
        for length, end, end_before in zip(reversed(self._lengths), reversed(ends), reversed(self._end_before)):
            left = most
            while end >= 0 and left:
                length_at.setdefault(end, length)
                end, left = end_before[end], left - 1
            if len(length_at) >= most:
                break
        return [Occurrence(*item) for item in length_at.items()]
