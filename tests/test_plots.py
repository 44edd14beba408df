"""The figures: what is drawn is what was counted."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from hf_ddtree import DDTreeStats, DraftTree
from hf_ddtree.visualize import plot_stats
from hf_ddtree.visualize.plots import draw_speed_by_nodes, hit_rates, new_figure

pytest.importorskip("matplotlib")


def stats():
    """Two rounds of two rows, of which the second is finished after the first round."""
    counted = DDTreeStats.keeping_trees()
    # Below the root the more probable child comes last.
    wide = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 2], [0.0, -2.0, -0.5, -1.0])
    chain = DraftTree.chain([1, 2, 3])
    counted.count([wide, chain], [[0, 2, 3], [0]])
    counted.count([wide, chain], [[0, 1], []])
    counted.stage_seconds |= {"draft": 0.2, "verify": 0.6}
    return counted


def test_hit_rates_by_hand():
    (first, second), (chosen, not_there) = hit_rates(stats())
    # The first guess below a root was right once in three times, the second once in two.
    assert (first, second, chosen) == (1 / 3, 1 / 2, 1.0)
    assert math.isnan(not_there)
    assert hit_rates(DDTreeStats()) == []


def test_bars_are_the_counts(tmp_path):
    figure = plot_stats(stats())
    lengths, stages, rates = figure.axes
    assert [bar.get_height() for bar in lengths.patches] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert [bar.get_width() for bar in stages.patches] == pytest.approx([100, 0, 300, 0, 0])
    assert [text.get_text() for text in rates.texts] == ["33", "100", "50"]
    figure.savefig(tmp_path / "stats.png")
    assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rounds", [0, 1])
def test_without_trees_or_rounds(rounds, tmp_path):
    counted = DDTreeStats()
    for _ in range(rounds):
        counted.count([DraftTree.root_only(1)], [[0]])
    figure = plot_stats(counted)
    assert len(figure.axes) == 2
    figure.savefig(tmp_path / "stats.png")


def test_an_output_in_place_of_its_statistics():
    with pytest.raises(TypeError, match="`stats` must be the `ddtree_stats` of an output, but is a `dict`"):
        plot_stats({})


def test_speed_stands_at_its_nodes():
    axes = new_figure(4, 3).subplots()
    draw_speed_by_nodes(axes, {"plain": (0.0, 50.0), "tree:8": (7.5, 150.0)})
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [(0, 50), (7.5, 150)]
    assert [text.get_text() for text in axes.texts] == ["plain", "tree:8"]


def test_matplotlib_is_not_needed_to_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\[plots\]', or in a clone pip install '\.\[plots\]'"):
        plot_stats(stats())
    code = "import sys, hf_ddtree.visualize; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
