"""Trees without a drafter: what followed the last tokens where they stood before, in the prompt or the output."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..tree.draft_tree import DraftTree
from .base import TreeCandidateGenerator, end_tokens_of
from .context import DraftContext

# Lengths of the n-grams that are indexed. A match counts as being as long as the longest of them that it reaches.
INDEXED_LENGTHS = (1, 2, 4, 8, 16)
# Most occurrences of an n-gram that are looked at, the most recent ones.
MOST_OCCURRENCES = 24
# A node that is less probable costs more than it brings, and so does a tree that promises fewer tokens.
LEAST_PROBABILITY = 0.04
LEAST_GAIN = 0.5
# How often a match of each indexed length is believed to be right before any was seen, and what such a belief weighs
# in observations. In turn: the longest match; a shorter one, where longer ones were wrong; one that was right so far.
PRIORS = ((0.1, 0.25, 0.45, 0.6, 0.85), (0.1, 0.2, 0.25, 0.25, 0.25), (0.4, 0.6, 0.75, 0.85, 0.95))
PRIOR_WEIGHT = 6.0
LONGEST, SHORTER, GOING_ON = range(3)
# How many of the last tokens tell whether a sequence goes on.
NUM_COMPARED = 16


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

    For each indexed length, a hash table holds where every n-gram ended last, and a list where the n-gram that ends at
    a place ended the time before. So each token costs the same, wherever it is appended.

    Args:
        longest_match: Longer matches count as being this long.

    Attributes:
        tokens: The sequence; grows by `extend` alone.
    """

    def __init__(self, longest_match: int = INDEXED_LENGTHS[-1]) -> None:
        self.tokens: list[int] = []
        self._lengths = sorted({min(length, longest_match) for length in INDEXED_LENGTHS})
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

    def occurrences(self, most: int = MOST_OCCURRENCES) -> list[Occurrence]:
        """Where the last tokens occurred before, the longest matches first, the most recent first among equals.

        Of each indexed length the `most` most recent are looked at, of shorter ones only if the longer are fewer.
        """
        length_at: dict[int, int] = {}
        for length, end_before in zip(reversed(self._lengths), reversed(self._end_before)):
            end = end_before[-1] if end_before else -1
            left = most
            while end >= 0 and left:
                length_at.setdefault(end, length)
                end, left = end_before[end], left - 1
            if len(length_at) >= most:
                break
        return [Occurrence(*item) for item in length_at.items()]


class MatchAccuracy:
    """How often what followed a match before was right, learned while decoding: a Beta mean a situation and length."""

    def __init__(self) -> None:
        self._right = [[prior * PRIOR_WEIGHT for prior in priors] for priors in PRIORS]
        self._seen = [[PRIOR_WEIGHT] * len(INDEXED_LENGTHS) for _ in PRIORS]

    def __call__(self, situation: int, length: int) -> float:
        """The probability that a match of a length is right."""
        place = bisect_right(INDEXED_LENGTHS, length) - 1
        return self._right[situation][place] / self._seen[situation][place]

    def observe(self, situation: int, length: int, was_right: bool) -> None:
        """Learns from a match."""
        place = bisect_right(INDEXED_LENGTHS, length) - 1
        self._right[situation][place] += was_right
        self._seen[situation][place] += 1


