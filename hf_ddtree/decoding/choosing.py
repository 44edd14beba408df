"""The target's own choice of a token, made exactly as standard decoding makes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from ..devices import on_device

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
# Processors that also look at the tokens before, or at how many there are, row by row and by tensor operations alone:
# the host reads no value, and a call leaves nothing that the next one sees. Exact types as well.
PER_PATH_PROCESSORS = frozenset(
    {
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
    }
)


@dataclass(slots=True)
class Choices:
    """The target's choice after one node per row, for rows in lockstep.

    Attributes:
        tokens: The chosen token of each row.
        nodes: The node of each row.
        all_logits: `(rows, n, vocab)`, what the target said after all nodes.
        to_scores: What the processors make of `(rows, vocab)` logits, None if no processor had to run.
    """

    tokens: list[int]
    nodes: list[int]
    all_logits: Tensor
    to_scores: Callable[[Tensor], Tensor] | None

    @property
    def logits(self) -> Tensor:
        """`(rows, vocab)`, what the target said."""
        return rows_at(self.all_logits, self.nodes)

    @property
    def scores(self) -> Tensor | None:
        """`(rows, vocab)` float32 after all processors, None if no processor had to run."""
        return None if self.to_scores is None else self.to_scores(self.logits)


class Chooser:
    """Chooses tokens as standard decoding does.

    On the host one visited node after the other, as all processors then see what was emitted before. On an accelerator
    at all nodes at once where no processor looks at the tokens before, and at all nodes of one depth at once where
    those that do use tensor operations alone.

    Args:
        logits_processor: The processors that `generate()` prepared.
        do_sample: Whether to sample, from PyTorch's default generator and with the calls that standard decoding makes;
            so a seed gives the tokens that it gives there.
        agree: Replaces this process's choices by those of the process that decides for it, if one does.

    Attributes:
        chooses_per_node: Whether a choice depends on its node alone, so that all can be made at once.
        is_argmax: Whether the choice is the most probable token, with no processor to run.
        chooses_ahead: Whether choices can be made before it is known which nodes are visited.
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
        self.is_argmax = not logits_processor and not do_sample
        self.chooses_per_node = all(type(processor) in PER_TOKEN_PROCESSORS for processor in logits_processor)
        self.chooses_ahead = all(
            type(processor) in PER_TOKEN_PROCESSORS | PER_PATH_PROCESSORS for processor in logits_processor
        )

    def set_logits(self, logits: Tensor) -> None:
        """Takes a round's logits `(rows, n, vocab)`, what the target predicts after each node."""
        self._logits = logits
        self._greedy: list[list[int]] | None = None
        if self.is_argmax:
            self._greedy = self.agree(argmax(logits)).tolist()

    @property
    def to_scores(self) -> Callable[[Tensor], Tensor] | None:
        """What processors that look at nothing else make of `(..., vocab)` logits, in float32; None without any."""
        return self._scores_of if self._processors else None

    def _scores_of(self, logits: Tensor) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        no_tokens = torch.zeros((len(flat), 1), dtype=torch.int64, device=logits.device)
        return self._processors(no_tokens, flat).view_as(logits)

    def scores_after(self, token_ids: Tensor, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """What the processors make of logits after some tokens.

        Args:
            token_ids: `(n, length)` int64.
            logits: `(n, vocab)`.
            rows: `(n,)` int64, the row of the batch that each belongs to. All rows in their order by default.

        Returns:
            `(n, vocab)` float32.
        """
        processors = self._processors
        if rows is not None:
            processors = LogitsProcessorList([_of_rows(processor, rows) for processor in processors])
        return processors(token_ids, logits.to(copy=True, dtype=torch.float32, device=token_ids.device))

    def choose(self, nodes: list[int], emitted: Tensor | None) -> Choices:
        """The target's choices after one node per row.

        Args:
            nodes: The node of each row.
            emitted: `(rows, length)`, the tokens emitted so far, the nodes' last; None if choices are made per node.
        """
        if self._greedy is not None:
            tokens = [row[node] for row, node in zip(self._greedy, nodes)]
            return Choices(tokens, nodes, self._logits, None)
        logits = rows_at(self._logits, nodes)
        if not self._processors:
            return Choices(self._choose(logits), nodes, self._logits, None)
        if emitted is None:
            scores = self._scores_of(logits)
        else:
            logits = logits.to(copy=True, dtype=torch.float32, device=emitted.device)
            scores = self._processors(emitted, logits)
        return Choices(self._choose(scores), [0] * len(nodes), logits[:, None], lambda _: scores)

    def _choose(self, scores: Tensor) -> list[int]:
        """A token for each row of `(rows, vocab)`."""
        if self.do_sample:
            return self.agree(torch.multinomial(scores.float().softmax(dim=-1), num_samples=1).squeeze(1)).tolist()
        return self.agree(argmax(scores)).tolist()


def _of_rows(processor: LogitsProcessor, rows: Tensor) -> LogitsProcessor:
    """A processor of `PER_PATH_PROCESSORS` for these rows of the batch."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(lengths, Tensor):
        return processor
    of_rows: Any = copy.copy(processor)
    of_rows.prompt_ignore_length = lengths[rows.to(lengths.device)]
    return of_rows


def argmax(values: Tensor) -> Tensor:
    """`values.argmax(dim=-1)`, on a CPU by NumPy's vectorised search, which takes a tenth of the time per core.

    Both give the first of equal values, and the first NaN if there is one.
    """
    if values.device.type != "cpu":
        return values.argmax(dim=-1)
    exact = values.detach() if values.dtype == torch.float64 else values.detach().float()
    return torch.from_numpy(np.asarray(exact.numpy().argmax(axis=-1)))


def rows_at(values: Tensor, nodes: list[int]) -> Tensor:
    """`(rows, vocab)` of `values (rows, n, vocab)` at one node per row."""
    if len(nodes) == 1:
        return values[0, nodes[0] : nodes[0] + 1]
    return values[torch.arange(len(nodes), device=values.device), on_device(nodes, values.device)]
