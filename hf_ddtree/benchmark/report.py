"""What the runs of a benchmark say: medians, spread, and what is more than chance."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
# Rounds that emit more tokens are drawn with those that emit as many as this.
MOST_BARS = 16
# Settings without which speeds cannot be compared.
SETTINGS_OF_WORK = ("batch_size", "max_new_tokens", "prompts", "prompts_digest")
# Settings across which speeds may be compared, if it is said.
SETTINGS_TO_TELL = ("model", "drafters", "dtype", "seed")


@dataclass
class Summary:
    """A method at a temperature.

    Attributes:
        method, temperature: Which.
        runs: Batches of prompts.
        compared: On how many of them the tokens were compared with plain decoding's.
        identical: On how many of these every token is plain decoding's.
        refused: Why the method cannot decode this, or None.
        tokens_per_second: Quartiles over batches, of all rows together, prompt included.
        speedup: Quartiles over batches of plain decoding's time over the method's.
        faster: On how many batches the method is faster than plain decoding.
        p_value: How likely as uneven a count would be if both were as fast (two-sided sign test); None for plain.
        tokens_per_forward: Tokens that a forward of the target emits a row, on average; None where it is not known.
        accepted_lengths: How often a round emitted how many tokens.
        round_ms: Milliseconds of a round's stages, on average.
        peak_memory: Most bytes on the GPU.
    """

    method: str
    temperature: float
    runs: int
    compared: int
    identical: int
    refused: str | None = None
    tokens_per_second: tuple[float, float, float] | None = None
    speedup: tuple[float, float, float] | None = None
    faster: int = 0
    p_value: float | None = None
    tokens_per_forward: float | None = None
    accepted_lengths: dict[int, int] | None = None
    round_ms: dict[str, float] | None = None
    peak_memory: int | None = None

    @property
    def label(self) -> str:
        """Method and, if it samples, temperature."""
        return f"{self.method} @ {self.temperature:g}" if self.temperature else self.method

    @property
    def differs(self) -> bool:
        """Whether a token differs from plain decoding's where it should not."""
        return self.identical < self.compared


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
        return [self._summary(name, temperature) for temperature in temperatures for name in names]

    def _summary(self, method: str, temperature: float) -> Summary:
        first = self.about["settings"]["methods"][0]
        of = {
            name: {
                run["batch"]: run
                for run in self.runs
                if run["method"] == name and run["temperature"] == temperature and "refused" not in run
            }
            for name in (first, method)
        }
        all_runs = [run for run in self.runs if run["method"] == method and run["temperature"] == temperature]
        refused = next((run["refused"] for run in all_runs if "refused" in run), None)
        runs, plain = of[method], of[first]
        compared = [run["identical"] for run in runs.values() if run["identical"] is not None]
        summary = Summary(method, temperature, len(all_runs), len(compared), sum(compared), refused)
        both = sorted(runs.keys() & plain.keys())
        if not both:
            if refused is None:
                summary.refused = "Not shown, as plain decoding, which it is compared with, was refused."
            return summary
        ratios = [plain[batch]["seconds"] / runs[batch]["seconds"] for batch in both]
        summary.tokens_per_second = _quartiles([runs[batch]["tokens"] / runs[batch]["seconds"] for batch in both])
        if method != first:
            summary.speedup = _quartiles(ratios)
            summary.faster = sum(ratio > 1 for ratio in ratios)
            summary.p_value = sign_test(summary.faster, sum(ratio < 1 for ratio in ratios))
        lengths = [length for run in runs.values() for length in run.get("accepted_lengths", ())]
        if lengths:
            rounds = sum(run["target_forwards"] - 1 for run in runs.values())
            stages = next(iter(runs.values()))["stage_seconds"]
            summary.tokens_per_forward = statistics.mean(lengths)
            summary.accepted_lengths = dict(sorted(Counter(lengths).items()))
            summary.round_ms = {
                stage: sum(run["stage_seconds"][stage] for run in runs.values()) / rounds * 1e3 for stage in stages
            }
        summary.peak_memory = max((run["peak_memory"] for run in runs.values() if "peak_memory" in run), default=None)
        return summary

    def caption(self) -> str:
        """In a line, what was measured, in which dtype and on what machine."""
        settings, machine = self.about["settings"], self.about["machine"]
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

    def table(self) -> Table:
        """A table for people, of at most 80 columns unless names are long: medians, and quartiles below them."""
        table = _table(
            "method", "same", "tokens/s", "against\nplain", "faster\non", "p", "tokens/\nforward", "round\nms"
        )
        notes = []
        for entry in self.summaries():
            if entry.refused is not None:
                notes.append(f"{entry.label}: {entry.refused}")
            if entry.tokens_per_second is None:
                table.add_row(entry.label, "", "refused")
                continue
            same = f"{entry.identical}/{entry.compared}" if entry.compared else ""
            cells: list[str | Text] = [entry.label, same, _with_quartiles(entry.tokens_per_second, _speed)]
            if entry.speedup is not None and entry.p_value is not None:
                cells += [_with_quartiles(entry.speedup, _ratio), f"{entry.faster}/{entry.runs}"]
                cells += [f"{entry.p_value:.1g}"]
            else:
                cells += [""] * 3
            if entry.round_ms is not None:
                cells += [f"{entry.tokens_per_forward:.2f}", f"{sum(entry.round_ms.values()):.1f}"]
            table.add_row(*cells)
        not_compared = [
            run["rows"]
            for run in self.runs
            if run["identical"] is None and run["temperature"] and "refused" not in run
        ]
        reasons = ["several rows that sample"] if max(not_compared, default=0) > 1 else []
        reasons += ["assisted decoding"] if min(not_compared, default=2) == 1 else []
        if reasons:
            notes.append(
                f"Where `same` counts fewer runs, tokens were not compared: {' and '.join(reasons)} make a seed's "
                "draws in another order. The distribution is the same."
            )
        return _noted(table, notes)

    def rounds_table(self) -> Table:
        """A table of what a round is made of: milliseconds of its stages, how many tokens rounds emit, and memory."""
        entries = [entry for entry in self.summaries() if entry.round_ms is not None or entry.peak_memory is not None]
        stages = next((list(entry.round_ms) for entry in entries if entry.round_ms is not None), [])
        table = _table("method", *(f"{stage}\nms" for stage in stages))
        table.add_column("rounds that emit\n1, 2, 3... tokens")
        has_memory = any(entry.peak_memory is not None for entry in entries)
        if has_memory:
            table.add_column("peak\nMiB", justify="right")
        for entry in entries:
            cells = [entry.label]
            cells += [f"{entry.round_ms[stage]:.2f}" if entry.round_ms is not None else "" for stage in stages]
            cells += [_bars(entry.accepted_lengths or {})]
            if has_memory:
                cells += ["" if entry.peak_memory is None else f"{entry.peak_memory / 2**20:.0f}"]
            table.add_row(*cells)
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes settings, machine and versions, what `summaries` says, and all runs as JSON."""
        summaries = json.dumps([asdict(entry) for entry in self.summaries()], indent=1)
        text = ",\n".join(json.dumps(run) for run in self.runs)
        about = json.dumps(self.about)
        Path(path).write_text(f'{{"about": {about},\n"summary": {summaries},\n"runs": [\n{text}\n]}}\n')

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
        from matplotlib.figure import Figure

        entries = [entry for entry in self.summaries() if entry.tokens_per_second is not None]
        labels = [f"{entry.method} @ {entry.temperature:g}" for entry in entries]
        figure = Figure(figsize=(11, 0.45 * len(entries) + 2), layout="constrained")
        speed, lengths = figure.subplots(1, 2)
        speeds = [
            [run["tokens"] / run["seconds"] for run in self.runs if _is_of(run, entry) and "seconds" in run]
            for entry in entries
        ]
        speed.boxplot(speeds, orientation="horizontal", tick_labels=labels, showfliers=False)
        speed.set_xlabel("tokens a second")
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


def compare(before: Report, after: Report) -> Table:
    """A table of what became faster or slower between two reports, method by method.

    Changes are of the speeds on the same batch of prompts. Below the table stands what else differs, and which methods
    are in one report alone.

    Raises:
        ValueError: If the reports are of other prompts, batches or lengths, so that speeds cannot be compared.
    """
    settings, new_settings = before.about["settings"], after.about["settings"]
    if different := _differences(settings, new_settings, SETTINGS_OF_WORK):
        raise ValueError(
            f"The reports are not of the same work ({'; '.join(different)}), so their speeds cannot be compared. "
            "Measure both with the same prompts, `--limit`, `--batch-size` and `--max-new-tokens`."
        )
    notes = _differences(settings, new_settings, SETTINGS_TO_TELL)
    notes += _differences(before.about["machine"], after.about["machine"], list(before.about["machine"]))
    columns = (
        "method",
        "tokens/s\nbefore",
        "after",
        "change",
        "faster\non",
        "p",
        "tokens/\nforward\nbefore",
        "after",
        "same\nafter",
    )
    table = _table(*columns)
    old = {(entry.method, entry.temperature): entry for entry in before.summaries()}
    new = {(entry.method, entry.temperature): entry for entry in after.summaries()}
    for key, entry in new.items():
        previous = old.get(key)
        if previous is None:
            notes.append(f"{entry.label} is only in the report after.")
            continue
        ratios = _ratios(before, after, entry)
        if previous.tokens_per_second is None or entry.tokens_per_second is None or not ratios:
            notes.append(f"{entry.label}: {entry.refused or previous.refused}")
            continue
        was, now = previous.tokens_per_second[1], entry.tokens_per_second[1]
        forwards = [
            "" if value is None else f"{value:.2f}"
            for value in (previous.tokens_per_forward, entry.tokens_per_forward)
        ]
        faster, slower = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
        cells: list[str | Text] = [entry.label, _speed(was), _speed(now)]
        cells += [_with_quartiles(_quartiles(ratios), _change, dash=" .. "), f"{faster}/{len(ratios)}"]
        cells += [f"{sign_test(faster, slower):.1g}", *forwards]
        table.add_row(*cells, f"{entry.identical}/{entry.compared}" if entry.compared else "")
    notes += [f"{old[key].label} is only in the report before." for key in old if key not in new]
    return _noted(table, notes)


def _ratios(before: Report, after: Report, entry: Summary) -> list[float]:
    """Speed after over speed before, on each batch that both have."""
    old, new = (
        {
            run["batch"]: run["tokens"] / run["seconds"]
            for run in report.runs
            if _is_of(run, entry) and run.get("tokens")
        }
        for report in (before, after)
    )
    return [new[batch] / old[batch] for batch in sorted(old.keys() & new.keys())]


def _differences(before: dict[str, Any], after: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What two reports say of these; nothing of what one of them does not know."""
    return [
        f"{name} is {before[name]!r} before, {after[name]!r} after"
        for name in names
        if name in before and name in after and before[name] != after[name]
    ]


