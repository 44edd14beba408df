"""Figures of statistics and of benchmarks, with matplotlib."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..output import STAGES, DDTreeStats
from ..validation import describe_type, install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 8


def plot_stats(stats: DDTreeStats) -> Figure:
    """Draws how many tokens rounds emitted, where their time went, and how often which guess was right.

    The last part needs the trees, which `return_trees=True` keeps; without them it is left out.

    Args:
        stats: The `ddtree_stats` of an output.

    Returns:
        A figure. `savefig` writes it, and notebooks show it after `%matplotlib inline`.

    Raises:
        ImportError: If `matplotlib` is not installed.
        TypeError: If `stats` is something else.
    """
    if not isinstance(stats, DDTreeStats):
        raise TypeError(f"`stats` must be the `ddtree_stats` of an output, but is {describe_type(stats)}.")
    has_trees = bool(stats.trees)
    figure = new_figure(width=4.5 * (2 + has_trees), height=3.5)
    parts = figure.subplots(1, 2 + has_trees)
    draw_accepted_lengths(parts[0], {"": Counter(stats.accepted_lengths)})
    rounds = max(1, stats.rounds)
    draw_stages(parts[1], {"": {name: 1e3 * spent / rounds for name, spent in stats.stage_seconds.items()}})
    if has_trees:
        draw_hit_rates(parts[2], hit_rates(stats))
    return figure


def hit_rates(stats: DDTreeStats) -> list[list[float]]:
    """How often the target chose the child of each rank, at each depth.

    Args:
        stats: With trees.

    Returns:
        For depths 1, 2, and so on, and ranks 1 to 8 by the drafter's probability: the share of those nodes that were
        reached and have a child of that rank at which the target chose it; NaN where there is none.
    """
    reached: Counter[tuple[int, int]] = Counter()
    chosen: Counter[tuple[int, int]] = Counter()
    for trees, paths in zip(stats.trees or (), stats.accepted_paths or ()):
        for tree, path in zip(trees, paths):
            for depth, node in enumerate(path, start=1):
                children = sorted(tree.children(node), key=lambda child: -float(tree.log_probs[child]))
                for rank, child in enumerate(children[:MOST_RANKS], start=1):
                    reached[depth, rank] += 1
                    chosen[depth, rank] += child in path
    depths = max((depth for depth, _ in reached), default=0)
    ranks = max((rank for _, rank in reached), default=0)
    return [
        [
            chosen[depth, rank] / reached[depth, rank] if reached[depth, rank] else math.nan
            for rank in range(1, ranks + 1)
        ]
        for depth in range(1, depths + 1)
    ]


def draw_accepted_lengths(axes: Axes, counts: Mapping[str, Mapping[int, int]]) -> None:
    """Draws the share of rounds that emit 1, 2, 3 and so on tokens, bars for one method, a line per method for more.

    Args:
        axes: Where to draw.
        counts: For each method, how many rounds emitted how many tokens.
    """
    for label, of_method in counts.items():
        total = sum(of_method.values()) or 1
        lengths = range(1, max(of_method, default=0) + 1)
        shares = [of_method.get(length, 0) / total for length in lengths]
        if len(counts) == 1:
            axes.bar(lengths, shares)
        else:
            axes.plot(lengths, shares, marker="o", label=label)
    axes.set(xlabel="tokens that a round emits", ylabel="share of rounds")
    axes.locator_params(axis="x", integer=True)
    if len(counts) > 1:
        axes.legend()


def draw_stages(axes: Axes, milliseconds: Mapping[str, Mapping[str, float]]) -> None:
    """Draws a bar per method: the milliseconds of a round by stage.

    Args:
        axes: Where to draw.
        milliseconds: For each method, those of each stage.
    """
    starts = [0.0] * len(milliseconds)
    for stage in STAGES:
        widths = [of_method.get(stage, 0.0) for of_method in milliseconds.values()]
        axes.barh(list(milliseconds), widths, left=starts, label=stage)
        starts = [start + width for start, width in zip(starts, widths)]
    axes.set(xlabel="milliseconds of a round", title="where the time goes")
    axes.set_ylim(max(1.0, len(milliseconds) - 0.5), min(-0.5, len(milliseconds) - 2.0))
    axes.legend(fontsize="small", ncols=len(STAGES), loc="upper center", bbox_to_anchor=(0.5, -0.15))


def draw_hit_rates(axes: Axes, rates: Sequence[Sequence[float]]) -> None:
    """Draws a table of shares by depth and rank, as `hit_rates` gives them."""
    axes.set(xlabel="depth", ylabel="rank of the guess", title="how often a guess is right, in percent")
    if not rates:
        return
    by_rank = list(zip(*rates))
    axes.imshow(by_rank, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(rates)), [str(depth + 1) for depth in range(len(rates))])
    axes.set_yticks(range(len(by_rank)), [str(rank + 1) for rank in range(len(by_rank))])
    for rank, of_rank in enumerate(by_rank):
        for depth, rate in enumerate(of_rank):
            if not math.isnan(rate):
                color = "white" if rate > 0.5 else "black"
                axes.text(depth, rank, f"{100 * rate:.0f}", ha="center", va="center", color=color, fontsize="small")


def draw_speed_by_nodes(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Draws tokens per second against nodes per tree.

    Args:
        axes: Where to draw.
        points: For each method its mean nodes per tree, 0 for standard decoding, and its tokens per second.
    """
    for label, (nodes, speed) in points.items():
        axes.plot(nodes, speed, "o", color="C0")
        axes.annotate(label, (nodes, speed), xytext=(5, 4), textcoords="offset points", fontsize="small")
    axes.set(xlabel="nodes per tree", ylabel="tokens per second")
    axes.set_ylim(0, 1.15 * max((speed for _, speed in points.values()), default=1.0))
    axes.margins(x=0.15)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, of a size in inches, which no window of pyplot keeps.

    Raises:
        ImportError: If `matplotlib` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Plots need the package `matplotlib`: {install_command('plots')}.") from error
    return Figure(figsize=(width, height), layout="constrained")
