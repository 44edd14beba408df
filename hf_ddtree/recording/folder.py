"""A folder of recorded texts that is bounded, whoever writes into it."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers.utils import logging

from ..validation import describe_type, require_positive_int
from .record import SUFFIX, Record

logger = logging.get_logger(__name__)

LEAST_BYTES = 1 << 20
# What a file takes is a multiple of it on most file systems.
BLOCK_BYTES = 4096
# Seconds to wait for other processes that write.
PATIENCE = 10.0
# When the folder is full, this share of it is kept, so that it need not be listed for each new text.
KEPT_SHARE = 7 / 8
LOCK, SIZE, PARTIAL = ".lock", "size.json", ".partial"


class RecordingFolder:
    """Where `generate(..., record_to=RecordingFolder("recorded"))` writes what it decodes, to train a drafter on it.

    Each text becomes a safetensors file with its tokens, prompt included, and if asked for with the features that the
    drafter read: 4 bytes per token, and 2 more per number of the features. Beyond `max_bytes` the oldest go. Threads
    and processes may share a folder. If it cannot be written, that is warned of once and nothing more is recorded; the
    call goes on. The texts are those of whoever made the calls: the folder is made for its owner alone.

    Args:
        path: The folder, which is made when the first text is written.
        max_bytes: Most bytes on disk, at least 1 MiB; files count in blocks of 4 KiB.
        features: Whether to keep the features too, of drafters that read some. Training on them needs no forward of
            the target.

    Raises:
        ValueError: If `path` is empty, `max_bytes` no integer of at least 1 MiB or `features` no boolean.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 1 << 30, features: bool = False) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(f"`record_to` must be a folder or a `RecordingFolder`, but is {path!r}.")
        require_positive_int("max_bytes", max_bytes)
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"`max_bytes` is {max_bytes}, but must be at least {LEAST_BYTES} (1 MiB).")
        if not isinstance(features, bool):
            raise ValueError(f"`features` must be True or False, but is {features!r}.")
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self.features = features
        self._lock = threading.Lock()
        self._is_off = False

    def __repr__(self) -> str:
        return f"RecordingFolder({str(self.path)!r}, max_bytes={self.max_bytes}, features={self.features})"

    @property
    def is_off(self) -> bool:
        """Whether something went wrong, so that nothing more is recorded."""
        return self._is_off

    def add(self, records: Sequence[Record]) -> None:
        """Writes texts, in place of the oldest if there is no room for them. Never raises what a disk may raise."""
        if self._is_off or not records:
            return
        try:
            with self._lock:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                with FileLock(self.path / LOCK, timeout=PATIENCE):
                    for record in records:
                        self._add(record)
        except OSError as error:
            self.switch_off(str(error))

    def switch_off(self, reason: str) -> None:
        """Records nothing more, and says so once."""
        if not self._is_off:
            self._is_off = True
            logger.warning(f"Nothing more is recorded to {str(self.path)!r}: {reason}")

    def _add(self, record: Record) -> None:
        """Writes one text. The lock is held."""
        if _blocks(record.num_bytes) > self.max_bytes - BLOCK_BYTES:
            record = record.without_features()
        needed = _blocks(record.num_bytes)
        if needed > self.max_bytes - BLOCK_BYTES:
            return
        size = self._size()
        if size + needed > self.max_bytes:
            size = self._make_room(needed)
        self._set_size(size + needed)  # before it is true: if this process ends here, too much is counted
        path = self.path / f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}{SUFFIX}"
        partial = path.with_name(path.name + PARTIAL)
        try:
            record.write(partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _size(self) -> int:
        """Bytes of the folder."""
        try:
            return int(json.loads((self.path / SIZE).read_text(encoding="utf-8"))["bytes"])
        except (KeyError, OSError, TypeError, ValueError):
            return self._make_room(0)

    def _set_size(self, size: int) -> None:
        partial = self.path / f"{SIZE}{PARTIAL}"
        partial.write_text(json.dumps({"bytes": size}), encoding="utf-8")
        os.replace(partial, self.path / SIZE)

    def _make_room(self, needed: int) -> int:
        """Removes the oldest texts if there is no room for a new one, and what was left half written.

        Returns:
            The bytes of the folder then.
        """
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(PARTIAL):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name.endswith(SUFFIX):
                    sizes[entry.name] = _blocks(entry.stat().st_size)
        total = BLOCK_BYTES + sum(sizes.values())  # the file with the size
        if total + needed <= self.max_bytes:
            return total
        most = max(int(self.max_bytes * KEPT_SHARE) - needed, 0)
        for name in sorted(sizes):
            if total <= most or total + needed <= BLOCK_BYTES:
                break
            (self.path / name).unlink(missing_ok=True)
            total -= sizes[name]
        return total


_shared: dict[tuple[Any, ...], RecordingFolder] = {}
_shared_lock = threading.Lock()


def recording_folder(given: Any) -> RecordingFolder:
    """The folder that `record_to` names: a `RecordingFolder`, a path, or its arguments by name, as in JSON.

    The same path gives the same object in all calls of a process, so that what goes wrong is said once.

    Raises:
        ValueError: If it is none of these, or an argument has a value that is not allowed.
    """
    if isinstance(given, RecordingFolder):
        return given
    if isinstance(given, Mapping):
        arguments = dict(given)
    elif isinstance(given, str | os.PathLike):
        arguments = {"path": given}
    else:
        raise ValueError(f"`record_to` must be a folder or a `RecordingFolder`, but is {describe_type(given)}.")
    try:
        folder = RecordingFolder(**arguments)
    except TypeError as error:
        raise ValueError(f"`record_to` has arguments that a `RecordingFolder` does not take: {error}.") from error
    with _shared_lock:
        return _shared.setdefault((folder.path, folder.max_bytes, folder.features), folder)


def recorded_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files of recorded texts in a folder, the oldest first."""
    return sorted(path for path in Path(folder).glob(f"*{SUFFIX}") if not path.name.startswith("."))


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
