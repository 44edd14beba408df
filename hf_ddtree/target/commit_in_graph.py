"""Greedy choice, acceptance and commit inside the graph of a forward over trees.

They are tensor operations of static shapes. So nothing is launched for them, and nothing is left to do once the host
knows what was accepted. Paths are padded to the number of nodes, as there would be a graph for each other length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from ..attention.tree_pass import TreePass
from ..devices import on_device
from .cache_rows import CommittedRows
from .commit import advance_alike
from .past_recording import stateful_layers


@dataclass(frozen=True)
class GreedyRows:
    """Rows of which greedy search decides by itself what is emitted.

    Attributes:
        goes_on: Which rows are not finished.
        end_tokens: The tokens that end a row.
    """

    goes_on: list[bool]
    end_tokens: frozenset[int]

    def on_device(self, rows: CommittedRows) -> GreedyCommit:
        """The same where the target computes, with the committed tokens of each row."""
        goes_on = on_device(torch.tensor(self.goes_on, device="cpu"), rows.device)
        return GreedyCommit(rows.lengths_on_device()[:, 0], goes_on, on_device(sorted(self.end_tokens), rows.device))


@dataclass(frozen=True)
class GreedyCommit:
    """What a graph must know to commit what greedy search accepts.

    Attributes:
        lengths: `(batch,)` int64, the committed tokens of each row.
        goes_on: `(batch,)` bool, which rows are not finished.
        end_tokens: `(k,)` int64, the tokens that end a row.
    """

    lengths: Tensor
    goes_on: Tensor
    end_tokens: Tensor


def commit_greedy(cache: StaticCache, tree_pass: TreePass, logits: Tensor, rows: GreedyCommit) -> Tensor:
    """Commits for each row the path that greedy search takes, up to a token that ends the row.

    Nothing is committed where a logit is NaN.

    Args:
        cache: What the trees were fed to.
        tree_pass: The forward that fed them.
        logits: `(batch, n, vocab)`, what the target predicts after each node.
        rows: What is known of the rows.

    Returns:
        `(batch, n)` int64, the choice after each accepted node, -1 at all others. A finished row has none.
    """
    chosen = logits.argmax(dim=-1)
    goes_on = rows.goes_on & ~logits[..., 0].isnan().any()
    followed = torch.where(torch.isin(chosen, rows.end_tokens), -1, chosen)
    accepted = tree_pass.tree_batch.accepted(followed) & goes_on[:, None]
    paths = _Paths(accepted, rows.lengths)
    stateful = stateful_layers(cache)
    advance_alike(stateful, tree_pass, paths.on)
    for layer, inputs in zip(stateful, tree_pass.conv_inputs):
        layer.conv_states[0].copy_(paths.last_inputs(inputs, layer.conv_kernel_size[0]))
    for static in cache.layers:
        if isinstance(static, StaticLayer):
            paths.move(static.keys)
            paths.move(static.values)
            static.cumulative_length.copy_((rows.lengths + paths.counts).max())
    return torch.where(accepted, chosen, -1)


class _Paths:
    """The accepted paths as indices.

    Args:
        accepted: `(batch, n)` bool, nodes that each make a path.
        lengths: `(batch,)` int64, the committed tokens of each row.

    Attributes:
        counts: `(batch,)` int64, how many nodes each path has.
        nodes: `(batch, n)` int64, the paths from the root on; each repeats its last node, an empty one the root.
    """

    def __init__(self, accepted: Tensor, lengths: Tensor) -> None:
        self._steps = torch.arange(accepted.shape[1], device=accepted.device)
        self.counts = accepted.sum(dim=1)
        # Parents come before children, so the nodes of a path stand in its order.
        in_order = torch.where(accepted, self._steps, accepted.shape[1]).sort(dim=1).values
        last = (self.counts - 1).clamp(min=0)[:, None]
        nodes = in_order.gather(1, torch.minimum(self._steps, last))
        self.nodes = torch.where(self.counts[:, None] > 0, nodes, 0)
        # What is fed follows the longest row.
        self._source = lengths.max() + self.nodes
        self._target = lengths[:, None] + self._steps

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The paths and how many nodes each has."""
        return self.nodes.to(device), self.counts.to(device)

    def move(self, entries: Tensor) -> None:
        """Moves the paths' entries of a buffer `(batch, heads, length, size)` after each row's committed ones.

        A row that commits nothing gets zeros, as what was fed may be NaN, which no mask hides.
        """
        shape = (*entries.shape[:2], len(self._steps), entries.shape[3])
        source, target = (
            one.to(entries.device)[:, None, :, None].expand(shape) for one in (self._source, self._target)
        )
        is_empty = (self.counts == 0).to(entries.device)[:, None, None, None]
        entries.scatter_(2, target, entries.gather(2, source).masked_fill(is_empty, 0.0))

    def last_inputs(self, inputs: Tensor, count: int) -> Tensor:
        """The last `count` of a convolution's inputs `(batch, channels, cached + n)`, as if the paths had been fed."""
        num_cached = inputs.shape[2] - len(self._steps)
        place = num_cached + self.counts[:, None] - count + torch.arange(count, device=self._steps.device)
        on_path = num_cached + self.nodes.gather(1, (place - num_cached).clamp(min=0))
        index = torch.where(place < num_cached, place.clamp(min=0), on_path).to(inputs.device)
        return inputs.gather(2, index[:, None].expand(-1, inputs.shape[1], -1))
