"""The log of a training run: a line of JSON per entry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """Appends entries to a file, each with the `step` it is of.

    Args:
        path: The file; its folder is made if need be. None keeps nothing.
        step: Where the run goes on. Entries of later steps, which will come again, are removed.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self._path = path
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [json.dumps(entry) + "\n" for entry in read_log(path) if entry["step"] <= step and step > 0]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            os.replace(partial, path)

    def add(self, entry: dict[str, Any]) -> None:
        """Writes an entry at once."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def scalars_of(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of an entry under names such as `held_out/tokens_per_forward/chain`, as trackers take them."""
    scalars: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, list):
            value = {str(place): one for place, one in enumerate(value, start=1)}
        if isinstance(value, dict):
            scalars |= {f"{name}/{inner}": number for inner, number in scalars_of(value).items()}
        elif name != "step":
            scalars[name] = float(value)
    return scalars


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The entries of a log, without a last line that was cut off."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
