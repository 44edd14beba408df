"""The runs of a benchmark as they end, kept in a folder so that a stopped one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunLog:
    """The runs of all processes, kept in a folder if there is one.

    Args:
        folder: Where to keep them; None for memory alone.
        settings: The settings of the benchmark.
        rank: This process's rank.

    Raises:
        ValueError: If the folder holds runs with other settings.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, settings: dict[str, Any], rank: int) -> None:
        self._folder = None if folder is None else Path(folder)
        self._rank = rank
        self._runs: list[dict[str, Any]] = []
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        settings_file = self._folder / "settings.json"
        if settings_file.exists():
            there = json.loads(settings_file.read_text())
            names = [name.removesuffix("_digest") for name in settings if there.get(name) != settings[name]]
            if names:
                different = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
                raise ValueError(
                    f"`output_dir` is {str(folder)!r}, which holds a benchmark with other settings ({different}). "
                    "Choose another folder, or delete it."
                )
        else:
            partial = settings_file.with_suffix(f".{rank}")
            partial.write_text(json.dumps(settings, indent=1) + "\n")
            partial.replace(settings_file)
        self._mend()

    def _own_file(self) -> Path:
        assert self._folder is not None
        return self._folder / f"runs-{self._rank}.jsonl"

    def _mend(self) -> None:
        """Ends this process's file with a whole line, if it was stopped in the middle of one."""
        if not self._own_file().exists():
            return
        *whole, last = self._own_file().read_text(encoding="utf-8").split("\n")
        if last:
            self._own_file().write_text("".join(f"{line}\n" for line in [*whole, last] if _is_json(line)))

    def add(self, run: dict[str, Any]) -> None:
        """Keeps a run."""
        if self._folder is None:
            self._runs.append(run)
            return
        with self._own_file().open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")

    def runs(self, plain: str) -> list[dict[str, Any]]:
        """All runs so far, in the order of temperatures, batches and methods; of repeated runs the last one.

        In place of its tokens each has `identical`: whether they are those of the method `plain`, None if one of the
        two has no tokens to compare.
        """
        found = {(run["temperature"], run["batch"], run["method"]): run for run in self._all()}
        compared = []
        for temperature, batch, method in sorted(found):
            run = dict(found[temperature, batch, method])
            tokens = run.pop("tokens_of_rows")
            expected = found.get((temperature, batch, plain), {}).get("tokens_of_rows")
            compared.append({**run, "identical": None if None in (tokens, expected) else tokens == expected})
        return compared

    def _all(self) -> Iterator[dict[str, Any]]:
        if self._folder is None:
            yield from self._runs
            return
        for path in sorted(self._folder.glob("runs-*.jsonl")):
            for line in filter(None, path.read_text().splitlines()):
                if _is_json(line):  # another process may be writing it
                    yield json.loads(line)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