def _short(name: str) -> str:
    """The last two parts of a folder, or a repository of the Hub."""
    return "/".join(Path(name).parts[-2:])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if table.columns else "left")
    return table


def _noted(table: Table, notes: Sequence[str]) -> Table:
    """The table with lines below it."""
    if notes:
        table.caption, table.caption_justify = Text("\n".join(notes)), "left"
    return table


def _with_quartiles(quartiles: tuple[float, float, float], style: Callable[[float], str], dash: str = "-") -> Text:
    """The median, and below it the first and third quartile if they differ."""
    low, median, high = quartiles
    text = Text(style(median))
    return text if low == high else text.append(f"\n{style(low)}{dash}{style(high)}", style="dim")


def _bars(counts: dict[int, int]) -> str:
    """A histogram in a line, from 1 on."""
    drawn = Counter[int]()
    for length, count in counts.items():
        drawn[min(length, MOST_BARS)] += count
    highest = max(drawn.values(), default=0)
    heights = (drawn[length] / highest for length in range(1, max(drawn, default=0) + 1))
    return "".join(BARS[math.ceil(height * len(BARS)) - 1] if height else " " for height in heights)


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def sign_test(faster: int, slower: int) -> float:
    """Two-sided p-value of a sign test: how likely as uneven a count is if both are equally likely."""
    total = faster + slower
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, count) for count in range(min(faster, slower) + 1)) / 2**total
    return min(1.0, 2 * tail)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _is_of(run: dict[str, Any], entry: Summary) -> bool:
    return run["method"] == entry.method and run["temperature"] == entry.temperature
