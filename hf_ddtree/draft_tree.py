"""The token tree of one round, and how it is built from a drafter's distributions.

Pure topology: nothing here knows a model. All tensors live on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from .configuration import TreeShape, require_positive_int, require_tree_shape


class DraftTree:
    """Drafted continuations of one sequence that share prefixes.

    Node 0 is the root, the last emitted token; the other nodes are drafted. Parents come before children, and
    siblings hold distinct tokens.

    The constructor trusts its arguments, as builders know what they made; `from_parents` checks them.

    Args:
        token_ids: `(n,)` int64, the token of each node.
        parents: `(n,)` int64, the parent of each node; -1 for the root.
        log_probs: `(n,)` float32, natural logarithm of the probability that the drafter gives to the path from the
            root to each node: 0 at the root, never rising from parent to child. All zeros by default.
    """

    def __init__(self, token_ids: Tensor, parents: Tensor, log_probs: Tensor | None = None) -> None:
        self.token_ids = token_ids
        self.parents = parents
        if log_probs is None:
            log_probs = torch.from_numpy(np.zeros(len(token_ids), dtype=np.float32))
        self.log_probs = log_probs

    @classmethod
    def from_parents(
        cls,
        token_ids: Tensor | list[int],
        parents: Tensor | list[int],
        log_probs: Tensor | list[float] | None = None,
    ) -> DraftTree:
        """Builds a tree from its parts and checks all that a `DraftTree` promises.

        Args:
            token_ids: `(n,)` integers.
            parents: `(n,)` integers.
            log_probs: `(n,)` floats, or None if all paths count as equally probable.

        Raises:
            ValueError: If the parts make no tree; the message says which part, where, and what is allowed.
        """
        tokens = _integer_vector("token_ids", token_ids)
        parent_ids = _integer_vector("parents", parents)
        if len(tokens) == 0:
            raise ValueError("`token_ids` is empty, but a tree has at least its root. Pass the root's token first.")
        if len(parent_ids) != len(tokens):
            raise ValueError(
                f"`parents` has {len(parent_ids)} entries for {len(tokens)} `token_ids`. Pass one parent a node."
            )
        if (tokens < 0).any():
            node = int(np.flatnonzero(tokens < 0)[0])
            raise ValueError(f"`token_ids[{node}]` is {tokens[node]}. Token ids are at least 0.")
        if parent_ids[0] != -1:
            raise ValueError(f"`parents[0]` is {parent_ids[0]}. Node 0 is the root, so its parent must be -1.")
        misplaced = (parent_ids[1:] < 0) | (parent_ids[1:] >= np.arange(1, len(tokens)))
        if misplaced.any():
            node = int(np.flatnonzero(misplaced)[0]) + 1
            raise ValueError(
                f"`parents[{node}]` is {parent_ids[node]}, but must be between 0 and {node - 1}. Order the nodes so "
                "that parents come before children, under one root."
            )
        edges = list(zip(parent_ids[1:].tolist(), tokens[1:].tolist()))
        if len(set(edges)) < len(edges):
            parent, token = next(edge for i, edge in enumerate(edges) if edge in edges[:i])
            raise ValueError(
                f"Node {parent} has two children with token {token} in `token_ids`. Merge siblings with equal tokens."
            )
        return cls(
            torch.from_numpy(tokens),
            torch.from_numpy(parent_ids),
            None if log_probs is None else _path_log_probs(log_probs, parent_ids),
        )

    @classmethod
    def root_only(cls, token_id: int) -> DraftTree:
        """A tree with nothing drafted."""
        return cls(
            torch.from_numpy(np.array([token_id], dtype=np.int64)), torch.from_numpy(np.array([-1], dtype=np.int64))
        )

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """A tree in which each token follows the one before; the first is the root."""
        return cls(torch.tensor(token_ids, device="cpu"), torch.arange(-1, len(token_ids) - 1, device="cpu"))

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"DraftTree(num_drafted={self.num_drafted}, depth={int(self.depths.max())})"

    @property
    def num_drafted(self) -> int:
        """Number of nodes without the root."""
        return len(self) - 1

    @property
    def expected_length(self) -> float:
        """Tokens that a round with this tree emits on average, the target's own last one included, if `log_probs` are
        right: the sum of all nodes' probabilities to be accepted, 1 for the root."""
        return float(np.exp(self.log_probs.numpy()).sum())

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it, so that causal attention is tree attention."""
        return self._parent_list == list(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> Tensor:
        """`(n,)` int64, the number of edges from the root to each node."""
        depths = [0]
        for parent in self._parent_list[1:]:
            depths.append(depths[parent] + 1)
        return torch.from_numpy(np.array(depths, dtype=np.int64))

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """`(n, n)` bool; row `i` marks node `i` and its ancestors."""
        if self.is_chain:
            return torch.from_numpy(np.tri(len(self), dtype=bool))
        mask = np.zeros((len(self), len(self)), dtype=bool)
        mask[0, 0] = True
        for node, parent in enumerate(self._parent_list[1:], start=1):
            mask[node] = mask[parent]
            mask[node, node] = True
        return torch.from_numpy(mask)

    def child_with_token(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        return self._child_by_edge.get((node, token))

    def children(self, node: int) -> list[int]:
        """The children of `node`, in node order."""
        return torch.nonzero(self.parents == node).flatten().tolist()

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self._parent_list[node]
        return path[::-1]

    def tokens_of(self, path: list[int]) -> list[int]:
        """The tokens of the nodes in `path`."""
        return self.token_ids[path].tolist()

    def truncate(self, budget: int) -> DraftTree:
        """The tree of the `budget` most probable drafted nodes, in the same order; itself if it has no more.

        Among equally probable nodes the earlier ones are kept. As no node is more probable than its parent, what is
        kept is a tree.

        Raises:
            ValueError: If `budget` is no integer of at least 1.
        """
        require_positive_int("budget", budget)
        if self.num_drafted <= budget:
            return self
        best = np.argsort(-self.log_probs.numpy(), kind="stable")
        kept = np.sort(np.concatenate(([0], best[best > 0][:budget])))
        parents = np.concatenate(([-1], kept.searchsorted(self.parents.numpy()[kept[1:]])))
        return DraftTree(self.token_ids[kept], torch.from_numpy(parents), self.log_probs[kept])

    def limit_depth(self, depth: int) -> DraftTree:
        """The tree without the nodes that lie deeper than `depth`; itself if there are none."""
        if self.num_drafted <= depth:
            return self
        kept = (self.depths <= depth).nonzero().flatten()
        if len(kept) == len(self):
            return self
        parents = torch.searchsorted(kept, self.parents[kept[1:]])
        return DraftTree(self.token_ids[kept], torch.cat((self.parents[:1], parents)), self.log_probs[kept])

    def merge(self, other: DraftTree) -> DraftTree:
        """The tree of all paths of both, each with the better of its log-probabilities; own nodes come first.

        Args:
            other: A tree with the same root.
        """
        tokens, parents, log_probs = self.token_ids.tolist(), self.parents.tolist(), self.log_probs.tolist()
        node_of_edge = dict(self._child_by_edge)
        places = [0]
        for token, parent, log_prob in zip(
            other.token_ids[1:].tolist(), other.parents[1:].tolist(), other.log_probs[1:].tolist()
        ):
            edge = places[parent], token
            node = node_of_edge.setdefault(edge, len(tokens))
            places.append(node)
            if node == len(tokens):
                tokens.append(token)
                parents.append(edge[0])
                log_probs.append(log_prob)
            else:
                log_probs[node] = max(log_probs[node], log_prob)
        return DraftTree(
            torch.tensor(tokens, device="cpu"),
            torch.tensor(parents, device="cpu"),
            torch.tensor(log_probs, dtype=torch.float32, device="cpu"),
        )

    def best_chain(self) -> DraftTree:
        """The path that goes on with each node's most probable child; of equally probable ones with the first."""
        path = [0]
        while children := self.children(path[-1]):
            path.append(max(children, key=lambda child: float(self.log_probs[child])))
        return DraftTree(self.token_ids[path], torch.arange(-1, len(path) - 1, device="cpu"), self.log_probs[path])

    @cached_property
    def _parent_list(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def _child_by_edge(self) -> dict[tuple[int, int], int]:
        edges = zip(self._parent_list, self.token_ids.tolist())
        return {edge: node for node, edge in enumerate(edges)}


def best_tokens(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens at each depth, with one top-k and one log-normaliser, on the device of the logits.

    Args:
        logits: `(..., depth, vocab)`, any floating dtype. Leading dimensions are rows of a batch.
        top_k: Number of candidates a depth; a smaller vocabulary gives as many as it has. A tree of `budget` nodes
            never holds a token that is not among the `budget` best of its depth.

    Returns:
        `log_probs (..., depth, k)` float32, descending along `k`, normalised over the whole vocabulary, -inf where
        the logits give no distribution, and
        `token_ids (..., depth, k)` int64.

    Raises:
        ValueError: If `top_k` is no integer of at least 1.
    """
    require_positive_int("top_k", top_k)
    log_probs, token_ids = logits.detach().float().log_softmax(dim=-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    return _or_impossible(log_probs), token_ids


def top_candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`best_tokens` on the CPU, with one transfer, for `build_tree`."""
    log_probs, token_ids = on_host(*best_tokens(logits, top_k))
    return log_probs, token_ids


def conditional_candidates(log_probs: Tensor, token_ids: Tensor, pair_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions given the token before, from `best_tokens` and scores of pairs of neighbours, on their device.

    The score of a pair is added to the logit of its second token. The scores of a predecessor's candidates are
    normalised together with the mass outside of the candidates, which no pair changes.

    Args:
        log_probs, token_ids: `(..., depth, k)`, the candidates of each depth.
        pair_scores: `(..., depth, k, k)`, by predecessor, then by token. Predecessors are the candidates of the depth
            above in their order; at the first depth only the first row counts, which is that of the root.

    Returns:
        `log_probs (..., depth, k, k)` float32, descending along the last dimension, `token_ids` int64 and
        `next_state` int64 of the same shape, as `build_tree` takes them. A prefix's state is the place of its last
        token among its depth's candidates.
    """
    scores = log_probs[..., None, :] + pair_scores
    outside = (1.0 - log_probs.exp().sum(dim=-1)).clamp(min=0.0).log()[..., None, None]
    scores = torch.cat((scores, outside.expand_as(scores[..., :1])), dim=-1).log_softmax(dim=-1)[..., :-1]
    scores = _or_impossible(scores)
    order = _descending_order(scores)
    return scores.gather(-1, order), token_ids[..., None, :].expand_as(order).gather(-1, order), order


def _descending_order(scores: Tensor) -> Tensor:
    """Where the scores stand by falling value along the last dimension; with NumPy where that is faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy((-scores.numpy()).argsort(axis=-1))
    return scores.argsort(dim=-1, descending=True)


def _or_impossible(log_probs: Tensor) -> Tensor:
    """Probability zero where there is none."""
    return log_probs.nan_to_num(nan=-float("inf"), neginf=-float("inf"))


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape, float32 or int64 that fit 32 bits, on the CPU, with one transfer."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    is_float = [tensor.is_floating_point() for tensor in tensors]
    packed = torch.stack(
        [tensor.view(torch.int32) if is_real else tensor.int() for tensor, is_real in zip(tensors, is_float)]
    )
    return [part.view(torch.float32) if is_real else part.long() for part, is_real in zip(packed.cpu(), is_float)]


def build_tree(
    log_probs: Tensor,
    token_ids: Tensor,
    root_token_id: int,
    budget: int,
    shape: TreeShape = "best_first",
    draft_length: int | None = None,
    check: bool = True,
    next_state: Tensor | None = None,
) -> DraftTree:
    """Builds the token tree of one round from one distribution a depth (DDTree, arXiv:2604.12989, algorithm 1), or
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
    can only be among the `budget` best if `(p + 1) * (r + 1) <= budget`: about `budget * ln(budget)` pairs a depth and
    state, whatever the number of candidates.

    Args:
        log_probs: `(depth, k)`, or `(depth, states, k)` with `next_state`. Log-probabilities, descending along `k`;
            -inf for what must not be drafted.
        token_ids: Integers like `log_probs`, the tokens they belong to, distinct along `k`.
        root_token_id: Token of the root, the last emitted one.
        budget: Most nodes to draft, the root excluded.
        shape: `"best_first"`, `"spine_first"` or `"chain"`.
        draft_length: Depth of the deepest node, at most (and by default) `depth`.
        check: Whether to check the candidates. What `top_candidates` and `conditional_candidates` return needs none.
        next_state: `(states, k)` or `(depth, states, k)` integers below `states`. None if `log_probs` has no states.

    Raises:
        ValueError: If an argument is not as described.
    """
    require_positive_int("budget", budget)
    require_tree_shape("shape", shape)
    if draft_length is not None:
        require_positive_int("draft_length", draft_length, or_none=True)
    if check:
        _check_candidates(log_probs, token_ids, next_state)
    costs = -log_probs.detach().to("cpu", torch.float32).numpy()
    tokens = token_ids.detach().to("cpu", torch.int64).numpy()
    depth, row = len(costs), costs.shape[-1]
    states = (
        None
        if next_state is None
        else np.broadcast_to(next_state.detach().to("cpu", torch.int64).numpy(), costs.shape)
    )
    depth = min(depth, budget, draft_length or depth)
    width = 1 if shape == "chain" else min(row, budget)
    spine = 0 if shape == "spine_first" else None

    if states is None:
        all_parents, all_ranks, pair_ends = rank_pairs(budget, width)

    # A prefix is known by its place in the concatenation of all levels; level 0 is the root. A level's candidates are
    # known by their place in its flat array.
    level_costs = [np.zeros(1, dtype=np.float32)]
    level_parents, level_entries, spine_places = [], [], [0]
    in_state = np.zeros(1, dtype=np.int64)
    cheapest = level_costs[0][:0]
    limit, start = np.float32(np.inf), 0
    for level in range(depth):
        frontier = level_costs[-1]
        if states is None:
            pairs = pair_ends[len(frontier)]
            pair_parent, entry = all_parents[:pairs], all_ranks[:pairs]
        else:
            reach = len(frontier) if spine is not None else int(frontier.searchsorted(limit))
            pair_parent, pair_rank = _pairs_by_state(in_state[:reach], budget, width)
            entry = in_state.take(pair_parent) * row + pair_rank
        pair_costs = frontier.take(pair_parent)
        pair_costs += costs[level].take(entry)
        within = (pair_costs < limit).nonzero()[0]
        if len(within) > budget:
            within = (pair_costs <= np.partition(pair_costs, budget - 1)[budget - 1]).nonzero()[0]
        if len(within) > 1:
            within = within.take(pair_costs.take(within).argsort(kind="stable")[:budget])
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

    if len(level_costs) == 1:
        return DraftTree.root_only(root_token_id)
    path_costs = np.concatenate(level_costs)
    priority = path_costs.copy()
    priority[spine_places] = -np.inf
    kept = priority.argsort(kind="stable")[: budget + 1]
    kept.sort()
    drafted = kept[1:] - 1
    step = np.arange(len(level_parents)).repeat([len(level) for level in level_parents]).take(drafted)
    candidates = tokens.reshape(len(tokens), -1)[step, np.concatenate(level_entries).take(drafted)]
    parents = kept.searchsorted(np.concatenate(level_parents).take(drafted))
    return DraftTree(
        torch.from_numpy(np.concatenate(([root_token_id], candidates))),
        torch.from_numpy(np.concatenate(([-1], parents))),
        torch.from_numpy(-path_costs.take(kept)),
    )


def _keep_spine(within: np.ndarray, pair_costs: np.ndarray, pair: int) -> tuple[np.ndarray, int | None]:
    """Adds the spine's next pair to the pairs `within` a level if it is not among them, and says where it is there.

    None where the spine ends, because its next token has probability zero. A pair that was left out is dearer than
    those that were not, so they stay in order.
    """
    if pair_costs[pair] == np.inf:
        return within, None
    place = (within == pair).nonzero()[0]
    if len(place):
        return within, int(place[0])
    return np.append(within, pair), len(within)


@lru_cache(maxsize=64)
def rank_pairs(budget: int, width: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Pairs (parent rank, candidate rank) that can be among the `budget` best, by parent rank, then candidate rank.

    Returns:
        Parent ranks and candidate ranks, both `(pairs,)` int64, and for each number of parents, from 0 to `budget`,
        how many of the pairs come from that many first parents.
    """
    parents, ranks = _pairs_of(np.arange(budget), budget, width)
    return parents, ranks, parents.searchsorted(np.arange(budget + 1)).tolist()


def _pairs_by_state(in_state: np.ndarray, budget: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`rank_pairs` where parents compete with those of their own state alone, for all of the parents.

    Args:
        in_state: `(parents,)` int64, the state of each parent, the best parent first.
    """
    if len(in_state) * width <= MANY_PAIRS:
        return _all_pairs(len(in_state), width)
    order = in_state.argsort(kind="stable")
    by_state = in_state.take(order)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - by_state.searchsorted(by_state)
    return _pairs_of(ranks, budget, width)


# Up to so many pairs it takes less time to look at all of them than to find out which can be among the best.
MANY_PAIRS = 2**13


@lru_cache(maxsize=256)
def _all_pairs(parents: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(parents).repeat(width), np.tile(np.arange(width), parents)


def _pairs_of(parent_ranks: np.ndarray, budget: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    counts = np.minimum(budget // (parent_ranks + 1), width).clip(min=1)
    ends = counts.cumsum()
    parents = np.arange(len(counts)).repeat(counts)
    return parents, np.arange(len(parents)) - (ends - counts).take(parents)


def _check_candidates(log_probs: Tensor, token_ids: Tensor, next_state: Tensor | None) -> None:
    """Raises `ValueError` unless all are of the same shape, sorted, distinct, and lead to states that exist."""
    expected = "(depth, k)" if next_state is None else "(depth, states, k)"
    if log_probs.ndim != (2 if next_state is None else 3) or 0 in log_probs.shape:
        raise ValueError(
            f"`log_probs` has shape {tuple(log_probs.shape)}, but must have shape {expected}, none of them 0, as "
            f"`next_state` is {'not ' if next_state is None else ''}given."
        )
    if token_ids.shape != log_probs.shape:
        raise ValueError(
            f"`token_ids` has shape {tuple(token_ids.shape)}, but must have that of `log_probs`, "
            f"{tuple(log_probs.shape)}."
        )
    if next_state is not None:
        _check_next_state(next_state, log_probs.shape)
    candidates = log_probs.detach().to("cpu", torch.float32).numpy()
    tokens = token_ids.detach().to("cpu", torch.int64).numpy()
    highest = candidates.max()
    if np.isnan(highest):
        raise ValueError("`log_probs` holds NaN. Look for infinities in the logits they were made from.")
    if highest > 0:
        raise ValueError(
            f"`log_probs` holds {highest}, but logarithms of probabilities are at most 0. Normalise them first, as "
            "`top_candidates` does."
        )
    if (candidates[..., 1:] > candidates[..., :-1]).any():
        raise ValueError("`log_probs` must descend along `k`. Sort the candidates of each depth, best first.")
    in_order = np.sort(tokens, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise ValueError("`token_ids` holds a token twice at one depth. Keep the more probable of the two.")


def _check_next_state(next_state: Tensor, shape: torch.Size) -> None:
    if next_state.shape not in (shape, shape[1:]):
        raise ValueError(
            f"`next_state` has shape {tuple(next_state.shape)}, but must have that of `log_probs`, {tuple(shape)}, or "
            f"the same for all depths, {tuple(shape[1:])}."
        )
    if next_state.is_floating_point() or next_state.is_complex() or next_state.dtype == torch.bool:
        raise ValueError(f"`next_state` has dtype {next_state.dtype}, but must hold integers.")
    lowest, highest = int(next_state.min()), int(next_state.max())
    if lowest < 0 or highest >= shape[1]:
        raise ValueError(
            f"`next_state` holds {lowest if lowest < 0 else highest}, but `log_probs` has states 0 to {shape[1] - 1}."
        )


def _integer_vector(name: str, values: Tensor | list[int]) -> np.ndarray:
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}, but must hold integers.")
    if tensor.ndim != 1:
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, but must be one-dimensional: an entry a node.")
    return tensor.to(torch.int64).numpy()


def _path_log_probs(log_probs: Tensor | list[float], parents: np.ndarray) -> Tensor:
    tensor = torch.as_tensor(log_probs, dtype=torch.float32, device="cpu")
    if tensor.shape != parents.shape:
        raise ValueError(
            f"`log_probs` has shape {tuple(tensor.shape)}, but must have shape {parents.shape}: an entry a node."
        )
    values = tensor.numpy()
    if np.isnan(values).any():
        raise ValueError(f"`log_probs[{np.flatnonzero(np.isnan(values))[0]}]` is NaN, but must be a number up to 0.")
    if values[0] != 0:
        raise ValueError(f"`log_probs[0]` is {values[0]}, but the root is given, so its log-probability must be 0.")
    rising = values[1:] > values[parents[1:]]
    if rising.any():
        node = int(np.flatnonzero(rising)[0]) + 1
        raise ValueError(
            f"`log_probs[{node}]` is {values[node]}, more than its parent's {values[parents[node]]}. Pass the "
            "log-probability of the path from the root, not of the last token alone."
        )
    return tensor
