"""Acceptance on an accelerator: choices at all nodes and the paths they accept, with one transfer to the host.

Following a path node by node, the host would wait for the accelerator at each. So the target's choice is made after
every node, the accepted path is found on the device, and both are transferred at once.

When sampling, one token is drawn per depth, whatever the node. `torch.multinomial` draws a token as the one
with the greatest quotient of its probability and a random number with exponential distribution. So all nodes of a
depth share that depth's random numbers: the node that is visited gets the token that drawing there alone would have
given. The numbers of depths that were not reached are given back to the random generator.

Processors that look at the tokens before a node get those of its path, as if it had been accepted. The nodes of a
depth have equally many tokens before them, so they are processed together, as the rows of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..devices import on_device
from ..tree.draft_tree import DraftTree
from ..tree.tree_batch import TreeBatch
from .choosing import Choices, Chooser
from .sequences import RowGroup

# Logits whose choices are made together: what is made of them in float32 takes a few times 64 MiB.
SLICE = 2**24


class ChoicesOnDevice:
    """The target's choices at all nodes of a round, and the paths that they accept.

    Args:
        chooser: Chooses ahead (`chooses_ahead`).
        logits: `(batch, n, vocab)`, what the target predicts after each node.
        trees: One per row.
        tree_batch: The same as tensors; None if nothing is drafted, and `n` is 1.
        groups: All rows of the batch.
        pad_tokens: Finished rows, and the token that pads them.
        accepted: `(batch, n)` int64, the choice after each accepted node and -1 at all others, if they are known.

    Attributes:
        has_nan: Whether some node's logits are NaN.

    Raises:
        RuntimeError: If nothing is drafted and a token cannot be drawn, because logits are NaN.
    """

    def __init__(
        self,
        chooser: Chooser,
        logits: Tensor,
        trees: Sequence[DraftTree],
        tree_batch: TreeBatch | None,
        groups: Sequence[RowGroup],
        pad_tokens: Mapping[int, int],
        accepted: Tensor | None = None,
    ) -> None:
        self._logits = logits
        self._chooser = chooser
        self._random_states: list[Tensor] = []
        if accepted is None:
            accepted = self._accept(trees, tree_batch, groups, pad_tokens)
        # One node's logit tells: NaN in a hidden state spreads to all logits.
        has_nan = logits[..., 0].isnan().any()
        *tokens, nan = torch.cat((accepted.flatten(), has_nan[None])).tolist()
        self.has_nan = bool(nan)
        if self.has_nan and tree_batch is None and chooser.do_sample:
            raise RuntimeError(
                "The target's logits are NaN, so no token can be drawn. Look for infinities in its weights or inputs."
            )
        num_nodes = logits.shape[1]
        rows = (tokens[start : start + num_nodes] for start in range(0, len(tokens), num_nodes))
        # For each row the nodes of its accepted path, parents first, and the token that follows each.
        self._paths = [[(node, token) for node, token in enumerate(row) if token >= 0] for row in rows]

    def emit(self, group: RowGroup, paths: Sequence[list[int]]) -> None:
        """Emits the choices along the accepted paths up to the end of the shortest, as `accept_in_lockstep` does.

        Args:
            group: Takes the emitted tokens.
            paths: For each of its rows the root alone; the visited nodes are appended one by one.
        """
        accepted = [self._paths[row] for row in group.indices]
        first, end = group.indices[0], group.indices[-1] + 1
        logits, to_scores = self._logits[first:end], self._chooser.to_scores
        if not self._chooser.chooses_per_node:
            to_scores = partial(_scores_now, self._chooser, group)
        for steps in zip(*accepted):
            nodes, chosen = [node for node, _ in steps], [token for _, token in steps]
            for path, node in zip(paths, nodes):
                if node:
                    path.append(node)
            emitted = group.append(Choices(chosen, nodes, logits, to_scores))
            if group.finished or emitted != chosen:  # which differ where a finished row got padding
                return

    def _accept(
        self,
        trees: Sequence[DraftTree],
        tree_batch: TreeBatch | None,
        groups: Sequence[RowGroup],
        pad_tokens: Mapping[int, int],
    ) -> Tensor:
        """`(batch, n)` int64, the choice after each accepted node and -1 at all others."""
        races = self._races(1 + max(tree.depth for tree in trees)) if self._chooser.do_sample else None
        if self._chooser.chooses_per_node:
            chosen = self._choose_per_node(tree_batch, races)
        else:
            chosen = self._choose_per_path(trees, groups, races)
        for row, token in pad_tokens.items():
            chosen[row] = token
        chosen = self._chooser.agree(chosen)
        return chosen if tree_batch is None else torch.where(tree_batch.accepted(chosen), chosen, -1)

    def rewind_rng(self, steps: int) -> None:
        """Leaves the random generator as if that many tokens per row had been drawn and no more."""
        if steps < len(self._random_states):
            _set_random_state(self._logits.device, self._random_states[steps])

    def _races(self, num_depths: int) -> Tensor:
        """`(depths, batch, vocab)` float32, the random numbers of each depth's draw."""
        batch_size, _, vocab_size = self._logits.shape
        device = self._logits.device
        races = self._logits.new_empty((num_depths, batch_size, vocab_size), dtype=torch.float32)
        for race in races:
            self._random_states.append(_random_state(device))
            race.exponential_()
        return races

    def _choose_per_node(self, tree_batch: TreeBatch | None, races: Tensor | None) -> Tensor:
        """`(batch, n)`, the token that is chosen after each node, where it depends on its node alone."""
        logits, to_scores = self._logits, self._chooser.to_scores
        depths = logits.new_zeros(logits.shape[:2], dtype=torch.int64)
        if tree_batch is not None:
            depths = tree_batch.depths.to(logits.device)
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        step = max(1, SLICE // (len(logits) * logits.shape[2]))
        chosen = []
        for part, depths_of_part in zip(logits.split(step, dim=1), depths.split(step, dim=1)):
            scores = part if to_scores is None else to_scores(part)
            chosen.append(_choose(scores, None if races is None else races[depths_of_part, rows]))
        return torch.cat(chosen, dim=1)

    def _choose_per_path(self, trees: Sequence[DraftTree], groups: Sequence[RowGroup], races: Tensor | None) -> Tensor:
        """`(batch, n)`, the token that is chosen after each node of unfinished groups, if its path is accepted."""
        logits, step = self._logits, max(1, SLICE // self._logits.shape[2])
        chosen = logits.new_zeros(logits.shape[:2], dtype=torch.int64)
        for group in groups:
            first, emitted = group.indices[0], group.token_ids
            of_group = [] if group.finished else trees[first : group.indices[-1] + 1]
            for depth, level in _levels(of_group).items():
                for start in range(0, len(level), step):
                    entries = on_device(torch.tensor(level[start : start + step], device="cpu"), emitted.device)
                    before = torch.cat((emitted[entries[:, 0]], entries[:, 2:]), dim=1)
                    rows, nodes = (first + entries[:, 0]).to(logits.device), entries[:, 1].to(logits.device)
                    scores = self._chooser.scores_after(before, logits[rows, nodes], rows).to(logits.device)
                    chosen[rows, nodes] = _choose(scores, None if races is None else races[depth, rows])
        return chosen


def _scores_now(chooser: Chooser, group: RowGroup, logits: Tensor) -> Tensor:
    """What the processors make of `(rows, vocab)` logits after what the group has emitted so far."""
    return chooser.scores_after(group.token_ids, logits)


def _levels(trees: Sequence[DraftTree]) -> dict[int, list[list[int]]]:
    """The nodes of each depth: for each node its tree, itself, and the tokens of its path after the root."""
    levels: dict[int, list[list[int]]] = defaultdict(list)
    for place, tree in enumerate(trees):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.token_ids[1:].tolist(), tree.parents[1:].tolist()):
            paths.append([*paths[parent], token])
        for node, path in enumerate(paths):
            levels[len(path)].append([place, node, *path])
    return levels


def _choose(scores: Tensor, races: Tensor | None) -> Tensor:
    """`(...)`, a token for each of `scores (..., vocab)`; drawn if there are random numbers, `races (..., vocab)`."""
    if races is None:
        return scores.argmax(dim=-1)
    return (scores.float().softmax(dim=-1) / races).argmax(dim=-1)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
