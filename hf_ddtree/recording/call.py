"""What one `generate()` call leaves in a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..devices import on_device
from .folder import RecordingFolder
from .identity import fingerprint_of
from .record import Record

# Inputs beside the prompt's tokens that change nothing of what they mean.
TOKEN_INPUTS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "logits_to_keep",
        "mm_token_type_ids",
        "position_ids",
        "rope_deltas",
        "token_type_ids",
    }
)
# Tokens of a row whose features stay on the target's device.
TOKENS_ON_DEVICE = 1024


class CallRecording:
    """Collects the features of a call, and writes its texts at the end.

    Args:
        folder: Where to.
        model: The target.
        prompt: `(batch, length)` int64.
        attention_mask: `(batch, length)`, 0 where the prompts hold padding; None if they hold none.
        layer_ids: The layers whose outputs are given to `keeping` and `add`.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        model: PreTrainedModel,
        prompt: Tensor,
        attention_mask: Tensor | None,
        layer_ids: Sequence[int],
    ) -> None:
        self._folder = folder
        self._model = model
        mask = torch.ones_like(prompt) if attention_mask is None else attention_mask
        self._is_token = mask.bool().cpu()
        self._layer_ids = tuple(layer_ids) if folder.features else ()
        self._of_prompt: list[Tensor] = []
        self._of_rounds: list[list[Tensor]] = [[] for _ in prompt]
        self._on_device = 0

    def keeping(self, reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function that does the same as the candidate generator's `reduce_features`, and keeps what it is given."""
        if not self._layer_ids:
            return reduce

        def keep(features: Tensor) -> Tensor:
            self._of_prompt.append(features.to("cpu", torch.bfloat16))
            return reduce(features)

        return keep

    def add(self, features: Tensor | None, paths: Sequence[list[int]], rows: Iterable[int]) -> None:
        """Keeps the features of a round.

        Args:
            features: `(batch, n, features)` of all nodes; None if none are recorded.
            paths: The accepted path of each row.
            rows: Those that were not finished before.
        """
        if features is None or not self._layer_ids:
            return
        for row in rows:
            of_path = features[row].index_select(0, on_device(paths[row], features.device))
            self._of_rounds[row].append(of_path.to(torch.bfloat16))
        self._on_device += max(map(len, paths))
        if self._on_device > TOKENS_ON_DEVICE:
            self._of_rounds = [[torch.cat(parts).cpu()] if parts else [] for parts in self._of_rounds]
            self._on_device = 0

    def write(self, sequences: Tensor, num_new: Sequence[int]) -> None:
        """Writes the texts of all rows.

        Args:
            sequences: `(batch, length)` int64, prompts with their padding and everything after them.
            num_new: Tokens after each prompt that are its row's own.
        """
        target = fingerprint_of(self._model)
        if target is None:
            self._folder.switch_off(
                "some of the target's weights are offloaded, so it cannot be told from another one."
            )
            return
        length = self._is_token.shape[1]
        records = []
        for row, tokens in enumerate(sequences.cpu()):
            prompt = tokens[:length][self._is_token[row]].tolist()
            token_ids = prompt + tokens[length : length + num_new[row]].tolist()
            features = self._features_of(row, len(token_ids) - 1)
            name = self._model.config.name_or_path or type(self._model).__name__
            layer_ids = () if features is None else self._layer_ids
            records.append(Record(token_ids, len(prompt), target, name, layer_ids, features))
        self._folder.add(records)

    def _features_of(self, row: int, count: int) -> Tensor | None:
        """`(count, size)`, of all tokens but the last; None if some are unknown, as those in an earlier cache."""
        parts = [part[row] for part in self._of_prompt]
        if not parts or sum(map(len, parts)) != self._is_token.shape[1]:
            return None
        of_prompt = torch.cat(parts)[self._is_token[row]]
        features = torch.cat([of_prompt, *(part.cpu() for part in self._of_rounds[row])])
        return features[:count] if len(features) >= count else None


def start_recording(
    folder: RecordingFolder,
    model: PreTrainedModel,
    prompt: Tensor,
    is_whole: bool,
    model_kwargs: dict[str, Any],
    layer_ids: Sequence[int],
) -> CallRecording | None:
    """The recording of a call; None if there is none to be, or its texts are more than the tokens of `prompt`.

    That is so after a cache whose tokens the caller did not pass again, and with images, sounds or embeddings.

    Args:
        folder: Where to.
        model: The target.
        prompt: `(batch, length)` int64.
        is_whole: Whether it begins with the tokens of the cache that the call goes on from.
        model_kwargs: As `generate()` prepared them.
        layer_ids: The target's layers that the candidate generator reads.
    """
    if folder.is_off:
        return None
    given = {name for name, value in model_kwargs.items() if isinstance(value, Tensor)}
    mask = model_kwargs.get("attention_mask")
    if not is_whole or given - TOKEN_INPUTS or (mask is not None and mask.shape != prompt.shape):
        return None
    return CallRecording(folder, model, prompt, mask, layer_ids)
