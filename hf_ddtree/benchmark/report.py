"""The runs of a benchmark, and what they say."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from . import tables
from .summary import Summary, is_of, summarise


class Report:
    """The runs of a benchmark and where they are from.

    Args:
        about: Settings, machine and versions.
        runs: A dictionary for each run, see `hf_ddtree.benchmark.run`.
    """

    def __init__(self, about: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
        self.about = about
        self.runs = list(runs)

    def summaries(self) -> list[Summary]:
        """One for each temperature and method, in the order of the settings."""
        temperatures = sorted({run["temperature"] for run in self.runs})
        names = [name for name in self.about["settings"]["methods"] if any(run["method"] == name for run in self.runs)]
        plain = self.about["settings"]["methods"][0]
        return [summarise(self.runs, name, temperature, plain) for temperature in temperatures for name in names]

    def caption(self) -> str:
        """In a line, what was measured, in which dtype and on what machine."""
        return tables.caption(self.about)

    def table(self) -> Table:
        """A table for people, of at most 80 columns unless names are long: medians, and quartiles below them."""
        return tables.speed_table(self.summaries(), self.runs)

    def rounds_table(self) -> Table:
        """A table of what a round is made of: milliseconds of its stages, how many tokens rounds emit, and memory."""
        return tables.rounds_table(self.summaries())

    def to_json(self) -> str:
        """Settings, machine and versions, what `summaries` says, and all runs, each on a line."""
        summaries = json.dumps([asdict(entry) for entry in self.summaries()], indent=1)
        text = ",\n".join(json.dumps(run) for run in self.runs)
        about = json.dumps(self.about)
        return f'{{"about": {about},\n"summary": {summaries},\n"runs": [\n{text}\n]}}\n'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads what `save` wrote, from the file or the `report.json` in a folder.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If the file holds something else.
        """
        file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            there = sorted(file.parent.glob("runs-*.jsonl"))
            advice = "The benchmark is not finished: its command goes on with it." if there else "Measure it first."
            raise FileNotFoundError(f"There is no report {str(file)!r}. {advice}")
        try:
            content = json.loads(file.read_text())
            return cls(content["about"], content["runs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(file)!r} is no report of a benchmark: {error!r}.") from error

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the speed of every method, and how many tokens its rounds emitted.

        Raises:
            ImportError: If `matplotlib` is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Drawing a report needs the package `matplotlib`: pip install matplotlib.") from error

        entries = [entry for entry in self.summaries() if entry.tokens_per_second is not None]
        labels = [f"{entry.method} @ {entry.temperature:g}" for entry in entries]
        figure = Figure(figsize=(11, 0.45 * len(entries) + 2), layout="constrained")
        speed, lengths = figure.subplots(1, 2)
        speeds = [
            [run["tokens"] / run["seconds"] for run in self.runs if is_of(run, entry) and "seconds" in run]
            for entry in entries
        ]
        speed.boxplot(speeds, orientation="horizontal", tick_labels=labels, showfliers=False)
        speed.set_xlabel("tokens per second")
        speed.invert_yaxis()
        for entry, label in zip(entries, labels):
            if entry.accepted_lengths:
                total = sum(entry.accepted_lengths.values())
                shares = [count / total for count in entry.accepted_lengths.values()]
                lengths.plot(list(entry.accepted_lengths), shares, marker="o", label=label)
        lengths.set_xlabel("tokens that a round emits")
        lengths.set_ylabel("share of rounds")
        if lengths.lines:
            lengths.legend()
        figure.savefig(path)
