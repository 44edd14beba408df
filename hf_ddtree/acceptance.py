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

from .draft_tree import DraftTree
from .transfer import on_device

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
        logits: `(rows, vocab)`, what the target said.
        scores: `(rows, vocab)` float32 after all processors, None if no processor had to run.
    """

    tokens: list[int]
    nodes: list[int]
    logits: Tensor
    scores: Tensor | None


class Chooser:
    """Chooses tokens as plain decoding does.

    Processors that look at one row of scores alone run on all nodes at once. If there are others, the whole list runs
    at the visited nodes only, in order, each time on the tokens emitted so far.

    Args:
        logits_processor: The processors that `generate()` prepared.
        do_sample: Whether to sample, from PyTorch's default generator and with the calls that plain decoding makes; so
            a seed gives the tokens that it gives in plain decoding.
        agree: Replaces this process's choices by those of the process that decides for it, if one does.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        agree: Callable[[Tensor], Tensor] = lambda choices: choices,
    ) -> None:
        self._processors = logits_processor
        self._do_sample = do_sample
        self._agree = agree
        self._at_once = all(type(processor) in PER_TOKEN_PROCESSORS for processor in logits_processor)

    def look_at(self, logits: Tensor, emitted: Tensor) -> None:
        """Takes a round's logits.

        Args:
            logits: `(rows, n, vocab)`, what the target predicts after each node.
            emitted: `(rows, length)`, the tokens emitted so far, the prompt included.
        """
        self._logits = logits
        self._scores = None
        self._greedy: list[list[int]] | None = None
        if self._at_once:
            if self._processors:
                flat = logits.flatten(0, 1).float()
                last_tokens = emitted[:, -1:].repeat_interleave(logits.shape[1], dim=0)
                self._scores = self._processors(last_tokens, flat).view_as(logits)
            if not self._do_sample:
                self._greedy = self._agree((logits if self._scores is None else self._scores).argmax(dim=-1)).tolist()

    def choose(self, nodes: list[int], emitted: Tensor) -> Choices:
        """The target's choices after one node a row, whose tokens are the last ones of `emitted`."""
        logits = _rows_at(self._logits, nodes)
        if self._scores is not None:
            scores = _rows_at(self._scores, nodes)
        elif self._at_once:
            scores = None
        else:
            logits = logits.to(copy=True, dtype=torch.float32, device=emitted.device)
            scores = self._processors(emitted, logits)
        if self._greedy is not None:
            tokens = [row[node] for row, node in zip(self._greedy, nodes)]
        elif self._do_sample:
            probabilities = (logits.float() if scores is None else scores).softmax(dim=-1)
            tokens = self._agree(torch.multinomial(probabilities, num_samples=1).squeeze(1)).tolist()
        else:
            tokens = self._agree((logits if scores is None else scores).argmax(dim=-1)).tolist()
        return Choices(tokens, nodes, logits, scores)


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
    chooser.look_at(logits, sequences.token_ids)
    while True:
        choices = chooser.choose([path[-1] for path in paths], sequences.token_ids)
        tokens = sequences.append(choices)
        if sequences.finished:
            return
        children = [tree.child_with_token(path[-1], token) for tree, path, token in zip(trees, paths, tokens)]
        if None in children:
            return
        for path, child in zip(paths, children):
            assert child is not None
            path.append(child)


def _rows_at(values: Tensor, nodes: list[int]) -> Tensor:
    """`(rows, vocab)` of `values (rows, n, vocab)` at one node a row."""
    if len(nodes) == 1:
        return values[0, nodes[0] : nodes[0] + 1]
    return values[torch.arange(len(nodes), device=values.device), on_device(nodes, values.device)]
