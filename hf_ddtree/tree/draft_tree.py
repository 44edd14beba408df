"""The token tree of one round.

Pure topology: nothing here knows a model. All tensors live on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..validation import require_positive_int


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
                f"`parents` has {len(parent_ids)} entries for {len(tokens)} `token_ids`. Pass one parent per node."
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
        return f"DraftTree(num_drafted={self.num_drafted}, depth={self.depth})"

    def _repr_html_(self) -> str:
        """Nested lists for notebooks: each node's token id, and the probability of its path."""
        parts: list[str] = []
        waiting: list[int | str] = [0]
        while waiting:
            node = waiting.pop()
            if isinstance(node, str):
                parts.append(node)
                continue
            parts.append(f"<li>{int(self.token_ids[node])} <small>{math.exp(self.log_probs[node]):.1%}</small>")
            children = self.children(node)
            waiting += ["</ul></li>", *reversed(children), "<ul>"] if children else ["</li>"]
        return f"<ul>{''.join(parts)}</ul>"

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
        return torch.from_numpy(np.array(self._depth_list, dtype=np.int64))

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return max(self._depth_list)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """`(n, n)` bool; row `i` marks node `i` and its ancestors."""
        # One integer per row, whose bits are the row's entries.
        rows = [1]
        for node, parent in enumerate(self._parent_list[1:], start=1):
            rows.append(rows[parent] | 1 << node)
        num_bytes = (len(rows) + 7) // 8
        packed = np.frombuffer(b"".join(row.to_bytes(num_bytes, "little") for row in rows), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(len(rows), num_bytes), axis=1, count=len(rows), bitorder="little")
        return torch.from_numpy(bits.view(bool))

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
        """The path from the root through the most probable child of each node; the first of equally probable ones."""
        path = [0]
        while children := self.children(path[-1]):
            path.append(max(children, key=lambda child: float(self.log_probs[child])))
        return DraftTree(self.token_ids[path], torch.arange(-1, len(path) - 1, device="cpu"), self.log_probs[path])

    @cached_property
    def _parent_list(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def _depth_list(self) -> list[int]:
        depths = [0]
        for parent in self._parent_list[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def _child_by_edge(self) -> dict[tuple[int, int], int]:
        edges = zip(self._parent_list, self.token_ids.tolist())
        return {edge: node for node, edge in enumerate(edges)}


def _integer_vector(name: str, values: Tensor | list[int]) -> np.ndarray:
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}, but must hold integers.")
    if tensor.ndim != 1:
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, but must be one-dimensional: one entry per node.")
    return tensor.to(torch.int64).numpy()


def _path_log_probs(log_probs: Tensor | list[float], parents: np.ndarray) -> Tensor:
    tensor = torch.as_tensor(log_probs, dtype=torch.float32, device="cpu")
    if tensor.shape != parents.shape:
        raise ValueError(
            f"`log_probs` has shape {tuple(tensor.shape)}, but must have shape {parents.shape}: one entry per node."
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
