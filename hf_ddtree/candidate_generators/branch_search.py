"""Trees that know their branches, from a drafter that does not.

A block drafter's marginal `p_d(t)` at depth `d` is blind to the branch. What the target said after the last tokens `a`
of a branch, `q(t | a)` with a count `N` of observations (`SuccessorTables`), is blind to the drafter. A node's
candidates get the product of both,

    P(t | a) ~ p_d(t)^x  (1 + q(t | a) / e)^(w N / (N + k)),

normalised together with what is outside of the candidates of both. `e` is what `q` is never below. The powers are
learned while decoding (`Powers`), with one `x` on the spine (below the drafter's best candidates alone) and one off
it, where marginals are worth less. Where nothing is known of `a` it is the marginal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from ..draft_memory.successor_tables import SuccessorTables
from ..drafters.mixture import Powers
from ..tree.draft_tree import DraftTree
from ..tree.shape import TreeShape

# Places of `x` on the spine and off it, and of `w`, among the powers.
ON_SPINE, OFF_SPINE, SUCCESSORS = range(3)
# The count `k` at which half of `w` is reached, and the least `q`.
HALF_COUNT, LEAST_SUCCESSOR = 0.25, 5e-4
# The drafter's candidates that are combined with successors, at each node.
MOST_COMBINED = 12
# What a candidate of the tables alone gets of the marginal: half of the least candidate's, and half of this at most.
UNFORESEEN = 1e-3
# The least mass outside of the candidates.
LEAST_OUTSIDE = 1e-4
# The least log-probability of a candidate that is worth a node.
LEAST_LOG_PROB = -12.0


class BranchCandidates:
    """One round's candidates after each node, given its branch, for one row.

    Args:
        log_probs: `(depth, 2, k)` float32, the drafter's marginals on the spine and off it, descending along `k`.
        token_ids: `(depth, k)` int64.
        tables: What the target said.
        powers: `x` on the spine and off it, and `w`.
        last_tokens: The last three tokens at the root, the root last; -1 where there is none.
    """

    def __init__(
        self, log_probs: Tensor, token_ids: Tensor, tables: SuccessorTables, powers: Powers, last_tokens: Sequence[int]
    ) -> None:
        self.last_tokens = tuple(last_tokens)
        self._log_probs = log_probs.numpy()
        self._token_ids = token_ids.numpy()
        self._tables = tables
        self._powers = powers
        self._best = token_ids[:, :MOST_COMBINED].tolist()
        self._stated_best = log_probs[..., :MOST_COMBINED].tolist()
        self._outside = np.log((1 - np.exp(self._log_probs).sum(axis=-1)).clip(min=LEAST_OUTSIDE)).tolist()
        self._found: dict[tuple[int, bool, int], tuple[list[int], list[float]]] = {}

    @property
    def depth(self) -> int:
        """Depth of the deepest candidates."""
        return len(self._token_ids)

    def best(self, depth: int) -> int:
        """The drafter's best candidate at a depth from 0 on, which stays on the spine."""
        return self._best[depth][0]

    def after(self, context: Sequence[int], depth: int, off_spine: bool) -> tuple[list[int], list[float]]:
        """The candidates after a node and their log-probabilities, falling.

        Args:
            context: The last three tokens at the node, its own the newest; -1 where there is none.
            depth: Depth of the node.
            off_spine: Whether the node is off the spine.
        """
        slot = self._tables.slot_of(context)
        found = self._found.get((depth, off_spine, slot))
        if found is None:
            found = self._combined(slot, depth, off_spine) if slot else self._stated(depth, off_spine)
            self._found[depth, off_spine, slot] = found
        return found

    def learn(self, emitted: Sequence[int]) -> None:
        """Lets the powers learn from the tokens that were emitted after the root."""
        context, off_spine = self.last_tokens, False
        used, factors, chosen = [], [], []
        for depth, token in enumerate(emitted[: self.depth]):
            slot = self._tables.slot_of(context)
            if slot:
                tokens, stated, said = self._factors(slot, depth, off_spine)
                used.append(OFF_SPINE if off_spine else ON_SPINE)
                factors.append((stated, said))
                chosen.append(tokens.index(token) if token in tokens else len(tokens))
            off_spine = off_spine or token != self._best[depth][0]
            context = (context[1], context[2], token)
        if factors:
            self._powers.learn([(power, SUCCESSORS) for power in used], factors, chosen)

    def _stated(self, depth: int, off_spine: bool) -> tuple[list[int], list[float]]:
        return self._token_ids[depth].tolist(), self._log_probs[depth, int(off_spine)].tolist()

    def _combined(self, slot: int, depth: int, off_spine: bool) -> tuple[list[int], list[float]]:
        tokens, stated, said = self._factors(slot, depth, off_spine)
        power, weight = self._powers.values[OFF_SPINE if off_spine else ON_SPINE], self._powers.values[SUCCESSORS]
        scores = [power * one + weight * other for one, other in zip(stated, said)]
        total = math.log(sum(map(math.exp, scores)))
        found = [(score - total, token) for score, token in zip(scores, tokens) if score - total > LEAST_LOG_PROB]
        found.sort(key=_falling)
        return [token for _, token in found], [log_prob for log_prob, _ in found]

    def _factors(self, slot: int, depth: int, off_spine: bool) -> tuple[list[int], list[float], list[float]]:
        """The candidates of both, the logarithm of the marginal of each and last of all others, and the same of
        `(1 + q / e)^(N / (N + k))`."""
        successors, probs, count = self._tables.entry(slot)
        known = count / (count + HALF_COUNT)
        gains = {t: known * math.log1p(p / LEAST_SUCCESSOR) for t, p in zip(successors, probs) if p > 0.0}
        tokens, stated = self._best[depth].copy(), self._stated_best[depth][off_spine].copy()
        said = [gains.pop(token, 0.0) for token in tokens]
        if gains:
            least = math.log(0.5 * min(math.exp(stated[-1]), UNFORESEEN) + 1e-9)
            tokens += gains
            stated += [least] * len(gains)
            said += gains.values()
        stated.append(self._outside[depth][off_spine])
        said.append(known * math.log1p(max(0.0, 1.0 - sum(probs)) / LEAST_SUCCESSOR))
        return tokens, stated, said


