"""Progress in a log or a pipe: a line now and then, with the time that is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_ddtree.cli import progress
from hf_ddtree.cli.progress import PlainProgress


def told(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, float]], is_terminal: bool = False) -> list[str]:
    """The lines that calls at some seconds, with some share done, print."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    lines = PlainProgress(console)
    for seconds, share in calls:
        monkeypatch.setattr(progress.time, "perf_counter", lambda seconds=seconds: seconds)
        lines.tell(share, f"{share:.0%} done")
    return console.file.getvalue().splitlines()


def test_a_line_now_and_then(monkeypatch):
    calls = [(100.0, 0.2), (110.0, 0.3), (131.0, 0.4), (150.0, 0.5), (162.0, 0.6), (163.0, 1.0)]
    assert told(monkeypatch, calls) == [
        "20% done",
        "40% done, 93 seconds left",  # 31 seconds for 20%, and 60% to go
        "60% done, 62 seconds left",
        "100% done",
    ]


@pytest.mark.parametrize(
    ("seconds", "share", "left"),
    [(40.0, 0.4, "60 seconds left"), (100.0, 0.1, "15.0 minutes left"), (1000.0, 0.1, "2.5 hours left")],
)
def test_the_unit_suits_the_time(monkeypatch, seconds, share, left):
    assert told(monkeypatch, [(0.0, 0.0), (seconds, share)])[-1] == f"{share:.0%} done, {left}"


def test_what_is_rare_is_always_told(monkeypatch):
    console = Console(file=io.StringIO())
    lines = PlainProgress(console)
    for share in (0.0, 0.0, 0.0):
        lines.tell(share, "measured", is_rare=True)
    assert console.file.getvalue().splitlines() == ["measured"] * 3


def test_nothing_on_a_terminal(monkeypatch):
    assert told(monkeypatch, [(0.0, 0.0), (100.0, 0.5), (200.0, 1.0)], is_terminal=True) == []
