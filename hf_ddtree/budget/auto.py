"""A node budget that is learned while decoding.

A round that verifies a tree takes longer than a step of standard decoding, and emits more tokens. Which tree pays
depends on the model, the machine, the text and the drafter. `AutoBudget` measures all of it while decoding: the time
of a target forward at a few sizes, the time of a draft, and the drafter's acceptance rate by depth relative to its own
probabilities. The tree `T` to verify maximises the expected throughput

    E[tokens | T] / (seconds(draft) + seconds(T))

where `E[tokens | T]` is one plus the sum of the path probabilities of the nodes of `T`: a node adds a token if the
target accepts its path. The probabilities are those of this round's tree, not an average over past rounds, which would
mistake easy text so far for easy text ahead. CaDDTree (arXiv:2606.01813) chooses by a similar estimate from a profile
made in advance.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

import numpy as np
from transformers.utils import logging

from ..tree.draft_tree import DraftTree
from ..validation import require_positive_int
from .acceptance_rate import AcceptanceRate, nodes_by_probability
from .forward_times import (
    FIRST_SIZES,
    LONGEST,
    SAMPLES,
    SHORTEST,
    ForwardTimes,
)
from .policy import BudgetPolicy, FixedBudget, RoundCost

logger = logging.get_logger(__name__)

# Rounds of drafting after which a neighbouring size is timed again, and standard decoding.
ROUNDS_PER_NEIGHBOUR, ROUNDS_PER_STANDARD = 16, 64

# Rounds of drafting that are judged before drafting is disabled, at first and when it is probed again.
TRIAL_ROUNDS, PROBE_ROUNDS = 8, 2

# Exponential backoff. Probing may cost this fraction of the standard decoding in between. The first pause is short
# however much was lost, as bad luck may be the reason, and each may be this many times as long as the one before.
PROBE_OVERHEAD = 0.01
FIRST_BACKOFF, BACKOFF_FACTOR = 16, 4

# Tokens lost per row after which drafting is disabled without waiting for the end of the trial.
LARGEST_LOSS = 2.0


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Serializes a method over threads: concurrent `generate()` calls share what is learned."""

    @functools.wraps(method)
    def locked(self: AutoBudget, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return locked


class AutoBudget(BudgetPolicy):
    """Learns while decoding which number of nodes gives most tokens per second, standard decoding included.

    Where drafting does not pay it disables it and re-probes with exponential backoff. A drafter that learns while
    decoding is asked in each round, and its probabilities are corrected by what came of them lately. What is learned
    depends on the target, the drafter and the machine. One instance may serve many calls with the same, and can be
    saved.

    Args:
        most_nodes: Drafted nodes of the largest tree to consider.
        drafter_learns: Whether drafts get better in the course of a call, and cost little.

    Raises:
        ValueError: If `most_nodes` is no integer of at least 1.
    """

    def __init__(self, most_nodes: int = 64, drafter_learns: bool = False) -> None:
        require_positive_int("most_nodes", most_nodes)
        self.most_nodes = most_nodes
        self._drafter_learns = drafter_learns
        self._lock = threading.Lock()
        self._times = ForwardTimes()
        self._draft_times: dict[int, deque[float]] = {}
        self._trust = AcceptanceRate()
        # Tokens that recent drafts gained over standard decoding in the same time.
        self._gained: deque[float] = deque(maxlen=TRIAL_ROUNDS)
        self._probing = False
        self._rounds_disabled, self._longest_backoff = 0, FIRST_BACKOFF
        self._largest = FIRST_SIZES[0]
        self._rounds_drafted = 0
        self._round: _DraftedRound | None = None
        self._num_rows = 1

    def __copy__(self) -> AutoBudget:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoBudget:
        """The policy itself: a copy of a `GenerationConfig` goes on learning with the original."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "An `AutoBudget` keeps learning and cannot be pickled. Keep what it learned with `policy.save(path)`, and "
            "load it with `AutoBudget.load(path)`."
        )

    @property
    def drafting_disabled(self) -> bool:
        with self._lock:
            return self._rounds_disabled > 0

    def to_dict(self) -> Literal["auto"]:
        """The knob that stands for it in a file, which does not hold what was learned."""
        return "auto"

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
        if self._rounds_disabled > 0:
            self._rounds_disabled -= 1
            return 0
        if self._rounds_drafted % ROUNDS_PER_STANDARD == ROUNDS_PER_STANDARD // 2:
            self._rounds_drafted += 1
            return 0
        return min(self.most_nodes, 2 * self._largest + 1)

    @_locked
    def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
        unfinished_rows, num_rows = len(trees), self._num_rows
        nodes = nodes_by_probability(trees)
        size = self._times.next_to_try(num_rows)
        if size is not None:
            size = min(size, self.most_nodes)
        else:
            sizes, seconds = self._times.estimate(num_cached, num_rows, self.most_nodes)
            standard_rate = unfinished_rows / seconds[0]
            drafting = median(self._draft_times.get(num_rows, [0.0]))
            # A probe relies on the drafter's own probabilities: what was learned before the pause may be out of date.
            gains = nodes.gains(None if self._probing else self._trust, sizes)
            best = int(np.argmax((unfinished_rows + gains) / (drafting + seconds)))
            if self._rounds_drafted % ROUNDS_PER_NEIGHBOUR == ROUNDS_PER_NEIGHBOUR - 1:
                up = self._rounds_drafted // ROUNDS_PER_NEIGHBOUR % 2
                best = min(max(best + (1 if up else -1), 0), len(sizes) - 1)
            size = int(sizes[best])
            expected = float(nodes.gains(self._trust, sizes[best : best + 1])[0])
            cost = float(standard_rate * (drafting + seconds[best]) - unfinished_rows)
            self._round = _DraftedRound(expected, cost, unfinished_rows)
            self._largest = max(size, 8, int(0.9 * self._largest))
            self._rounds_drafted += 1
        self._trust.expect(nodes, size)
        return size

    @_locked
    def observe(self, cost: RoundCost) -> None:
        if SHORTEST <= cost.verify_seconds <= LONGEST:
            self._times.add(cost.num_cached, cost.num_rows, cost.num_drafted, cost.verify_seconds)
        if cost.draft_seconds is not None:
            if 0 <= cost.draft_seconds <= LONGEST:
                # The first draft after a prompt or a pause processes all tokens since the last; the median drops it.
                self._draft_times.setdefault(cost.num_rows, deque(maxlen=SAMPLES)).append(cost.draft_seconds)
            self._trust.learn(cost.accepted)
        if self._round is not None and not self._drafter_learns:
            self._decide(self._round, sum(cost.accepted))

    def _decide(self, drafted: _DraftedRound, num_accepted: int) -> None:
        """Disables drafting for some rounds if it has not paid lately."""
        # What was learned before a pause may be out of date, so in a probe the accepted tokens count as much.
        gain = (drafted.expected + num_accepted) / 2 if self._probing else drafted.expected
        self._gained.append(gain - drafted.cost)
        gained = sum(self._gained)
        if len(self._gained) < PROBE_ROUNDS or (
            len(self._gained) < TRIAL_ROUNDS and gained > -LARGEST_LOSS * drafted.num_rows
        ):
            return
        if gained < -len(self._gained) * PROBE_OVERHEAD * drafted.num_rows:
            rounds = int(-gained / drafted.num_rows / PROBE_OVERHEAD)
            self._rounds_disabled = min(rounds, self._longest_backoff)
            self._longest_backoff *= BACKOFF_FACTOR
            self._probing = True
            self._gained.clear()
            logger.warning_once(
                '`tree_budget="auto"` has disabled drafting for now: standard decoding gives more tokens per second '
                "on this text and machine. It will probe again. That is expected where a drafter is seldom right, or "
                "where a forward over a tree takes much longer than over one token. To draft in any case, set a "
                "number as `tree_budget`; `ddtree_stats.acceptance_by_depth` tells how often the drafter is right, "
                "and `hf-ddtree bench` measures other budgets and drafters."
            )
        elif len(self._gained) >= TRIAL_ROUNDS:
            self._probing, self._longest_backoff = False, FIRST_BACKOFF

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
            raise ValueError(f"{str(path)!r} is not a file that `AutoBudget.save` wrote: {error!r}.") from error
        return policy

    @property
    def trust(self) -> np.ndarray:
        """`(depths,)`, accepted by expected tokens at each depth from 1 on."""
        return self._trust.by_depth()[1:]


@dataclass(frozen=True)
class _DraftedRound:
    """A round with a draft, in tokens of all unfinished rows.

    Attributes:
        expected: Accepted tokens that are expected.
        cost: Tokens that standard decoding would emit in the additional time.
        num_rows: Unfinished rows.
    """

    expected: float
    cost: float
    num_rows: int


_learned: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[type, AutoBudget]]] = WeakKeyDictionary()


def policy_for(
    tree_budget: int | Literal["auto"] | BudgetPolicy, model: Any, assistant_model: Any, generator: Any
) -> BudgetPolicy:
    """The policy that the knob `tree_budget` asks for.

    Args:
        tree_budget: A number of nodes, `"auto"` or a policy.
        model: The target.
        assistant_model: The drafter, or None. With `"auto"`, calls with the same target and drafter share a policy.
        generator: The candidate generator. Each kind of generator learns on its own.
    """
    if isinstance(tree_budget, BudgetPolicy):
        return tree_budget
    if tree_budget != "auto":
        return FixedBudget(int(tree_budget))
    kind = type(generator)
    of_model = _learned.setdefault(model, WeakKeyDictionary())
    of_drafter = of_model.setdefault(kind if assistant_model is None else assistant_model, {})
    return of_drafter.setdefault(kind, AutoBudget(drafter_learns=getattr(generator, "learns", False)))
