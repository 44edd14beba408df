"""What is done with tokens while they are generated: texts side by side in a terminal, and the time of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.generation import BaseStreamer

from ..visualize import encodable

GAP = "  "
# Drawing takes time from who generates.
SECONDS_BETWEEN_DRAWINGS = 0.05


class SideBySide:
    """Columns of text that grow; on a terminal while they do, else drawn once at the end.

    Args:
        console: Where to draw.
        columns: Title and style of each column.
    """

    def __init__(self, console: Console, columns: Sequence[tuple[str, str]]) -> None:
        self._console = console
        self._titles = [Text(title, style=f"bold {style}") for title, style in columns]
        self._texts = [Text(style=style) for _, style in columns]
        self._footers = [Text(style="dim") for _ in columns]
        self._live = Live(self, console=console, auto_refresh=False, vertical_overflow="visible")
        self._is_growing = False
        self._drawn = 0.0

    def __enter__(self) -> SideBySide:
        self._is_growing = True
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_growing = False
        self._live.stop()
        if not self._console.is_terminal:
            self._console.line()

    def add(self, column: int, text: str) -> None:
        """Appends to a column."""
        self._texts[column].append(encodable(text, self._console.encoding))
        if time.perf_counter() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._live.refresh()
            self._drawn = time.perf_counter()

    def end(self, column: int, footer: str) -> None:
        """Puts a line below a column that is complete."""
        self._footers[column].append(footer)
        self._live.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = (options.max_width - len(GAP) * (len(self._texts) - 1)) // len(self._texts)
        columns = [list(text.wrap(console, width)) for text in self._texts]
        height = max(map(len, columns))
        # A terminal cannot redraw what has scrolled out of it.
        first = max(0, height - (console.height - 4)) if self._is_growing else 0
        for parts in (self._titles, *zip_longest(*(lines[first:] for lines in columns)), self._footers):
            line = Text(no_wrap=True, overflow="crop")
            for part in parts:
                line.append(GAP if line else "")
                cell = Text() if part is None else part.copy()
                cell.truncate(width, pad=True)
                line.append_text(cell)
            line.rstrip()
            yield line


class ColumnStreamer(TextStreamer):
    """Streams what `generate()` emits into a column."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, view: SideBySide, column: int) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._view = view
        self._column = column

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._view.add(self._column, text)


class Timekeeper(BaseStreamer):
    """Notes when each new token comes.

    Attributes:
        seconds: One per token, since this object was made.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = time.perf_counter()
        self._is_prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._is_prompt_seen:
            self.seconds += [time.perf_counter() - self._start] * value.numel()
        self._is_prompt_seen = True

    def end(self) -> None:
        pass
