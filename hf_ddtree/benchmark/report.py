"""The runs of a benchmark, and what they say."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ..visualize import plots
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
        """Draws the speed of every method, alone and by nodes, the tokens that rounds emit, and where the time goes.

        Raises:
            ImportError: If `matplotlib` is not installed.
        """
        entries = {entry.label: entry for entry in self.summaries() if entry.tokens_per_second is not None}
        figure = plots.new_figure(width=11, height=0.8 * len(entries) + 4)
        (speed, by_nodes), (lengths, stages) = figure.subplots(2, 2)
        speeds = [
            [run["tokens"] / run["seconds"] for run in self.runs if is_of(run, entry) and "seconds" in run]
            for entry in entries.values()
        ]
        speed.boxplot(speeds, orientation="horizontal", tick_labels=list(entries), showfliers=False)
        speed.set_xlabel("tokens per second")
        speed.invert_yaxis()
        plots.draw_speed_by_nodes(by_nodes, self._speed_by_nodes(entries))
        by_length = {label: entry.accepted_lengths for label, entry in entries.items() if entry.accepted_lengths}
        plots.draw_accepted_lengths(lengths, by_length)
        plots.draw_stages(stages, {label: entry.round_ms for label, entry in entries.items() if entry.round_ms})
        figure.savefig(path)

    def _speed_by_nodes(self, entries: Mapping[str, Summary]) -> dict[str, tuple[float, float]]:
        """Mean nodes per tree and median speed of the methods whose trees are known, and of standard decoding."""
        points = {}
        for label, entry in entries.items():
            sizes = [size for run in self.runs if is_of(run, entry) for size in run.get("tree_sizes", ())]
            is_plain = entry.method == self.about["settings"]["methods"][0]
            if entry.tokens_per_second is not None and (sizes or is_plain):
                points[label] = (statistics.mean(sizes or [0]), entry.tokens_per_second[1])
        return points
