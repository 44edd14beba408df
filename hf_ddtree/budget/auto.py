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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

import numpy as np

from ..tree.draft_tree import DraftTree
from ..validation import describe_type, require_positive_int
from .acceptance_rate import AcceptanceRate, nodes_by_probability
from .forward_times import (
    FIRST_SIZES,
    LONGEST,
    SAMPLES,
    SHORTEST,
    ForwardTimes,
)
from .policy import BudgetPolicy, FixedBudget, RoundCost

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
        self._trust = AcceptanceRate()
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
        nodes = nodes_by_probability(trees)
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
            policy._trust = AcceptanceRate.from_list(learned["trust"])
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