class PromptLookupTreeCandidateGenerator(TreeCandidateGenerator):
    """Drafts what followed the last tokens where they occurred before: prompt lookup decoding, as a tree.

    The continuations of all occurrences are merged into one trie. With `S_1` the occurrences with the longest match,
    `S_2` those and the ones with the next shorter match, and so on, the next token's probability is estimated by
    interpolated counts,

        p(token) = sum over j of (1 - r_1) ... (1 - r_{j-1}) r_j count_{S_j}(token) / |S_j|,

    where `r_j` says how often matches of that length are right. Below the first depth each occurrence keeps its share,
    times how often matches as long as it has become go on. Both are learned while decoding, whether drafts were made
    or not. Nodes are taken by falling probability until they are not worth their cost, so where nothing is found the
    tree is the root alone, which costs no more than plain decoding.

    Args:
        target_model: The target. A branch ends with any of its end-of-sequence tokens.
        config: Shape, width and depth of the trees, and the longest match that is looked for.
    """

    def __init__(self, target_model: PreTrainedModel, config: DDTreeConfig | None = None) -> None:
        super().__init__()
        self.config = config or DDTreeConfig()
        self.end_tokens = end_tokens_of(target_model)
        self._forget(0)

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        self._forget(len(cached_ids))

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        batch_size, length = context.input_ids.shape
        if len(self._indices) != batch_size:
            self._forget(batch_size)
        # Rows that are behind are padded at the left.
        return [
            self._propose(row, context.input_ids[row, max(0, length - num_seen - 1) :], budget)
            for row, num_seen in enumerate(context.root_positions)
        ]

    def _forget(self, num_rows: int) -> None:
        self._trust = MatchAccuracy()
        self._indices = [self._new_index() for _ in range(num_rows)]
        self._found: list[list[Occurrence]] = [[] for _ in range(num_rows)]

    def _new_index(self) -> NgramIndex:
        return NgramIndex(self.config.max_matching_ngram_size or INDEXED_LENGTHS[-1])

    def _propose(self, row: int, token_ids: Tensor, budget: int) -> DraftTree:
        num_known = len(self._indices[row].tokens)
        compared = min(num_known, NUM_COMPARED)
        recent = token_ids[num_known - compared :].tolist()
        index = self._indices[row]
        if index.tokens[num_known - compared :] == recent[:compared]:
            new_tokens = recent[compared:]
            self._learn(index.tokens, self._found[row], new_tokens)
        else:
            index = self._indices[row] = self._new_index()
            new_tokens = token_ids.tolist()
        index.extend(new_tokens)
        self._found[row] = index.occurrences()
        return self._build(index.tokens, self._found[row], budget)

    def _learn(self, tokens: list[int], found: list[Occurrence], emitted: list[int]) -> None:
        """Learns from what was emitted where something had been found; `tokens` are those before."""
        if not emitted:
            return
        root, situation = len(tokens) - 1, LONGEST
        right: Occurrence | None = None
        for length, occurrences in groupby(found, key=lambda occurrence: occurrence.length):
            right = next((one for one in occurrences if tokens[one.end + 1] == emitted[0]), None)
            self._trust.observe(situation, length, right is not None)
            if right is not None:
                break
            situation = SHORTER
        if right is None:
            return
        for depth, token in enumerate(emitted[1:], start=1):
            was_right = token == tokens[right.end + 1 + depth % (root - right.end)]
            self._trust.observe(GOING_ON, right.length + depth, was_right)
            if not was_right:
                return

    def _shares(self, found: list[Occurrence]) -> list[float]:
        """The probability of each occurrence's next token that is owed to it."""
        shares: list[float] = []
        rest, situation = 1.0, LONGEST
        for length, occurrences in groupby(found, key=lambda occurrence: occurrence.length):
            right = self._trust(situation, length)
            shares += [0.0 for _ in occurrences]
            part = rest * right / len(shares)
            shares = [share + part for share in shares]
            rest, situation = rest * (1 - right), SHORTER
        return shares

    def _build(self, tokens: list[int], found: list[Occurrence], budget: int) -> DraftTree:
        """The most probable nodes of the trie of what followed the occurrences."""
        root = len(tokens) - 1
        is_spine_first = self.config.tree_shape == "spine_first"
        most_children = 1 if self.config.tree_shape == "chain" else self.config.tree_top_k or budget
        horizon = self.config.draft_length or budget
        drafted, parents, probabilities = [tokens[root]], [-1], [1.0]
        # What is taken first, order of arrival, parent, depth, token, probability, and whose continuation it is.
        waiting: list[tuple[float, int, int, int, int, float, list[tuple[Occurrence, float]]]] = []
        arrivals = count()

        def grow(node: int, depth: int, passing: Iterable[tuple[Occurrence, float]], on_spine: bool) -> None:
            """Lets the children of a node wait, given the occurrences that go on from it and their shares."""
            groups: dict[int, list[tuple[Occurrence, float]]] = {}
            for occurrence, share in passing:
                token = tokens[occurrence.end + 1 + depth % (root - occurrence.end)]
                groups.setdefault(token, []).append((occurrence, share))
            children = [(sum(share for _, share in group), token) for token, group in groups.items()]
            children.sort(key=lambda child: -child[0])
            for rank, (probability, token) in enumerate(children[:most_children]):
                if probability < LEAST_PROBABILITY:
                    return
                priority = -probability - (on_spine and rank == 0)
                heappush(waiting, (priority, next(arrivals), node, depth + 1, token, probability, groups[token]))

        grow(0, 0, zip(found, self._shares(found)), is_spine_first)
        while waiting and len(drafted) <= budget:
            priority, _, parent, depth, token, probability, passing = heappop(waiting)
            drafted.append(token)
            parents.append(parent)
            probabilities.append(probability)
            if depth < horizon and token not in self.end_tokens:
                going_on = [
                    (occurrence, share * self._trust(GOING_ON, occurrence.length + depth))
                    for occurrence, share in passing
                ]
                grow(len(drafted) - 1, depth, going_on, priority < -1.0)
        if sum(probabilities) < 1.0 + LEAST_GAIN:
            return DraftTree.root_only(tokens[root])
        return DraftTree(
            torch.tensor(drafted, device="cpu"),
            torch.tensor(parents, device="cpu"),
            torch.tensor([math.log(min(1.0, probability)) for probability in probabilities], device="cpu"),
        )
