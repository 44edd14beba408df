"""Building the token tree of one round from a drafter's distributions."""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from math import inf

import numpy as np
import torch
from torch import Tensor

from ..validation import require_positive_int
from .draft_tree import DraftTree
from .shape import TreeShape, require_tree_shape

# Up to this many nodes a heap takes less time than arrays of all prefixes of a depth.
FEW_NODES = 24
# Up to this many pairs it takes less time to look at all of them than to find out which can be among the best.
MANY_PAIRS = 2**13


def build_tree(
    log_probs: Tensor,
    token_ids: Tensor,
    root_token_id: int,
    budget: int,
    shape: TreeShape = "best_first",
    *,
    next_state: Tensor | None = None,
) -> DraftTree:
    """Builds the token tree of one round from one distribution per depth (DDTree, arXiv:2604.12989, algorithm 1), or
    from distributions that depend on how a prefix came about.

    The probability of a prefix is the product of its tokens' probabilities at their depths. `"best_first"` keeps the
    `budget` most probable prefixes; ties go to the smaller depth, then to the more probable parent, then to the better
    candidate. `"spine_first"` keeps the most probable token of every depth and spends what is left best-first, and
    `"chain"` keeps the former alone. Candidates of probability zero are never drafted, so a tree can be smaller than
    its budget.

    With `next_state`, every prefix has a state, the root's being 0. It chooses the distribution of the next token, and
    `next_state` says what state that token leads to. The spine then takes the best candidate given the one before.

    The nodes of the result are ordered by depth, then by falling probability.

    The search goes one depth at a time, with all of the depth's prefixes in one array. The candidate of rank `r` below
    the prefix that has rank `p` among those of its state comes after all such pairs of ranks up to `p` and `r`, so it
    can only be among the `budget` best if `(p + 1) * (r + 1) <= budget`: about `budget * ln(budget)` pairs per depth
    and state, whatever the number of candidates.

    Args:
        log_probs: `(depth, k)`, or `(depth, states, k)` with `next_state`. Log-probabilities, descending along `k`;
            -inf for what must not be drafted. None of the candidates' properties is checked.
        token_ids: Integers like `log_probs`, the tokens they belong to, distinct along `k`.
        root_token_id: Token of the root, the last emitted one.
        budget: Most nodes to draft, the root excluded.
        shape: `"best_first"`, `"spine_first"` or `"chain"`.
        next_state: `(states, k)` or `(depth, states, k)` integers below `states`. None if `log_probs` has no states.

    Raises:
        ValueError: If `budget` or `shape` is not as described.
    """
    require_positive_int("budget", budget)
    require_tree_shape("shape", shape)
    costs = -log_probs[:budget].detach().to("cpu", torch.float32).numpy()
    tokens = token_ids.detach().to("cpu", torch.int64).numpy()
    states = None
    if next_state is not None:
        states = np.broadcast_to(next_state.detach().to("cpu", torch.int64).numpy(), log_probs.shape)
    if shape == "chain":
        if states is None:
            return _chain(costs, tokens, root_token_id)
        return _one_by_one(costs, tokens, states, root_token_id, budget, width=1)
    width = min(costs.shape[-1], budget)
    if shape == "best_first" and budget <= FEW_NODES:
        return _one_by_one(costs, tokens, states, root_token_id, budget, width)
    return _depth_by_depth(costs, tokens, states, root_token_id, budget, width, keeps_spine=shape == "spine_first")


