"""Tables of a benchmark for people, at most 80 columns wide unless names are long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..visualize import BARS, EncodableText
from .summary import Summary

# Rounds that emit more tokens are drawn with those that emit as many as this.
MOST_BARS = 16


def caption(about: dict[str, Any]) -> str:
    """In a line, what was measured, in which dtype and on what machine."""
    settings, machine = about["settings"], about["machine"]
    drafters = ", ".join(map(_short, settings["drafters"]))
    return "; ".join(
        [
            f"{_short(settings['model'])} in {settings['dtype'].removeprefix('torch.')}",
            f"drafter {drafters}" if drafters else "no drafter",
            f"{machine['device']}, {_counted(machine['threads'], 'thread')}",
            f"{_counted(settings['prompts'], 'prompt')}, {settings['batch_size']} at a time",
            _counted(settings["max_new_tokens"], "new token"),
        ]
    )


def speed_table(summaries: Sequence[Summary], runs: Sequence[dict[str, Any]]) -> Table:
    """Medians with quartiles below them. Refusals, and why tokens were not compared, stand below the table."""
    table = make_table(
        "method", "same", "tokens/s", "against\nplain", "faster\non", "p", "tokens/\nforward", "round\nms"
    )
    notes = []
    for entry in summaries:
        if entry.refused is not None:
            notes.append(f"{entry.label}: {entry.refused}")
        table.add_row(*_speed_cells(entry))
    return with_notes(table, [*notes, *_not_compared(runs)])


def _speed_cells(entry: Summary) -> list[str | Text]:
    if entry.tokens_per_second is None:
        return [entry.label, "", "refused"]
    same = f"{entry.identical}/{entry.compared}" if entry.compared else ""
    cells: list[str | Text] = [entry.label, same, with_quartiles(entry.tokens_per_second, speed_text)]
    if entry.speedup is not None and entry.p_value is not None:
        cells += [with_quartiles(entry.speedup, _ratio_text), f"{entry.faster}/{entry.runs}", f"{entry.p_value:.1g}"]
    else:
        cells += [""] * 3
    if entry.round_ms is not None:
        cells += [f"{entry.tokens_per_forward:.2f}", f"{sum(entry.round_ms.values()):.1f}"]
    return cells


def _not_compared(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Why the tokens of some runs were not compared."""
    rows = [run["rows"] for run in runs if run["identical"] is None and run["temperature"] and "refused" not in run]
    reasons = ["several rows that sample"] if max(rows, default=0) > 1 else []
    reasons += ["assisted decoding"] if min(rows, default=2) == 1 else []
    if not reasons:
        return []
    return [
        f"Where `same` counts fewer runs, tokens were not compared: {' and '.join(reasons)} make a seed's "
        "draws in another order. The distribution is the same."
    ]


def rounds_table(summaries: Sequence[Summary]) -> Table:
    """What a round is made of: milliseconds of its stages, how many tokens rounds emit, and memory."""
    entries = [entry for entry in summaries if entry.round_ms is not None or entry.peak_memory is not None]
    stages = next((list(entry.round_ms) for entry in entries if entry.round_ms is not None), [])
    table = make_table("method", *(f"{stage}\nms" for stage in stages))
    table.add_column("rounds that emit\n1, 2, 3... tokens")
    has_memory = any(entry.peak_memory is not None for entry in entries)
    if has_memory:
        table.add_column("peak\nMiB", justify="right")
    for entry in entries:
        cells: list[str | EncodableText] = [entry.label]
        cells += [f"{entry.round_ms[stage]:.2f}" if entry.round_ms is not None else "" for stage in stages]
        cells += [EncodableText((_bars(entry.accepted_lengths or {}), ""))]
        if has_memory:
            cells += ["" if entry.peak_memory is None else f"{entry.peak_memory / 2**20:.0f}"]
        table.add_row(*cells)
    return table


def _short(name: str) -> str:
    """The last two parts of a folder, or a repository of the Hub."""
    return "/".join(Path(name).parts[-2:])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if table.columns else "left")
    return table


def with_notes(table: Table, notes: Sequence[str]) -> Table:
    """The table with lines below it."""
    if notes:
        table.caption, table.caption_justify = Text("\n".join(notes)), "left"
    return table


def with_quartiles(quartiles: tuple[float, float, float], style: Callable[[float], str], dash: str = "-") -> Text:
    """The median, and below it the first and third quartile if they differ."""
    low, median, high = quartiles
    text = Text(style(median))
    return text if low == high else text.append(f"\n{style(low)}{dash}{style(high)}", style="dim")


def _bars(counts: dict[int, int]) -> str:
    """A histogram in a line, from 1 on; its highest bar is full."""
    drawn = Counter[int]()
    for length, count in counts.items():
        drawn[min(length, MOST_BARS)] += count
    highest = max(drawn.values(), default=0)
    heights = (drawn[length] / highest for length in range(1, max(drawn, default=0) + 1))
    return "".join(BARS[math.ceil(height * len(BARS)) - 1] if height else " " for height in heights)


def speed_text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def change_text(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _ratio_text(value: float) -> str:
    return f"{value:.2f}"
