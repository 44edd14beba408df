"""What a training run has logged, as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

# Offsets of a block that are shown.
SHOWN = 6


class LiveTable:
    """What a run has logged, as a table."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._progress = 0.0

    def add(self, entry: dict[str, Any], progress: float) -> Table:
        """Takes an entry of the log, and the share of the run that is done."""
        (self._evaluations if "held_out" in entry else self._rows).append(entry)
        self._progress = progress
        return self.render()

    def render(self) -> Table:
        """The last steps, and what was measured on held-out texts: at first, and last."""
        columns = ("step", "done", "loss", *(f"hit {place}" for place in range(1, SHOWN + 1)))
        table = Table(*columns, title="training")
        for entry in self._rows[-5:]:
            hits = [f"{hit:.2f}" for hit in entry["hit_rates"][:SHOWN]]
            done = f"{self._progress:.0%}" if entry is self._rows[-1] else ""
            table.add_row(str(entry["step"]), done, f"{entry['loss']:.3f}", *hits)
        for held_out in [*self._evaluations[:1], *self._evaluations[1:][-1:]]:
            caption = _caption(held_out)
            table.caption = caption if table.caption is None else f"{table.caption}\n{caption}"
        return table


def line_of(entry: dict[str, Any], progress: float) -> str:
    """An entry of the log as a line of plain text, with the share of the run that is done."""
    if "held_out" in entry:
        return _caption(entry)
    return f"step {entry['step']}, {progress:.0%} done, loss {entry['loss']:.3f}"


def _caption(evaluation: dict[str, Any]) -> str:
    figures = evaluation["held_out"]["tokens_per_forward"]
    text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    return f"tokens per forward after step {evaluation['step']}: {text}"