def _depth_by_depth(
    costs: np.ndarray,
    tokens: np.ndarray,
    states: np.ndarray | None,
    root_token_id: int,
    budget: int,
    width: int,
    keeps_spine: bool,
) -> DraftTree:
    """The tree of `build_tree`, best-first or spine-first, from arrays of all prefixes of a depth."""
    # A prefix is known by its place in the concatenation of all levels; level 0 is the root. A level's candidates are
    # known by their place in its flat array.
    level_costs = [np.zeros(1, dtype=np.float32)]
    level_parents: list[np.ndarray] = []
    level_entries: list[np.ndarray] = []
    spine, spine_places = 0 if keeps_spine else None, [0]
    in_state = np.zeros(1, dtype=np.int64)
    cheapest = level_costs[0][:0]
    limit, start = np.float32(np.inf), 0
    for level, of_level in enumerate(costs):
        frontier = level_costs[-1]
        if states is None:
            pair_parent, entry = _first_rank_pairs(len(frontier), budget, width)
        else:
            reach = len(frontier) if spine is not None else int(frontier.searchsorted(limit))
            pair_parent, pair_rank = _rank_pairs_by_state(in_state[:reach], budget, width)
            entry = in_state.take(pair_parent) * costs.shape[-1] + pair_rank
        pair_costs = frontier.take(pair_parent)
        pair_costs += of_level.take(entry)
        within = _cheapest_pairs(pair_costs, limit, budget)
        if spine is not None:
            within, spine = _keep_spine(within, pair_costs, int(pair_parent.searchsorted(spine)))
        if len(within) == 0:
            break
        level_parents.append(pair_parent.take(within) + start)
        level_entries.append(entry.take(within))
        level_costs.append(pair_costs.take(within))
        start += len(frontier)
        if spine is not None:
            spine_places.append(start + spine)
        if states is not None:
            in_state = states[level].take(level_entries[-1])
        cheapest = np.concatenate((cheapest, level_costs[-1]))
        if len(cheapest) >= budget:
            cheapest.partition(budget - 1)
            cheapest = cheapest[:budget]
            limit = cheapest[-1]
    if not level_parents:
        return DraftTree.root_only(root_token_id)
    candidates = [of_depth.take(entries) for of_depth, entries in zip(tokens, level_entries)]
    return _best_of(level_costs, level_parents, candidates, spine_places, root_token_id, budget)


def _cheapest_pairs(pair_costs: np.ndarray, limit: np.float32, budget: int) -> np.ndarray:
    """The places of at most `budget` pairs that cost less than `limit`, the cheapest first; ties keep their order."""
    within = (pair_costs < limit).nonzero()[0]
    if len(within) > budget:
        within = (pair_costs <= np.partition(pair_costs, budget - 1)[budget - 1]).nonzero()[0]
    if len(within) > 1:
        within = within.take(pair_costs.take(within).argsort(kind="stable")[:budget])
    return within


def _best_of(
    level_costs: list[np.ndarray],
    level_parents: list[np.ndarray],
    level_tokens: list[np.ndarray],
    spine_places: list[int],
    root_token_id: int,
    budget: int,
) -> DraftTree:
    """The tree of the spine and the cheapest other prefixes of all levels, `budget` in all."""
    path_costs = np.concatenate(level_costs)
    priority = path_costs.copy()
    priority[spine_places] = -np.inf
    kept = priority.argsort(kind="stable")[: budget + 1]
    kept.sort()
    drafted = kept[1:] - 1
    candidates = np.concatenate(level_tokens).take(drafted)
    parents = kept.searchsorted(np.concatenate(level_parents).take(drafted))
    return DraftTree(
        torch.from_numpy(np.concatenate(([root_token_id], candidates))),
        torch.from_numpy(np.concatenate(([-1], parents))),
        torch.from_numpy(-path_costs.take(kept)),
    )


