"""`build_tree` as tensor operations, for candidates that lie on an accelerator.

All rows of a batch are searched at once, level by level, without a look at any value on the way, so that only the
finished trees cross to the host. Which nodes are kept, and in which order, is exactly what `build_tree` says.

A cost is the negative logarithm of a probability. As a float32 that is not negative it orders as the integer of the
same bits; with its place in the lower half of an int64 no two keys are equal, and ties go to the smaller place, as in
a stable sort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..validation import require_positive_int
from .build import rank_pairs
from .candidates import on_host
from .draft_tree import DraftTree
from .shape import TreeShape, require_tree_shape

KEY_SHIFT = 1 << 32


def search_trees(
    log_probs: Tensor,
    token_ids: Tensor,
    roots: Sequence[int],
    budget: int,
    shape: TreeShape = "best_first",
    *,
    next_state: Tensor | None = None,
    to_host: Callable[..., list[Tensor]] = on_host,
) -> list[DraftTree]:
    """The trees that `build_tree` builds of each row, with one transfer to the host.

    Args:
        log_probs: `(batch, depth, k)`, or `(batch, depth, states, k)` with `next_state`, as `build_tree` takes them.
        token_ids: Integers of the same shape.
        roots: For each row the token of its root.
        budget: Most nodes to draft, the root excluded.
        shape: `"best_first"`, `"spine_first"` or `"chain"`.
        next_state: Integers of the same shape, or one that can be expanded to it; None if `log_probs` has no states.
        to_host: Brings tensors to the CPU with one transfer.

    Raises:
        ValueError: If `budget` or `shape` is not as described. The candidates are not checked.
    """
    require_positive_int("budget", budget)
    require_tree_shape("shape", shape)
    batch_size, depth, width = len(log_probs), log_probs.shape[1], log_probs.shape[-1]
    depth = min(depth, budget)
    width = 1 if shape == "chain" else min(width, budget)
    costs = -log_probs[:, :depth].float()
    if next_state is None:
        levels = _search(costs, budget, width)
        # The best candidates of all depths make the cheapest prefix of each depth, which comes first there.
        spine_slots = levels.parents.new_zeros((batch_size, depth))
    else:
        levels, spine_slots = _search_states(
            costs, next_state.expand(log_probs.shape)[:, :depth], budget, width, shape == "spine_first"
        )
    slots = levels.costs.shape[2]
    places = torch.arange(depth * slots, device=costs.device)
    keys = torch.add(places, levels.costs.flatten(1).contiguous().view(torch.int32), alpha=KEY_SHIFT)
    if shape == "spine_first":
        spine = spine_slots + torch.arange(0, depth * slots, slots, device=costs.device)
        is_spine = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, spine, True)
        keys = torch.where(is_spine & levels.costs.flatten(1).isfinite(), places, keys + KEY_SHIFT)
    kept = keys.topk(min(budget, depth * slots), largest=False, sorted=False).values % KEY_SHIFT
    path_costs = levels.costs.flatten(1).gather(1, kept)
    kept, order = torch.where(path_costs.isfinite(), kept, depth * slots).sort(dim=1)
    path_costs = path_costs.gather(1, order)
    place = kept.clamp(max=depth * slots - 1)
    level = place // slots
    # A node's parent stands on the level before; the root is node 0.
    parent_place = (level - 1) * slots + levels.parents.flatten(1).gather(1, place)
    parents = torch.where(level == 0, 0, torch.searchsorted(kept, parent_place) + 1)
    candidates = token_ids[:, :depth].flatten(2)
    entry = level * candidates.shape[2] + levels.entries.flatten(1).gather(1, place)
    tokens = candidates.flatten(1).gather(1, entry)
    return [_tree(*of_row) for of_row in zip(roots, *to_host(tokens, parents, path_costs))]


def _tree(root: int, tokens: Tensor, parents: Tensor, costs: Tensor) -> DraftTree:
    """A tree of drafted nodes, cheap ones before those that are left because there are no others."""
    drafted = int(costs.isfinite().sum())
    if drafted == 0:
        return DraftTree.root_only(root)
    return DraftTree(
        torch.nn.functional.pad(tokens[:drafted], (1, 0), value=root),
        torch.nn.functional.pad(parents[:drafted], (1, 0), value=-1),
        -torch.nn.functional.pad(costs[:drafted], (1, 0)),
    )


class _Levels:
    """The best prefixes of each depth, in slots by rising cost; where there are none, the cost is infinite.

    Attributes:
        costs: `(batch, depth, slots)` float32.
        parents: `(batch, depth, slots)` int64, the slot of the parent on the level before.
        entries: `(batch, depth, slots)` int64, the candidate, counted through all states.
    """

    def __init__(self, costs: list[Tensor], parents: list[Tensor], entries: list[Tensor]) -> None:
        self.costs = torch.stack(costs, dim=1)
        self.parents = torch.stack(parents, dim=1)
        self.entries = torch.stack(entries, dim=1)


def _search(costs: Tensor, budget: int, width: int) -> _Levels:
    """Level by level over pairs of a prefix and a candidate that can be among the best, from `(batch, depth, k)`."""
    slots = budget if width > 1 else 1
    pair_parents, pair_ranks, places = _pairs_on_device(budget, width, slots, costs.device)
    of_pairs = costs.index_select(2, pair_ranks)
    frontier = costs.new_full((len(costs), slots), float("inf"))
    frontier[:, 0] = 0.0
    all_costs, chosen = [], []
    for level in range(costs.shape[1]):
        pair_costs = frontier.index_select(1, pair_parents) + of_pairs[:, level]
        pairs = _cheapest(pair_costs, places, slots)
        frontier = pair_costs.gather(1, pairs)
        all_costs.append(frontier)
        chosen.append(pairs)
    return _Levels(all_costs, [pair_parents[pairs] for pairs in chosen], [pair_ranks[pairs] for pairs in chosen])


def _search_states(
    costs: Tensor, next_state: Tensor, budget: int, width: int, keep_spine: bool
) -> tuple[_Levels, Tensor]:
    """Level by level over all candidates of all prefixes, each by its state, from `(batch, depth, states, k)`.

    Returns:
        The levels, and `(batch, depth)` int64, the slot where the spine stands. With `keep_spine` it has a slot of its
        own, the last one, wherever it is not among the best.
    """
    batch_size, depth, num_states, row = costs.shape
    best = budget if width > 1 else 1
    slots = best + 1 if keep_spine else best
    places = torch.arange(slots * width, device=costs.device)
    next_state = next_state.flatten(2)
    frontier = costs.new_full((batch_size, slots), float("inf"))
    frontier[:, 0] = 0.0
    states = torch.zeros((batch_size, slots), dtype=torch.int64, device=costs.device)
    spine = states[:, :1]
    all_costs, all_parents, all_entries, spines = [], [], [], []
    for level in range(depth):
        of_states = costs[:, level, :, :width].gather(1, states[..., None].expand(-1, -1, width))
        pair_costs = (frontier[..., None] + of_states).flatten(1)
        pairs = _cheapest(pair_costs, places, best)
        chosen = pair_costs.gather(1, pairs)
        if keep_spine:
            # Its next token is the best of its state.
            pair = spine * width
            is_spine = pairs == pair
            beside = ~is_spine.any(dim=1, keepdim=True)
            spine = torch.where(beside, best, is_spine.int().argmax(dim=1, keepdim=True))
            pairs = torch.cat((pairs, pair), dim=1)
            chosen = torch.cat((chosen, pair_costs.gather(1, pair).masked_fill(~beside, float("inf"))), dim=1)
        frontier = chosen
        parents = pairs // width
        entries = states.gather(1, parents) * row + pairs % width
        states = next_state[:, level].gather(1, entries)
        all_costs.append(frontier)
        all_parents.append(parents)
        all_entries.append(entries)
        spines.append(spine)
    return _Levels(all_costs, all_parents, all_entries), torch.cat(spines, dim=1)


def _cheapest(costs: Tensor, places: Tensor, count: int) -> Tensor:
    """`(batch, count)`, where the cheapest of `(batch, pairs)` stand, by rising cost, then by place."""
    keys = torch.add(places, costs.view(torch.int32), alpha=KEY_SHIFT)
    return keys.topk(count, largest=False).values % KEY_SHIFT


@lru_cache(maxsize=16)
def _pairs_on_device(budget: int, width: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents' slots, candidates' ranks and places of the pairs that `rank_pairs` gives."""
    parents, ranks, ends = rank_pairs(budget, width)
    pairs = ends[slots]
    made = torch.from_numpy(parents[:pairs]), torch.from_numpy(ranks[:pairs]), torch.arange(pairs, device="cpu")
    parents_on_device, ranks_on_device, places = (part.to(device) for part in made)
    return parents_on_device, ranks_on_device, places