def _falling(candidate: tuple[float, int]) -> float:
    return -candidate[0]


def search_branches(
    candidates: BranchCandidates,
    budget: int,
    shape: TreeShape = "best_first",
    most_children: int | None = None,
) -> DraftTree:
    """The `budget` most probable prefixes, as `build_tree` finds them one by one.

    Args:
        candidates: What may follow each node.
        budget: Most nodes to draft, the root excluded.
        shape: `"best_first"`, or `"spine_first"` for the best candidate after each best one before all others.
        most_children: Most children of a node; None for no limit.
    """
    last_tokens = candidates.last_tokens
    depth, spine_first = candidates.depth, shape == "spine_first"
    tokens, parents, levels, path_costs = [last_tokens[-1]], [-1], [0], [0.0]
    states = [(last_tokens, False, spine_first)]
    following = [candidates.after(last_tokens, 0, False)]
    heap: list[tuple[bool, float, int, int, int]] = []

    def consider(parent: int, rank: int) -> None:
        _, log_probs = following[parent]
        if rank < len(log_probs) and log_probs[rank] > -math.inf and (most_children is None or rank < most_children):
            is_late = not (states[parent][2] and rank == 0)
            heappush(heap, (is_late, path_costs[parent] - log_probs[rank], levels[parent], parent, rank))

    consider(0, 0)
    while heap and len(tokens) <= budget:
        is_late, cost, level, parent, rank = heappop(heap)
        context, off_spine, _ = states[parent]
        token = following[parent][0][rank]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        levels.append(level + 1)
        path_costs.append(cost)
        if rank + 1 < len(following[parent][0]):
            consider(parent, rank + 1)
        context = (context[1], context[2], token)
        off_spine = off_spine or token != candidates.best(level)
        states.append((context, off_spine, not is_late))
        if level + 1 < depth:
            following.append(candidates.after(context, level + 1, off_spine))
            consider(node, 0)
        else:
            following.append(([], []))
    order = sorted(range(len(tokens)), key=lambda node: (levels[node], path_costs[node]))
    places = sorted(range(len(tokens)), key=order.__getitem__)
    return DraftTree(
        torch.from_numpy(np.array([tokens[node] for node in order])),
        torch.from_numpy(np.array([-1, *(places[parents[node]] for node in order[1:])])),
        torch.from_numpy(-np.array([path_costs[node] for node in order], dtype=np.float32)),
    )
