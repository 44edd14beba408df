"""The walk on an accelerator: choices at all nodes and the paths they accept, with one transfer to the host.

Following a path node by node, the host would wait for the accelerator at each. So the target's choice is made after
every node, the accepted path is found where the choices are, and both cross at once.

When sampling, the walk draws one token at each depth, whatever the node. `torch.multinomial` draws a token as the one
with the greatest quotient of its probability and a random number with exponential distribution. So all nodes of a
depth share that depth's random numbers: the node that is visited gets the token that drawing there alone would have
given. The numbers of depths that were not reached are given back to the random generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tree.tree_batch import TreeBatch
from .acceptance import Choices, Chooser


class LookAhead:
    """What the target chooses in a round, and how far that follows the trees.

    Args:
        chooser: Chooses after every node at once (`looks_ahead`).
        logits: `(batch, n, vocab)`, what the target predicts after each node.
        trees: The round's trees; None if nothing is drafted, and `n` is 1.
        depth: Depth of the deepest node.
        padding: Rows that have finished, and the token that they go on with.

    Attributes:
        has_nan: Whether some node's logits are NaN.

    Raises:
        RuntimeError: If nothing is drafted and a token cannot be drawn, because logits are NaN.
    """

    def __init__(
        self, chooser: Chooser, logits: Tensor, trees: TreeBatch | None, depth: int, padding: Mapping[int, int]
    ) -> None:
        self._logits = logits
        self._scores = chooser.scores_at_all_nodes(logits)
        self._random_states: list[Tensor] = []
        scores = logits if self._scores is None else self._scores
        if chooser.do_sample:
            depths = None if trees is None else trees.depths.to(logits.device)
            chosen = self._draw(scores.float().softmax(dim=-1), depths, depth)
        else:
            chosen = scores.argmax(dim=-1)
        for row, token in padding.items():
            chosen[row] = token
        chosen = chooser.agree(chosen)
        if trees is not None:
            chosen = torch.where(_accepted(chosen, trees), chosen, -1)
        # One node's logit tells: NaN in a hidden state spreads to all logits.
        has_nan = logits[..., 0].isnan().any()
        *tokens, nan = torch.cat((chosen.flatten(), has_nan[None])).tolist()
        self.has_nan = bool(nan)
        if self.has_nan and trees is None and chooser.do_sample:
            raise RuntimeError(
                "The target's logits are NaN, so no token can be drawn. Look for infinities in its weights or inputs."
            )
        num_nodes = logits.shape[1]
        self._paths = [AcceptedPath(tokens[start : start + num_nodes]) for start in range(0, len(tokens), num_nodes)]

    def of_rows(self, rows: Sequence[int]) -> tuple[list[AcceptedPath], _ChoicesAhead]:
        """What `accept` takes in place of trees and chooser, for rows that walk together."""
        paths = [self._paths[row] for row in rows]
        first, end = rows[0], rows[-1] + 1
        scores = None if self._scores is None else self._scores[first:end]
        return paths, _ChoicesAhead(paths, self._logits[first:end], scores)

    def settle(self, steps: int) -> None:
        """Leaves the random generator as if there had been no draws but those of so many tokens a row."""
        if steps < len(self._random_states):
            _set_random_state(self._logits.device, self._random_states[steps])

    def _draw(self, probabilities: Tensor, depths: Tensor | None, depth: int) -> Tensor:
        """`(batch, n)`, a token after each node, from `(batch, n, vocab)`."""
        batch_size, _, vocab_size = probabilities.shape
        device = probabilities.device
        races = probabilities.new_empty((1 + depth, batch_size, vocab_size))
        for race in races:
            self._random_states.append(_random_state(device))
            race.exponential_()
        if depths is None:
            of_nodes = races.transpose(0, 1)
        else:
            of_nodes = races[depths, torch.arange(batch_size, device=device)[:, None]]
        return (probabilities / of_nodes).argmax(dim=-1)


class AcceptedPath:
    """A tree of which nothing is known but the path that the target takes.

    Args:
        tokens: For each node the token chosen after it, negative if the node is not on the path.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.chosen = {node: token for node, token in enumerate(tokens) if token >= 0}
        # A parent comes before its child.
        nodes = list(self.chosen)
        self._next = dict(zip(nodes, nodes[1:]))

    def child_with_token(self, node: int, token: int) -> int | None:
        """The next node if `token` is what was chosen after this one; else a row has just ended."""
        return self._next.get(node) if self.chosen[node] == token else None


class _ChoicesAhead:
    """Choices that are made already, in the form of a chooser."""

    looks_ahead = True

    def __init__(self, paths: Sequence[AcceptedPath], logits: Tensor, scores: Tensor | None) -> None:
        self._paths = paths
        self._logits = logits
        self._scores = scores

    def choose(self, nodes: list[int], emitted: Tensor | None) -> Choices:
        """The target's choices after one node a row."""
        tokens = [path.chosen[node] for path, node in zip(self._paths, nodes)]
        return Choices(tokens, nodes, self._logits, self._scores)


def _accepted(chosen: Tensor, trees: TreeBatch) -> Tensor:
    """`(batch, n)` bool, which nodes the target's walk visits, if `chosen (batch, n)` is what follows each node."""
    token_ids, depths, parents, ancestor_mask = (
        part.to(chosen.device) for part in (trees.token_ids, trees.depths, trees.parents, trees.ancestor_mask)
    )
    # Only the root and padding have depth 0.
    is_right = (chosen.gather(1, parents.clamp(min=0)) == token_ids) & (depths > 0)
    is_right[:, 0] = True
    return (is_right[:, None] | ~ancestor_mask).all(dim=-1)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
