"""Text in a terminal while it is generated."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer


class ConsoleStreamer(TextStreamer):
    """Prints text as it is generated, in one style."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, style: str) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console
        self._style = style

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._console.print(Text(text, style=self._style), end="\n" if stream_end else "", soft_wrap=True)
