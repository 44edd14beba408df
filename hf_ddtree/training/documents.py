"""Texts as tokens, and rows of one length that are packed with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..validation import require_positive_int

# In `Rows.documents`, where there is none.
PADDING = -1
# Gives the features of the tokens between two places, `(tokens, size)`; None if they are not there any more.
FeatureReader = Callable[[int, int], Tensor | None]


class Document:
    """A text as tokens, and which of them count for the loss.

    Args:
        token_ids: `(length,)` integers.
        is_counted: `(length,)` booleans: the tokens that the drafter learns to predict. None for all.
        features: Reads what the target's layers gave for it, where that is kept. None if the target has to be asked.

    Raises:
        ValueError: If tokens and booleans differ in length.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | np.ndarray,
        is_counted: Sequence[bool] | np.ndarray | None = None,
        features: FeatureReader | None = None,
    ) -> None:
        self.features = features
        self.token_ids = np.asarray(token_ids, dtype=np.int32)
        counted = np.ones(len(self.token_ids), dtype=bool) if is_counted is None else is_counted
        self.is_counted = np.asarray(counted, dtype=bool)
        if self.token_ids.shape != self.is_counted.shape or self.token_ids.ndim != 1:
            raise ValueError(
                f"`is_counted` has the shape {self.is_counted.shape}, but `token_ids` {self.token_ids.shape}. Pass "
                "one boolean per token."
            )

    @classmethod
    def answer(cls, token_ids: Sequence[int] | np.ndarray, prompt_length: int) -> Document:
        """A prompt and what follows it, which alone counts."""
        return cls(token_ids, np.arange(len(token_ids)) >= prompt_length)

    def prompt(self) -> list[int]:
        """The tokens in front of the first that counts."""
        return self.token_ids[: int(self.is_counted.argmax())].tolist()

    def piece(self, start: int, end: int) -> Document:
        """The tokens between two places."""
        of_all = self.features
        features = None if of_all is None else lambda first, last: of_all(start + first, start + last)
        return Document(self.token_ids[start:end], self.is_counted[start:end], features)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Rows:
    """Rows of one length, each with one document or several.

    Attributes:
        token_ids: `(rows, length)` int64; 0 where there is no document.
        documents: `(rows, length)` int64: which of its row's documents a token belongs to, from 0, each document in
            one piece; -1 where there is none, which is after all documents.
        is_counted: `(rows, length)` bool, false where there is no document.
        features: `(rows, length, features)`, the outputs of the target's layers that the drafter reads, one beside
            the other; None if the target has to be asked for them.
        is_known: `(rows, length)` bool, the tokens whose `features` are there; None for all.
    """

    token_ids: Tensor
    documents: Tensor
    is_counted: Tensor
    features: Tensor | None = None
    is_known: Tensor | None = None

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        features, is_known = (one if one is None else one.to(device) for one in (self.features, self.is_known))
        tokens = (self.token_ids.to(device), self.documents.to(device), self.is_counted.to(device))
        return Rows(*tokens, features, is_known)

    def positions(self) -> Tensor:
        """`(rows, length)` int64, each token's position in its document."""
        places = torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)
        is_first = torch.ones_like(self.is_counted)
        is_first[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return places - torch.where(is_first, places, 0).cummax(dim=1).values


class RowSource(Protocol):
    """Where a trainer has its rows from: an endless stream, of which any part can be had again."""

    def rows(self, places: Sequence[int]) -> Rows:
        """The rows at some places of the stream, from 0."""


class PackedDocuments:
    """An endless stream of rows that are packed with documents, in another order in each pass over them.

    Documents longer than a row are cut. The longest pieces are placed first, each where least room is left, so hardly
    any padding is needed. What is left of a text without a token to predict is left out.

    Args:
        documents: The documents.
        length: Tokens of a row.
        seed: Of the orders.

    Raises:
        ValueError: If `length` is no integer of at least 1, or no document has a token to predict.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int = 0) -> None:
        require_positive_int("length", length)
        pieces = [document.piece(at, at + length) for document in documents for at in range(0, len(document), length)]
        # A block's root has a token before it, and the tokens after it are predicted.
        pieces = [piece for piece in pieces if piece.is_counted[2:].any()]
        if not pieces:
            raise ValueError(
                f"None of the {len(documents)} documents has a token to predict: one that counts, with two tokens of "
                f"the same document before it within {length} tokens. Give longer texts or a greater `length`."
            )
        self.length = length
        self._seed = seed
        self._packed = _pack(pieces, length)
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows of a pass over all documents."""
        return len(self._packed)

    def rows(self, places: Sequence[int]) -> Rows:
        """The rows at some places of the stream, from 0."""
        token_ids, documents, is_counted = (
            np.full((len(places), self.length), value, dtype=kind)
            for value, kind in ((0, np.int64), (PADDING, np.int64), (False, bool))
        )
        features: Tensor | None = None
        is_known = torch.zeros((len(places), self.length), dtype=torch.bool)
        for row, place in enumerate(places):
            end = 0
            for number, piece in enumerate(self._packed[self._index(place)]):
                here = slice(end, end + len(piece))
                token_ids[row, here], is_counted[row, here] = piece.token_ids, piece.is_counted
                documents[row, here] = number
                if piece.features is not None and (known := piece.features(0, len(piece))) is not None:
                    features = known.new_zeros((*is_known.shape, known.shape[1])) if features is None else features
                    features[row, here], is_known[row, here] = known, True
                end += len(piece)
        rows = Rows(*map(torch.from_numpy, (token_ids, documents, is_counted)))
        return rows if features is None else replace(rows, features=features, is_known=is_known)

    def _index(self, place: int) -> int:
        number, within = divmod(place, len(self._packed))
        if self._order is None or self._order[0] != number:
            self._order = number, np.random.default_rng([self._seed, number]).permutation(len(self._packed))
        return int(self._order[1][within])


def _pack(pieces: Sequence[Document], length: int) -> list[list[Document]]:
    """Rows of at most `length` tokens, by best fit from the longest piece on."""
    rows: list[list[Document]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    occupied = np.zeros(length + 1, dtype=bool)  # whether there are rows with so much room
    for piece in sorted(pieces, key=len, reverse=True):
        fitting = np.flatnonzero(occupied[len(piece) :])
        if len(fitting):
            room = len(piece) + int(fitting[0])
            row = by_room[room].pop()
            occupied[room] = bool(by_room[room])
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        room -= len(piece)
        by_room[room].append(row)
        occupied[room] = True
    return rows
