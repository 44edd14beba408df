"""What the target makes of rows: the features that a drafter reads, and the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..interop.models import takes_logits_to_keep
from ..target.features import FeatureRecorder
from .documents import PADDING, Rows


class TargetFeatures:
    """Runs the target over the documents of rows, each by itself, as layers with a state know no documents.

    Documents that are shorter than others in a forward are padded at the right, where no token sees it. Those whose
    features the rows have already are left out.

    Args:
        target_model: The target.
        layer_ids: The layers whose outputs are the features.
    """

    def __init__(self, target_model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._model = target_model
        self._recorder = FeatureRecorder(target_model, layer_ids)

    @torch.no_grad()
    def __call__(self, rows: Rows, with_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """The target's outputs for the tokens of rows.

        Args:
            rows: The rows, on any device.
            with_logits: Whether the logits are needed as well; then the target runs over all documents.

        Returns:
            `(rows, length, features)`, and `(rows, length, vocab)` or None, on the device of the rows, in the target's
            dtype, or in that of the rows' features if they are all known; zeros where there is no document.
        """
        device = rows.token_ids.device
        features, logits = None if with_logits else rows.features, None
        for pieces in _forwards(rows, leaves_known=features is not None):
            longest = max(end - start for _, start, end in pieces)
            token_ids = rows.token_ids.new_zeros((len(pieces), longest))
            for place, (row, start, end) in enumerate(pieces):
                token_ids[place, : end - start] = rows.token_ids[row, start:end]
            given, predicted = self._run(token_ids.to(self._model.device), with_logits)
            if features is None:
                features = given.new_zeros((*rows.token_ids.shape, given.shape[-1]), device=device)
            features = features.to(given.dtype)
            if predicted is not None and logits is None:
                logits = predicted.new_zeros((*rows.token_ids.shape, predicted.shape[-1]), device=device)
            for place, (row, start, end) in enumerate(pieces):
                features[row, start:end] = given[place, : end - start].to(device)
                if logits is not None and predicted is not None:
                    logits[row, start:end] = predicted[place, : end - start].to(device)
        assert features is not None
        return features, logits

    def close(self) -> None:
        """Takes the hooks off the target."""
        self._recorder.close()

    def _run(self, token_ids: Tensor, with_logits: bool) -> tuple[Tensor, Tensor | None]:
        options = {"logits_to_keep": 1} if not with_logits and takes_logits_to_keep(self._model) else {}
        with self._recorder.recording(), torch.autocast(self._model.device.type, enabled=False):
            outputs = self._model(input_ids=token_ids, use_cache=False, return_dict=True, **options)
        features = self._recorder.take()
        assert features is not None
        return features, outputs.logits if with_logits else None


def _forwards(rows: Rows, leaves_known: bool) -> Iterator[list[tuple[int, int, int]]]:
    """The documents of rows as lists of row, first token and end; those in a list are run together, which with their
    padding are no more tokens than the rows have.

    Args:
        rows: The rows.
        leaves_known: Whether to leave out documents whose features the rows have.
    """
    if leaves_known and rows.is_known is None:
        return
    known = torch.zeros_like(rows.is_counted) if rows.is_known is None or not leaves_known else rows.is_known
    pieces = []
    for row, (documents, is_known) in enumerate(zip(rows.documents.cpu(), known.cpu())):
        numbers, lengths = torch.unique_consecutive(documents, return_counts=True)
        ends = lengths.cumsum(0)
        for number, start, end in zip(numbers.tolist(), (ends - lengths).tolist(), ends.tolist()):
            if number != PADDING and not is_known[start]:
                pieces.append((row, start, end))
    pieces.sort(key=lambda piece: piece[1] - piece[2])
    together: list[tuple[int, int, int]] = []
    longest = 0
    for piece in pieces:
        longest = longest or piece[2] - piece[1]
        if (len(together) + 1) * longest > rows.token_ids.numel():
            yield together
            together, longest = [], piece[2] - piece[1]
        together.append(piece)
    if together:
        yield together