def _one_by_one(
    costs: np.ndarray, tokens: np.ndarray, states: np.ndarray | None, root_token_id: int, budget: int, width: int
) -> DraftTree:
    """The tree of `build_tree`, best-first, from a heap of what may come next: the next sibling and the first child of
    each node that is in the tree (DDTree, algorithm 1)."""
    row = costs.shape[-1]
    cost_of, token_of = costs.reshape(len(costs), -1, row).item, tokens.reshape(len(tokens), -1, row).item
    found, path_costs, parents, levels, in_state = [root_token_id], [0.0], [-1], [0], [0]
    heap: list[tuple[float, int, int, int]] = []
    considered: tuple[tuple[int, int], ...] = ((0, 0),)
    while len(parents) <= budget:
        for parent, rank in considered:
            level = levels[parent]
            if rank < width and level < len(costs):
                # Rounded, as sums of float32 are.
                cost = float(np.float32(path_costs[parent] + cost_of(level, in_state[parent], rank)))
                if cost < inf:
                    heappush(heap, (cost, level, parent, rank))
        if not heap:
            break
        cost, level, parent, rank = heappop(heap)
        considered = (parent, rank + 1), (len(parents), 0)
        found.append(token_of(level, in_state[parent], rank))
        in_state.append(0 if states is None else states.item(level, in_state[parent], rank))
        path_costs.append(cost)
        parents.append(parent)
        levels.append(level + 1)

    # Nodes of one depth have come by falling probability.
    order = sorted(range(len(parents)), key=levels.__getitem__)
    place_of = {-1: -1} | {node: place for place, node in enumerate(order)}
    return DraftTree(
        torch.from_numpy(np.array([found[node] for node in order], dtype=np.int64)),
        torch.from_numpy(np.array([place_of[parents[node]] for node in order], dtype=np.int64)),
        torch.from_numpy(-np.array([path_costs[node] for node in order], dtype=np.float32)),
    )


def _chain(costs: np.ndarray, tokens: np.ndarray, root_token_id: int) -> DraftTree:
    """The best token of each depth, down to the first of probability zero, from `(depth, k)`."""
    path_costs = np.zeros(1 + len(costs), dtype=np.float32)
    costs[:, 0].cumsum(out=path_costs[1:])
    size = 1 + int(np.isfinite(path_costs[1:]).sum())
    return DraftTree(
        torch.from_numpy(np.concatenate(([root_token_id], tokens[: size - 1, 0]))),
        torch.from_numpy(np.arange(-1, size - 1)),
        torch.from_numpy(-path_costs[:size]),
    )


def _keep_spine(within: np.ndarray, pair_costs: np.ndarray, pair: int) -> tuple[np.ndarray, int | None]:
    """Adds the spine's next pair to the pairs `within` a level if it is not among them, and says where it is there.

    None where the spine ends, because its next token has probability zero. A pair that was left out costs more than
    those that were not, so they stay in order.
    """
    if pair_costs[pair] == np.inf:
        return within, None
    place = (within == pair).nonzero()[0]
    if len(place):
        return within, int(place[0])
    return np.append(within, pair), len(within)


def _first_rank_pairs(num_parents: int, budget: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`rank_pairs` of the first parents alone."""
    parents, ranks, ends = rank_pairs(budget, width)
    return parents[: ends[num_parents]], ranks[: ends[num_parents]]


@lru_cache(maxsize=64)
def rank_pairs(budget: int, width: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Pairs (parent rank, candidate rank) that can be among the `budget` best, by parent rank, then candidate rank.

    Returns:
        Parent ranks and candidate ranks, both `(pairs,)` int64, and for each number of parents, from 0 to `budget`,
        how many of the pairs come from that many first parents.
    """
    parents, ranks = _pairs_within(np.arange(budget), budget, width)
    return parents, ranks, parents.searchsorted(np.arange(budget + 1)).tolist()


def _rank_pairs_by_state(in_state: np.ndarray, budget: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`rank_pairs` where parents compete with those of their own state alone, for all of the parents.

    Args:
        in_state: `(parents,)` int64, the state of each parent, the best parent first.
    """
    if len(in_state) * width <= MANY_PAIRS:
        return _cached_all_pairs(len(in_state), width)
    order = in_state.argsort(kind="stable")
    by_state = in_state.take(order)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - by_state.searchsorted(by_state)
    return _pairs_within(ranks, budget, width)


@lru_cache(maxsize=256)
def _cached_all_pairs(parents: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(parents).repeat(width), np.tile(np.arange(width), parents)


def _pairs_within(parent_ranks: np.ndarray, budget: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    counts = np.minimum(budget // (parent_ranks + 1), width).clip(min=1)
    ends = counts.cumsum()
    parents = np.arange(len(counts)).repeat(counts)
    return parents, np.arange(len(parents)) - (ends - counts).take(parents)
