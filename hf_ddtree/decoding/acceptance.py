"""Which path of a tree the target takes.

The target's own choice is made at each visited node, exactly as plain decoding makes it, and the walk goes on to the
child that holds the chosen token. So the emitted tokens are those of plain decoding under greedy search, and have
their distribution under sampling: a deterministic tree needs no rejection sampling, and as the walk goes on with
probability equal to the children's total mass, no lossless scheme accepts more.

Rows that walk together take one step at a time, all of them, as the rows of a batch do in plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ..devices import on_device
from ..tree.draft_tree import DraftTree

# Processors that treat each row of scores by itself and never look at the tokens before it. Exact types, as a
# subclass may do otherwise.
PER_TOKEN_PROCESSORS = frozenset(
    {
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.LogitNormalization,
        logits_process.MinPLogitsWarper,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
    }
)


@dataclass(slots=True)
class Choices:
    """The target's choice after one node of each row that walks along.

    Attributes:
        tokens: The chosen token of each row.
        nodes: The node of each row.
        all_logits: `(rows, n, vocab)`, what the target said after all nodes.
        all_scores: The same in float32 after all processors, None if no processor had to run.
    """

    tokens: list[int]
    nodes: list[int]
    all_logits: Tensor
    all_scores: Tensor | None

    @property
    def logits(self) -> Tensor:
        """`(rows, vocab)`, what the target said."""
        return rows_at(self.all_logits, self.nodes)

    @property
    def scores(self) -> Tensor | None:
        """`(rows, vocab)` float32 after all processors, None if no processor had to run."""
        return None if self.all_scores is None else rows_at(self.all_scores, self.nodes)


class Chooser:
    """Chooses tokens as plain decoding does.

    Processors that look at one row of scores alone run on all nodes at once. If there are others, the whole list runs
    at the visited nodes only, in order, each time on the tokens emitted so far.

    Args:
        logits_processor: The processors that `generate()` prepared.
        do_sample: Whether to sample, from PyTorch's default generator and with the calls that plain decoding makes; so
            a seed gives the tokens that it gives in plain decoding.
        agree: Replaces this process's choices by those of the process that decides for it, if one does.

    Attributes:
        looks_ahead: Whether a choice depends on its node alone, so that all can be made at once.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        agree: Callable[[Tensor], Tensor] = lambda choices: choices,
    ) -> None:
        self._processors = logits_processor
        self.do_sample = do_sample
        self.agree = agree
        self.looks_ahead = all(type(processor) in PER_TOKEN_PROCESSORS for processor in logits_processor)

    def look_at(self, logits: Tensor) -> None:
        """Takes a round's logits `(rows, n, vocab)`, what the target predicts after each node."""
        self._logits = logits
        self._scores = self.scores_at_all_nodes(logits) if self.looks_ahead else None
        self._greedy: list[list[int]] | None = None
        if self.looks_ahead and not self.do_sample:
            self._greedy = self.agree((logits if self._scores is None else self._scores).argmax(dim=-1)).tolist()

    def scores_at_all_nodes(self, logits: Tensor) -> Tensor | None:
        """`(rows, n, vocab)` float32, the logits after processors that look at them alone; None if there are none."""
        if not self._processors:
            return None
        flat = logits.flatten(0, 1).float()
        no_tokens = torch.zeros((len(flat), 1), dtype=torch.int64, device=logits.device)
        return self._processors(no_tokens, flat).view_as(logits)

    def choose(self, nodes: list[int], emitted: Tensor | None) -> Choices:
        """The target's choices after one node a row.

        Args:
            nodes: The node of each row.
            emitted: `(rows, length)`, the tokens emitted so far, the nodes' last; None if the chooser looks ahead.
        """
        if self._greedy is not None:
            tokens = [row[node] for row, node in zip(self._greedy, nodes)]
            return Choices(tokens, nodes, self._logits, self._scores)
        choices = Choices([], nodes, self._logits, self._scores)
        if not self.looks_ahead:
            assert emitted is not None
            logits = choices.logits.to(copy=True, dtype=torch.float32, device=emitted.device)
            scores = self._processors(emitted, logits)
            choices = Choices([], [0] * len(nodes), logits[:, None], scores[:, None])
        values = choices.logits if choices.all_scores is None else choices.scores
        assert values is not None
        if self.do_sample:
            chosen = torch.multinomial(values.float().softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            chosen = values.argmax(dim=-1)
        choices.tokens = self.agree(chosen).tolist()
        return choices


class ChoosesAtNodes(Protocol):
    """What the walk needs of whoever chooses."""

    looks_ahead: bool

    def choose(self, nodes: list[int], emitted: Tensor | None) -> Choices:
        """As `Chooser.choose`."""


class Topology(Protocol):
    """What the walk needs of a tree."""

    def child_with_token(self, node: int, token: int) -> int | None:
        """As `DraftTree.child_with_token`."""


class Sequences(Protocol):
    """What the walk needs of the sequences that it extends."""

    @property
    def token_ids(self) -> Tensor:
        """`(rows, length)`, the tokens emitted so far, the prompt included."""

    @property
    def finished(self) -> bool:
        """Whether decoding must stop."""

    def append(self, choices: Choices) -> list[int]:
        """Emits a token a row; returns those that were emitted, which is another one for a row that has finished."""


def accept(
    trees: Sequence[DraftTree], logits: Tensor, chooser: Chooser, sequences: Sequences, paths: Sequence[list[int]]
) -> None:
    """Walks from the roots for as long as every row's tree holds what is emitted, and emits every choice.

    Args:
        trees: The trees that were verified; their roots are the last emitted tokens.
        logits: `(rows, n, vocab)`, the target's logits after each node.
        chooser: Makes the target's choices.
        sequences: Takes the emitted tokens.
        paths: For each row the root alone; the visited nodes are appended one by one, so that they are right even when
            a processor, a streamer or a stopping criterion raises.
    """
    chooser.look_at(logits)
    follow(trees, chooser, sequences, paths)


def follow(
    trees: Sequence[Topology], chooser: ChoosesAtNodes, sequences: Sequences, paths: Sequence[list[int]]
) -> None:
    """The walk of `accept`, for a chooser that knows the logits."""
    while True:
        emitted = None if chooser.looks_ahead else sequences.token_ids
        choices = chooser.choose([path[-1] for path in paths], emitted)
        tokens = sequences.append(choices)
        if sequences.finished:
            return
        children = [tree.child_with_token(path[-1], token) for tree, path, token in zip(trees, paths, tokens)]
        if None in children:
            return
        for path, child in zip(paths, children):
            assert child is not None
            path.append(child)


def rows_at(values: Tensor, nodes: list[int]) -> Tensor:
    """`(rows, vocab)` of `values (rows, n, vocab)` at one node a row."""
    if len(nodes) == 1:
        return values[0, nodes[0] : nodes[0] + 1]
    return values[torch.arange(len(nodes), device=values.device), on_device(nodes, values.device)]
