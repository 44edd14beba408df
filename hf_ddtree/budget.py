"""How many nodes a round is worth.

A round that verifies a tree takes longer than one that decodes plainly, and emits more. Which tree pays depends on the
model, the machine, the text and the drafter, so `AutoBudget` learns all of it while decoding: the time of a target
forward at a handful of sizes, the time of a draft, and how far the drafter's probabilities can be trusted. The tree
`T` to verify is the one that maximises

    E[tokens | T] / (seconds(draft) + seconds(T))

where `E[tokens | T]` is one plus the sum of the path probabilities of the nodes of `T`: a node adds a token if its
path is what the target emits. A rate over many rounds in place of this round's own would count easy text that lies
behind against hard text ahead. CaDDTree (arXiv:2606.01813) chooses by a similar estimate from a profile made before.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

import numpy as np

from .configuration import MOST_NODES, describe_type, require_positive_int
from .draft_tree import DraftTree

# Sizes of trees, in drafted nodes, that are chosen from; 0 is plain decoding. With the root they make 8, 16 or 32 rows
# and so on, which suits matrix products.
SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
# What is tried first on a model that was never timed.
FIRST_SIZES = (15, 0, 15)
# Contexts of less than 512 tokens are alike, and from there on those between two powers of two.
SHORT_CONTEXT = 256
# Times outside of this range are those of a clock that stood still or was set.
SHORTEST, LONGEST = 1e-9, 1e6
# Times that a median is taken of: of one size, of plain decoding, which is timed less often, and of the last rounds.
# Of fewer than a few it means nothing.
SAMPLES, SAMPLES_OF_PLAIN, SAMPLES_OF_PACE, FEW = 11, 5, 7, 3
# Running sums forget a round after about as many.
ROUNDS_REMEMBERED = 32
KEPT = 1.0 - 1.0 / ROUNDS_REMEMBERED
# After how many rounds of drafting the next size up or down is timed again, and plain decoding.
ROUNDS_PER_RETRY, ROUNDS_PER_PLAIN = 16, 64
# Rounds of drafting before speculation may be given up, at first and when it is tried again.
FIRST_LOOK, LATER_LOOK = 8, 2
# What looking again may cost, as a fraction of the plain decoding in between. The first break is short however much
# was lost, in case that it comes of bad luck, and the next ones are at most some times as long as the one before.
COST_OF_LOOKING = 0.01
FIRST_BREAK, LONGER_EACH_TIME = 16, 4
# How many tokens a row may be lost before speculation is given up at once.
LOST_AT_ONCE = 2.0
# Accepted tokens that it takes to doubt the drafter's probabilities.
TRUST_PRIOR = 1.0
# Deeper nodes count as if they were as deep.
DEEPEST = 32


@dataclass(frozen=True)
class RoundCost:
    """What a round took and gave.

    Attributes:
        num_cached: Tokens in the target's cache before it, of the longest row.
        num_rows: Rows of the batch.
        num_drafted: Drafted nodes of the largest tree that was verified; 0 if none was.
        accepted: For each row, how many drafted tokens were emitted.
        draft_seconds: Time to propose the trees and to choose their size, None if nothing was asked for.
        verify_seconds: Time from then until the path's tokens are committed.
    """

    num_cached: int
    num_rows: int
    num_drafted: int
    accepted: Sequence[int]
    draft_seconds: float | None
    verify_seconds: float


class BudgetPolicy(ABC):
    """Decides each round how many nodes to draft, and how many of them to verify. Pass one as `tree_budget`.

    Attributes:
        most_nodes: Drafted nodes that a static cache gets room for; larger trees are cut to their most probable nodes.
    """

    most_nodes: int = 64

    @abstractmethod
    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        """Most nodes a row that the generator shall draft; 0 to draft nothing and decode one token.

        Args:
            num_cached: Tokens in the target's cache, of the longest row.
            num_rows: Rows of the batch.
        """

    def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
        """How many drafted nodes of each tree to verify, the most probable ones; 0 for the root alone.

        Args:
            trees: What was drafted, one for each row that has not finished. By default all of it is verified.
            num_cached: Tokens in the target's cache, of the longest row.
        """
        return max(tree.num_drafted for tree in trees)

    def observe(self, cost: RoundCost) -> None:  # noqa: B027
        """Learns from a round; by default nothing."""


def checked_nodes(policy: BudgetPolicy, name: str, nodes: Any) -> int:
    """A number of nodes that a policy gives, no more than a tree can have.

    Args:
        policy: Who gives it.
        name: Of its method or attribute.
        nodes: What that gives.

    Raises:
        ValueError: If it is no integer of at least 0.
    """
    if not isinstance(nodes, Integral) or isinstance(nodes, bool) or int(nodes) < 0:
        raise ValueError(
            f"`{name}` of the policy `{type(policy).__name__}` must give an integer of at least 0, a number of nodes, "
            f"but gives {nodes!r}."
        )
    return min(int(nodes), MOST_NODES)


class FixedBudget(BudgetPolicy):
    """The same number of nodes each round.

    Args:
        num_nodes: Drafted nodes, the root excluded.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = self.most_nodes = num_nodes

    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        return self.num_nodes


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets one thread at a time into a method: calls that run side by side share what is learned."""

    @functools.wraps(method)
    def locked(self: AutoBudget, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return locked


class AutoBudget(BudgetPolicy):
    """Learns while decoding which number of nodes gives most tokens a second, plain decoding included.

    Where speculation does not pay it steps aside, and looks again after breaks of growing length. What was learned
    depends on the target, the drafter and the machine; an instance may serve many calls with the same, and be saved.

    Args:
        most_nodes: Largest tree to consider.

    Raises:
        ValueError: If `most_nodes` is no integer of at least 1.
    """

    def __init__(self, most_nodes: int = 64) -> None:
        require_positive_int("most_nodes", most_nodes)
        self.most_nodes = most_nodes
        self._lock = threading.Lock()
        self._times = ForwardTimes()
        self._draft_times: dict[int, deque[float]] = {}
        self._trust = Trust()
        # Tokens that recent drafts gained over plain decoding in the same time.
        self._gained: deque[float] = deque(maxlen=FIRST_LOOK)
        self._looks_again = False
        self._break_left, self._longest_break = 0, FIRST_BREAK
        self._largest = FIRST_SIZES[0]
        self._rounds_drafted = 0
        self._round: _DraftedRound | None = None
        self._num_rows = 1

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "An `AutoBudget` goes on learning and cannot be copied or pickled, so it cannot stand in a "
            '`GenerationConfig`, which `generate()` copies and which is saved. Set a number or "auto" there, pass the '
            "policy to each call as `tree_budget`, and keep what it learned with `policy.save(path)`."
        )

    @_locked
    def __repr__(self) -> str:
        timed = sorted({size for _, _, size, _ in self._times.to_list()})
        return f"<AutoBudget of {self.most_nodes} nodes: timed {timed}, trust at depth 1 {self.trust[0]:.2f}>"

    @_locked
    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        self._round, self._num_rows = None, num_rows
        size = self._times.next_to_try(num_rows)
        if size is not None:
            return min(size, self.most_nodes)
        if self._break_left > 0:
            self._break_left -= 1
            return 0
        if self._rounds_drafted % ROUNDS_PER_PLAIN == ROUNDS_PER_PLAIN // 2:
            self._rounds_drafted += 1
            return 0
        return min(self.most_nodes, 2 * self._largest + 1)

    @_locked
    def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
        going_on, num_rows = len(trees), self._num_rows
        nodes = _by_probability(trees)
        size = self._times.next_to_try(num_rows)
        if size is not None:
            size = min(size, self.most_nodes)
        else:
            sizes, seconds = self._times.estimate(num_cached, num_rows, self.most_nodes)
            plain_rate = going_on / seconds[0]
            drafting = median(self._draft_times.get(num_rows, [0.0]))
            # Whoever is given another chance is taken at his word.
            promised = nodes.gains(None if self._looks_again else self._trust, sizes)
            best = int(np.argmax((going_on + promised) / (drafting + seconds)))
            if self._rounds_drafted % ROUNDS_PER_RETRY == ROUNDS_PER_RETRY - 1:
                up = self._rounds_drafted // ROUNDS_PER_RETRY % 2
                best = min(max(best + (1 if up else -1), 0), len(sizes) - 1)
            size = int(sizes[best])
            expected = float(nodes.gains(self._trust, sizes[best : best + 1])[0])
            cost = float(plain_rate * (drafting + seconds[best]) - going_on)
            self._round = _DraftedRound(expected, cost, going_on)
            self._largest = max(size, 8, int(0.9 * self._largest))
            self._rounds_drafted += 1
        self._trust.state(nodes, size)
        return size

    @_locked
    def observe(self, cost: RoundCost) -> None:
        if SHORTEST <= cost.verify_seconds <= LONGEST:
            self._times.add(cost.num_cached, cost.num_rows, cost.num_drafted, cost.verify_seconds)
        if cost.draft_seconds is not None:
            if 0 <= cost.draft_seconds <= LONGEST:
                # The first draft after a prompt or a break takes up all that the target saw meanwhile; a median drops
                # it.
                self._draft_times.setdefault(cost.num_rows, deque(maxlen=SAMPLES)).append(cost.draft_seconds)
            self._trust.learn(cost.accepted)
        if self._round is not None:
            self._decide(self._round, sum(cost.accepted))

    def _decide(self, drafted: _DraftedRound, num_accepted: int) -> None:
        """Steps aside if drafting has not paid lately."""
        # What was learned before a break may be out of date, so what happens now counts as much.
        gain = (drafted.expected + num_accepted) / 2 if self._looks_again else drafted.expected
        self._gained.append(gain - drafted.cost)
        gained = sum(self._gained)
        if len(self._gained) < LATER_LOOK or (
            len(self._gained) < FIRST_LOOK and gained > -LOST_AT_ONCE * drafted.num_rows
        ):
            return
        if gained < -len(self._gained) * COST_OF_LOOKING * drafted.num_rows:
            worth = int(-gained / drafted.num_rows / COST_OF_LOOKING)
            self._break_left = min(worth, self._longest_break)
            self._longest_break *= LONGER_EACH_TIME
            self._looks_again = True
            self._gained.clear()
        elif len(self._gained) >= FIRST_LOOK:
            self._looks_again, self._longest_break = False, FIRST_BREAK

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was learned to a JSON file."""
        with self._lock:
            learned = {
                "most_nodes": self.most_nodes,
                "forward_seconds": self._times.to_list(),
                "draft_seconds": {rows: median(times) for rows, times in self._draft_times.items()},
                "trust": self._trust.to_list(),
            }
        Path(path).write_text(json.dumps(learned, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AutoBudget:
        """Reads what `save` wrote.

        Raises:
            ValueError: If the file holds something else.
        """
        try:
            learned = json.loads(Path(path).read_text())
            policy = cls(learned["most_nodes"])
            policy._times.add_list(learned["forward_seconds"])
            for rows, seconds in learned["draft_seconds"].items():
                if not 0 <= seconds <= LONGEST:
                    raise ValueError(f"{seconds!r} seconds for a draft")
                policy._draft_times[int(rows)] = deque([float(seconds)], maxlen=SAMPLES)
            policy._trust = Trust.from_list(learned["trust"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no file that `AutoBudget.save` wrote: {error!r}.") from error
        return policy

    @property
    def trust(self) -> np.ndarray:
        """`(depths,)`, drafted tokens that were right at each depth from 1 on, for each that was promised."""
        return self._trust.by_depth()[1:]


@dataclass(frozen=True)
class _DraftedRound:
    """What a round with a draft is to gain, and what it costs, in tokens of plain decoding by the rows that go on."""

    expected: float
    cost: float
    num_rows: int


class Trust:
    """How far a drafter's probabilities can be believed, by depth: how many drafted tokens were right there, for each
    that the probabilities promised. Starts with full trust."""

    def __init__(self) -> None:
        self._right: np.ndarray = np.full(1 + DEEPEST, TRUST_PRIOR)
        self._promised: np.ndarray = np.full(1 + DEEPEST, TRUST_PRIOR)
        self._stated: np.ndarray = np.zeros(1 + DEEPEST)

    def state(self, nodes: _Nodes, size: int) -> None:
        """Takes what the trees that are verified promise."""
        taken = nodes.rank < size
        self._stated = np.bincount(nodes.depths[taken], nodes.probabilities[taken], minlength=1 + DEEPEST)

    def learn(self, accepted: Sequence[int]) -> None:
        """Takes how deep each row's tree was right."""
        depths = np.minimum(accepted, DEEPEST)
        right = np.bincount(depths, minlength=1 + DEEPEST)[::-1].cumsum()[::-1]
        for total, now in ((self._right, right), (self._promised, self._stated)):
            total += now - (1.0 - KEPT) * (total - TRUST_PRIOR)

    def by_depth(self) -> np.ndarray:
        """`(1 + DEEPEST,)`, never rising, as a node is right only if its parent is."""
        return np.concatenate(([1.0], np.minimum.accumulate(self._right[1:] / self._promised[1:])))

    def to_list(self) -> list[list[float]]:
        """What `from_list` takes."""
        return [self._right.tolist(), self._promised.tolist()]

    @classmethod
    def from_list(cls, counts: list[list[float]]) -> Trust:
        """The trust whose `to_list` gave `counts`."""
        trust = cls()
        trust._right, trust._promised = (np.array(count, dtype=float) for count in counts)
        if trust._right.shape != (1 + DEEPEST,) or trust._promised.shape != (1 + DEEPEST,):
            raise ValueError("counts of another length")
        if not all(((count > 1e-3) & (count < 1e6)).all() for count in (trust._right, trust._promised)):
            raise ValueError("counts that drafting does not give")
        return trust


@dataclass(frozen=True)
class _Nodes:
    """The drafted nodes of all rows' trees.

    Attributes:
        rank: `(n,)`, place of each node among its tree's by falling probability, from 0; `truncate(size)` keeps those
            below `size`.
        depths: `(n,)`, at most `DEEPEST`.
        probabilities: `(n,)`, of their paths.
    """

    rank: np.ndarray
    depths: np.ndarray
    probabilities: np.ndarray

    def gains(self, trust: Trust | None, sizes: np.ndarray) -> np.ndarray:
        """`(s,)`, the expected number of accepted tokens of all rows if `sizes (s,)` nodes of each tree are kept."""
        weights = self.probabilities if trust is None else self.probabilities * trust.by_depth()[self.depths]
        of_rank = np.concatenate(([0.0], np.bincount(self.rank, weights).cumsum()))
        return of_rank[np.minimum(sizes, len(of_rank) - 1)]


def _by_probability(trees: Sequence[DraftTree]) -> _Nodes:
    ranks, depths, probabilities = [], [], []
    for tree in trees:
        log_probs = tree.log_probs.numpy()[1:]
        order = np.argsort(-log_probs, kind="stable")
        ranks.append(np.arange(len(order)))
        depths.append(tree.depths.numpy()[1:][order])
        probabilities.append(np.exp(log_probs[order]))
    return _Nodes(np.concatenate(ranks), np.minimum(np.concatenate(depths), DEEPEST), np.concatenate(probabilities))


class ForwardTimes:
    """Times of a target's forwards by context, rows and size: medians of the last few.

    A machine is slower at one time than at another, for forwards of all sizes alike, and a size that was timed in a
    slow minute would look slow until it is timed again, which it then never is. So times are kept in units of the
    machine's pace: the median, over the last rounds, of a forward's time by what its size usually takes.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], dict[int, deque[float]]] = {}
        self._tried: dict[int, int] = {}
        self._paces: deque[float] = deque(maxlen=SAMPLES_OF_PACE)
        self._pace = 1.0

    def next_to_try(self, num_rows: int) -> int | None:
        """A size to time before anything can be said; None when there is none left."""
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

        They never fall with the size. Sizes in between are interpolated, and those beyond the largest take longer by
        as much a node as that one. Up to the first size they always are, as nothing may have been found to draft yet.
        """
        samples = self._of_context(num_cached, num_rows)
        timed = sorted(samples)
        seconds = self._pace * _never_falling([samples[size] for size in timed])
        largest = min(most_nodes, max(2 * timed[-1] + 1, FIRST_SIZES[0]))
        sizes = np.array([size for size in SIZES if size <= largest])
        a_node = (seconds[-1] - seconds[0]) / max(timed[-1] - timed[0], 1)
        return sizes, np.interp(sizes, timed, seconds) + a_node * np.maximum(sizes - timed[-1], 0)

    def to_list(self) -> list[tuple[int, int, int, float]]:
        """Rows, context, size and seconds of all that was timed."""
        return [
            (rows, context, size, self._pace * _typical(times))
            for (rows, context), of_size in self._samples.items()
            for size, times in of_size.items()
        ]

    def add_list(self, entries: Sequence[tuple[int, int, int, float]]) -> None:
        """Takes what `to_list` gave."""
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
            # Until it has times of its own, a context counts as the nearest that was timed.
            others = [other for rows, other in self._samples if rows == num_rows]
            nearest = min(others, key=lambda other: abs(other - context), default=None)
            known = {} if nearest is None else self._samples[num_rows, nearest]
            self._samples[key] = {size: _times_of(size, _typical(times)) for size, times in known.items()}
        return self._samples[key]


def _times_of(size: int, *seconds: float) -> deque[float]:
    return deque(seconds, maxlen=SAMPLES if size else SAMPLES_OF_PLAIN)


def _typical(times: deque[float]) -> float:
    """The median; of very few, the least, as the first ones are slow."""
    return min(times) if len(times) < FEW else median(times)


def _never_falling(samples: Sequence[deque[float]]) -> np.ndarray:
    """What is typical of each `(n,)`, moved as little as need be for none to be below the one before it."""
    pools: list[tuple[float, int, int]] = []
    for times in samples:
        level, weight, count = _typical(times), len(times), 1
        while pools and pools[-1][0] > level:
            other, its_weight, its_count = pools.pop()
            level = (level * weight + other * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        pools.append((level, weight, count))
    return np.repeat([level for level, _, _ in pools], [count for _, _, count in pools])


_learned: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[type, AutoBudget]]] = WeakKeyDictionary()


def policy_for(tree_budget: Any, model: Any, assistant_model: Any, generator: Any) -> BudgetPolicy:
    """The policy that the knob `tree_budget` asks for.

    Args:
        tree_budget: A number of nodes, `"auto"` or a policy.
        model: The target.
        assistant_model: The drafter, or None. With `"auto"`, calls with the same target and drafter learn together.
        generator: Who drafts; other kinds of generators learn apart.

    Raises:
        TypeError: If `tree_budget` is none of these.
    """
    if isinstance(tree_budget, BudgetPolicy):
        return tree_budget
    if isinstance(tree_budget, Integral):
        return FixedBudget(int(tree_budget))
    if tree_budget != "auto":
        raise TypeError(
            '`tree_budget` must be an integer, "auto" or an instance of `hf_ddtree.BudgetPolicy`, but is '
            f"{describe_type(tree_budget)}."
        )
    kind = type(generator)
    of_model = _learned.setdefault(model, WeakKeyDictionary())
    of_drafter = of_model.setdefault(kind if assistant_model is None else assistant_model, {})
    return of_drafter.setdefault(kind, AutoBudget())
