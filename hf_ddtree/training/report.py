"""A page that compares training runs by their logs."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..visualize.plots import new_figure
from .run_log import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ccc; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Run:
    """The log of a run.

    Attributes:
        name: What it is called in the page.
        steps: What was logged of steps.
        evaluations: What was measured on held-out texts.
    """

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_run(folder: str | os.PathLike[str], name: str | None = None) -> Run:
    """Reads the log of a run.

    Args:
        folder: The `output_dir` of the run, which holds `log.jsonl`.
        name: What it is called; by default the folder's name.

    Raises:
        ValueError: If there is no log in it, or nothing in the log.
    """
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} holds no `log.jsonl`. Name the folder that `hf-ddtree train --output` wrote."
        )
    entries = read_log(path)
    if not entries:
        raise ValueError(f"The log {str(path)!r} is empty: nothing was logged yet.")
    evaluations = [entry for entry in entries if "held_out" in entry]
    return Run(name or Path(folder).resolve().name, [entry for entry in entries if "loss" in entry], evaluations)


def write_report(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Writes one HTML file with figures of some runs, which needs no network.

    Args:
        runs: The runs, in order.
        path: The file; it is replaced.

    Raises:
        ImportError: If `matplotlib` is not installed.
        OSError: If the file cannot be written.
    """
    figures = [_svg(title, draw, runs) for title, draw in FIGURES]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Training runs</title>',
        f"<style>{STYLE}</style><h1>Training runs</h1>",
        _table(runs),
        *figures,
        "</html>\n",
    ]
    Path(path).write_text("\n".join(parts), encoding="utf-8")


def _table(runs: Sequence[Run]) -> str:
    methods = list(dict.fromkeys(name for run in runs for name in _tokens_per_forward(run, -1)))
    head = ["run", "steps", "minutes", "loss", *(f"{name}: tokens per forward" for name in methods)]
    rows = []
    for run in runs:
        last = run.steps[-1] if run.steps else {}
        first, final = _tokens_per_forward(run, 0), _tokens_per_forward(run, -1)
        cells = [run.name, str(last.get("step", 0)), f"{last.get('seconds', 0) / 60:.1f}"]
        cells.append(f"{last['loss']:.3f}" if last else "")
        cells += [f"{first[name]:.2f} → {final[name]:.2f}" if name in final else "" for name in methods]
        rows.append(cells)
    html = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table><tr>{html}</tr>{body}</table>"


def _tokens_per_forward(run: Run, at: int) -> dict[str, float]:
    return run.evaluations[at]["held_out"]["tokens_per_forward"] if run.evaluations else {}


def _svg(title: str, draw: Callable[[Axes, Sequence[Run]], None], runs: Sequence[Run]) -> str:
    figure = new_figure(8, 4)
    axes = figure.subplots()
    draw(axes, runs)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    text = buffer.getvalue()
    return f"<h2>{escape(title)}</h2>\n{text[text.index('<svg') :]}"


def _draw_loss(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        axes.plot([entry["step"] for entry in run.steps], [entry["loss"] for entry in run.steps], label=run.name)
    axes.set(xlabel="step", ylabel="loss per slot")


def _draw_tokens_per_forward(axes: Axes, runs: Sequence[Run]) -> None:
    """The chain dashed, the largest tree solid, in the run's colour."""
    for number, run in enumerate(runs):
        steps = [entry["step"] for entry in run.evaluations]
        methods = list(_tokens_per_forward(run, -1))
        for name, style in zip(dict.fromkeys([*methods[:1], *methods[-1:]]), ("--", "-")):
            values = [entry["held_out"]["tokens_per_forward"][name] for entry in run.evaluations]
            axes.plot(steps, values, f"C{number % 10}{style}", marker=".", label=f"{run.name}, {name}")
    axes.set(xlabel="step", ylabel="tokens per forward, held-out texts")


def _draw_hit_rates(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.evaluations:
            rates = run.evaluations[-1]["held_out"]["hit_rates"]
            axes.plot(range(1, len(rates) + 1), rates, marker=".", label=run.name)
    axes.set(xlabel="offset in the block", ylabel="right, if all before it are", ylim=(0, 1))


def _draw_likelihood(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        steps = [entry["step"] for entry in run.evaluations]
        values = [entry["held_out"]["negative_log_likelihood"] for entry in run.evaluations]
        axes.plot(steps, values, marker=".", label=run.name)
    axes.set(xlabel="step", ylabel="nats per slot, held-out texts")


FIGURES: tuple[tuple[str, Callable[[Any, Sequence[Run]], None]], ...] = (
    ("Loss", _draw_loss),
    ("Tokens per forward", _draw_tokens_per_forward),
    ("Hit rates after the last evaluation", _draw_hit_rates),
    ("Negative log-likelihood", _draw_likelihood),
)
