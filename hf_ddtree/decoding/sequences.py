"""The sequences of a group of rows: emitted tokens, their scores, the streamer, and where they must stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput

from ..devices import on_device
from ..interop.generation import padding_token
from .choosing import Choices

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class RowGroup:
    """Rows in lockstep, or a single one: extended by one token each at a time, exactly as standard decoding does it.

    Args:
        indices: Their places in the batch.
        input_ids: `(rows, length)` int64, the prompts.
        stopping_criteria: Asked after every token.
        generation_config: Says whether scores and logits are kept, and what pads a row that has finished.
        streamer: Gets every token as soon as it is emitted.

    Attributes:
        indices: As given.
        steps: For each emitted token of a row the tokens of all rows, as the host knows them.
        unfinished: Which rows are not finished.
        num_emitted: How many tokens each row has emitted before it was finished, padding left out.
        scores, logits: One tensor `(rows, vocab)` per token, None if they are not kept.
        hidden_states, attentions: What the target's outputs of this name would be in standard decoding, one entry per
            token; None if they are not kept.
    """

    def __init__(
        self,
        indices: Sequence[int],
        input_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.indices = list(indices)
        keeps_details = generation_config.return_dict_in_generate
        self._buffer = input_ids
        self._length = input_ids.shape[1]
        self._num_unwritten = 0  # how many of the last tokens the buffer lacks
        self._stopping_criteria = stopping_criteria
        self._max_length = stopping_criteria.max_length
        self._end_tokens = _end_tokens(stopping_criteria)
        self._streamer = streamer
        # As in standard decoding, rows are padded only where an end-of-sequence token can end one before the others.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad_token = padding_token(generation_config)
        self.steps: list[list[int]] = []
        self.unfinished = [True] * len(input_ids)
        self.num_emitted = [0] * len(input_ids)
        self.scores: list[Tensor] | None = [] if keeps_details and generation_config.output_scores else None
        self.logits: list[Tensor] | None = [] if keeps_details and generation_config.output_logits else None
        self.hidden_states: list[Any] | None = [] if keeps_details and generation_config.output_hidden_states else None
        self.attentions: list[Any] | None = [] if keeps_details and generation_config.output_attentions else None

    @property
    def token_ids(self) -> Tensor:
        """`(rows, length)` int64, the prompts and every emitted token. A criterion may write into it."""
        if self._num_unwritten:
            if self._length > self._buffer.shape[1]:
                room = self._length - self._buffer.shape[1] + max(64, self._length // 2)
                self._buffer = torch.nn.functional.pad(self._buffer, (0, room))
            newest = torch.from_numpy(np.array(self.steps[-self._num_unwritten :])).T
            place = self._buffer.narrow(1, self._length - self._num_unwritten, self._num_unwritten)
            place.copy_(on_device(newest, self._buffer.device))
            self._num_unwritten = 0
        return self._buffer[:, : self._length]

    @property
    def finished(self) -> bool:
        """Whether all rows are finished."""
        return not any(self.unfinished)

    @property
    def tokens_left(self) -> int | None:
        """How many tokens may still be emitted; None if no length is set."""
        return None if self._max_length is None else self._max_length - self._length

    @property
    def ends_by_tokens(self) -> frozenset[int] | None:
        """The tokens that end a row, if nothing else but its length does; None if criteria must be asked."""
        return None if self._max_length is None else self._end_tokens

    @property
    def is_padded(self) -> list[bool]:
        """Which rows are finished and get padding from now on."""
        return [self._pads and not unfinished for unfinished in self.unfinished]

    @property
    def pad_token(self) -> int:
        """What pads a row that has finished."""
        return self._pad_token

    def append(self, choices: Choices) -> list[int]:
        """Emits one token per row: scores, tokens, criteria, streamer, in the order of standard decoding.

        Returns:
            The emitted tokens: those of `choices`, and padding for rows that have finished.
        """
        if self.scores is not None:
            scores = choices.scores
            self.scores.append((choices.logits if scores is None else scores).to(torch.float32, copy=True))
        if self.logits is not None:
            self.logits.append(choices.logits.to(torch.float32, copy=True))
        tokens = [self._pad_token if pads else token for token, pads in zip(choices.tokens, self.is_padded)]
        self.steps.append(tokens)
        self._num_unwritten += 1
        self._length += 1
        if (end_tokens := self.ends_by_tokens) is not None:
            at_end = self._max_length is not None and self._length >= self._max_length
            stop = [at_end or token in end_tokens for token in tokens]
        else:
            stop = self._stopping_criteria(
                self.token_ids, None if self.scores is None else tuple(self.scores)
            ).tolist()
            # A criterion may have written into them, which standard decoding continues from.
            tokens = self.steps[-1] = self.token_ids[:, -1].tolist()
        self.num_emitted = [count + unfinished for count, unfinished in zip(self.num_emitted, self.unfinished)]
        self.unfinished = [unfinished and not stops for unfinished, stops in zip(self.unfinished, stop)]
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens, dtype=self._buffer.dtype, device="cpu"))
        return tokens

    def keep_prefill(self, outputs: ModelOutput) -> None:
        """Keeps the hidden states and attentions of the forward that gave the first token."""
        if self.hidden_states is not None:
            self.hidden_states.append(outputs.hidden_states)
        if self.attentions is not None:
            self.attentions.append(outputs.attentions)

    def keep_round(self, outputs: ModelOutput, paths: Sequence[list[int]], windows: Sequence[int | None]) -> None:
        """Keeps the hidden states and attentions of a verification, one entry per node that emitted a token.

        Args:
            outputs: Of a forward over trees, one per row.
            paths: The rows' accepted paths, all of the same length.
            windows: For each entry of the attentions its layer's sliding window, None without one.
        """
        for step in range(len(paths[0])):
            if self.hidden_states is not None:
                self.hidden_states.append(
                    tuple(
                        # Some models have further dimensions in front of the rows.
                        torch.cat(
                            [
                                states[..., row : row + 1, path[step] : path[step] + 1, :]
                                for row, path in enumerate(paths)
                            ],
                            dim=-3,
                        )
                        for states in outputs.hidden_states
                    )
                )
            if self.attentions is not None:
                self.attentions.append(
                    tuple(
                        None if weights is None else _weights_of(weights, [path[: step + 1] for path in paths], window)
                        for weights, window in zip(outputs.attentions, windows, strict=True)
                    )
                )

    def end_stream(self) -> None:
        """Tells the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()


