"""Memory that drafting without a drafter takes from one call to the next."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..validation import require_positive_int
from .match_accuracy import MatchAccuracy
from .ngram_index import NgramIndex, Occurrence
from .successor_tables import BYTES_PER_SLOT, SuccessorTables

FORMAT = "hf_ddtree draft memory 1"
# Past texts are matched by their last tokens from this length on.
TEXT_MATCH_LENGTHS = (4, 16)
# What an indexed token takes: itself, a hash table's entry for each length, and where the n-gram ended before.
BYTES_PER_TOKEN = 700
# Share of the bytes that past texts may take.
TEXT_SHARE = 0.5
LEAST_BYTES = 1 << 20
# Between two texts.
SEPARATOR = -1


class DraftMemory:
    """What targets said and wrote in earlier calls, for `generate(..., tree_lookup=True, draft_memory=memory)`.

    Calls that repeat themselves (retries, agents, rollouts and batch jobs over one template) draft from it: next-token
    distributions after short contexts, and past texts, matched by their last tokens as in SuffixDecoding
    (arXiv:2411.04975). Tokens never depend on it, only the time that they take. That time can tell a caller
    what others have written: hand one memory only to callers that may know each other's texts.

    One instance may serve calls in several threads. It is bounded: beyond `max_bytes` what was used longest ago goes.

    Args:
        max_bytes: Most memory to take, at least 1 MiB.
        tokenizer: The tokenizer of the texts. With it, files are refused that were written for another one.

    Raises:
        ValueError: If `max_bytes` is no integer of at least 1 MiB.
    """

    def __init__(self, max_bytes: int = 1 << 26, tokenizer: Any = None) -> None:
        require_positive_int("max_bytes", max_bytes)
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"`max_bytes` is {max_bytes}, but must be at least {LEAST_BYTES} (1 MiB).")
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.tables = SuccessorTables(int(max_bytes * (1 - TEXT_SHARE)) // BYTES_PER_SLOT)
        self.match_accuracy = MatchAccuracy()  # of matches in past texts
        self._fingerprint = None if tokenizer is None else fingerprint_of(tokenizer)
        self._vocab_size: int | None = None
        self._forget_texts()

    def __repr__(self) -> str:
        with self.lock:
            return f"<DraftMemory of {len(self._texts)} texts and {len(self.tables)} contexts, {self.num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes."""
        return len(self.tables) * BYTES_PER_SLOT + len(self._index.tokens) * BYTES_PER_TOKEN

    def check_vocabulary(self, vocab_size: int) -> None:
        """Binds the memory to a vocabulary.

        Raises:
            ValueError: If it is bound to one of another size, so that its tokens are those of another tokenizer.
        """
        with self.lock:
            if self._vocab_size not in (None, vocab_size):
                raise ValueError(
                    f"`draft_memory` holds tokens of a vocabulary of {self._vocab_size}, but the model has "
                    f"{vocab_size}. Keep one `DraftMemory` for each tokenizer."
                )
            if self._vocab_size is None:
                self._check_tokens(vocab_size)
            self._vocab_size = vocab_size

    def _check_tokens(self, vocab_size: int) -> None:
        largest = max(self.tables.largest_token, max(self._index.tokens, default=-1))
        if largest >= vocab_size:
            raise ValueError(
                f"`draft_memory` holds the token {largest}, but the vocabulary has {vocab_size}. Keep one "
                "`DraftMemory` for each tokenizer."
            )

    def add_text(self, tokens: Sequence[int]) -> None:
        """Keeps a text, in place of those that were used longest ago if there is no room for it."""
        most = int(self.max_bytes * TEXT_SHARE) // BYTES_PER_TOKEN
        tokens = list(tokens)[-most // 4 :]
        if not tokens:
            return
        with self.lock:
            if len(self._index.tokens) + len(tokens) + 1 > most:
                self._drop_texts(most // 2)
            self._append(tokens)

    def matches(self, last_tokens: Sequence[int], most: int) -> tuple[list[int], list[Occurrence]]:
        """Where the last tokens occur in past texts, the longest match first: all texts as a list, and the places."""
        with self.lock:
            texts = self._index.tokens
            found = [
                Occurrence(end, _num_common(texts, end, last_tokens))
                for end, _ in self._index.occurrences_of(last_tokens, most)[:most]
            ]
            found.sort(key=lambda occurrence: -occurrence.length)
            for occurrence in found[:1]:
                self._clock += 1
                self._used_at[int(np.searchsorted(self._starts, occurrence.end, side="right")) - 1] = self._clock
            return texts, found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the memory to a safetensors file.

        Raises:
            OSError: If it cannot be written.
        """
        with self.lock:
            tensors = self.tables.to_arrays()
            tensors["texts"] = np.array(self._index.tokens, dtype=np.int32)
            tensors["match_accuracy"] = self.match_accuracy.to_array()
            about = {"format": FORMAT, "tokenizer": self._fingerprint or "", "vocab_size": str(self._vocab_size or 0)}
        try:
            save_file(tensors, os.fspath(path), metadata=about)
        except SafetensorError as error:
            raise OSError(f"The memory cannot be written to {os.fspath(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = 1 << 26, tokenizer: Any = None) -> DraftMemory:
        """Reads what `save` wrote.

        Args:
            path: The file.
            max_bytes: As for a new memory; what does not fit is left out.
            tokenizer: The tokenizer that the file must have been written for.

        Raises:
            ValueError: If the file holds something else, or was written for another tokenizer.
        """
        memory = cls(max_bytes, tokenizer)
        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            texts = tensors.pop("texts")
            if texts.ndim != 1 or texts.dtype != np.int32 or (texts < SEPARATOR).any():
                raise ValueError("`texts` are no tokens")
            accuracy = tensors.pop("match_accuracy", None)
            if accuracy is not None:
                memory.match_accuracy.set_array(accuracy)
            memory.tables.set_arrays(tensors)
            vocab_size = int(about["vocab_size"])
            if vocab_size < 0 or (vocab_size and texts.max(initial=-1) >= vocab_size):
                raise ValueError("`texts` holds tokens outside of the vocabulary")
            if vocab_size:
                memory.check_vocabulary(vocab_size)
        except (AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"{os.fspath(path)!r} is no file that `DraftMemory.save` wrote: {error}.") from error
        written_for = about.get("tokenizer") or None
        if tokenizer is not None and written_for != memory._fingerprint:
            raise ValueError(
                f"{os.fspath(path)!r} was written for "
                f"{'no tokenizer that it names' if written_for is None else 'another tokenizer'}, so its tokens may "
                "mean other texts. Start with a new `DraftMemory(tokenizer=tokenizer)`."
            )
        memory._fingerprint = written_for
        ends = (texts == SEPARATOR).nonzero()[0]
        for text in np.split(texts, ends):
            memory.add_text(text[text != SEPARATOR].tolist())
        return memory

    def _append(self, tokens: list[int]) -> None:
        self._starts.append(len(self._index.tokens))
        self._clock += 1
        self._used_at.append(self._clock)
        self._texts.append(tokens)
        self._index.extend([*tokens, SEPARATOR])

    def _drop_texts(self, most_tokens: int) -> None:
        """Keeps the texts that were used last, no more tokens than `most_tokens`."""
        kept: list[tuple[int, int]] = []
        for place in sorted(range(len(self._texts)), key=lambda place: -self._used_at[place]):
            most_tokens -= len(self._texts[place]) + 1
            if most_tokens < 0:
                break
            kept.append((place, self._used_at[place]))
        texts = self._texts
        self._forget_texts()
        for place, used_at in sorted(kept):
            self._append(texts[place])
            self._used_at[-1] = used_at

    def _forget_texts(self) -> None:
        self._texts: list[list[int]] = []
        self._starts: list[int] = []
        self._used_at: list[int] = []
        self._clock = getattr(self, "_clock", 0)
        self._index = NgramIndex(TEXT_MATCH_LENGTHS)


def _num_common(text: Sequence[int], end: int, last_tokens: Sequence[int]) -> int:
    """How many of a text's tokens up to a place are the last tokens of another."""
    count = 0
    while count < len(last_tokens) and count <= end and text[end - count] == last_tokens[-1 - count]:
        count += 1
    return count


def fingerprint_of(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary.

    Raises:
        ValueError: If it has none.
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"`tokenizer` must be a tokenizer with a vocabulary, but is a `{type(tokenizer).__name__}`.")
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
