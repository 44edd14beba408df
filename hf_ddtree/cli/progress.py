"""How far a long command is, in a log or a pipe, where no bar can be redrawn: a plain line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

SECONDS_BETWEEN_LINES = 30.0


class PlainProgress:
    """Prints lines that say what is done and how long the rest will take. On a terminal it prints nothing.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: tuple[float, float] | None = None
        self._printed = -float("inf")

    def tell(self, share: float, done: str, is_rare: bool = False) -> None:
        """Prints a line if the last one is a while ago, or this is the last.

        Args:
            share: Of the work that is done, from 0 to 1.
            done: The same in words.
            is_rare: Whether to print it in any case.
        """
        if self._console.is_terminal:
            return
        now = time.perf_counter()
        self._start = self._start or (now, share)
        if not is_rare and share < 1 and now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        since, before = self._start
        left = (now - since) / (share - before) * (1 - share) if before < share < 1 else None
        self._console.print(Text(done if left is None else f"{done}, {_duration(left)} left"), soft_wrap=True)


def _duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