def _end_tokens(stopping_criteria: StoppingCriteriaList) -> frozenset[int] | None:
    """The end-of-sequence tokens if they and one length are all that ends sequences; None if criteria must be asked.

    A length beyond what the model was made for is left to its criterion, which warns once.
    """
    if sum(type(criterion) is MaxLengthCriteria for criterion in stopping_criteria) > 1:
        return None
    end_tokens: set[int] = set()
    for criterion in stopping_criteria:
        if type(criterion) is EosTokenCriteria:
            end_tokens.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is not MaxLengthCriteria or criterion.max_length > (
            criterion.max_position_embeddings or criterion.max_length
        ):
            return None
    return frozenset(end_tokens)


def _weights_of(weights: Tensor, paths: Sequence[list[int]], window: int | None) -> Tensor:
    """Attention weights `(rows, heads, 1, keys)` of each path's last node, over the cached keys and the path's.

    Args:
        weights: `(rows, heads, n, cached + n)`, of all nodes.
        paths: One per row, all of the same length.
        window: The layer's sliding window, None without one.
    """
    num_nodes = weights.shape[2]
    cached = torch.arange(weights.shape[3] - num_nodes, device=weights.device)
    rows = []
    for row, path in enumerate(paths):
        nodes = len(cached) + on_device(path, weights.device)
        keys = torch.cat((cached, nodes))[-window if window is not None else None :]
        rows.append(weights[row, :, path[-1] : path[-1] + 1, keys])
    return torch.stack(rows)
