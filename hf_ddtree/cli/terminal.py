"""Output that any terminal shows, whatever its encoding."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from typer.core import TyperGroup


class AnyEncodingGroup(TyperGroup):
    """Commands whose output has escapes where the terminal's encoding lacks a character, and never fails."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)


def make_console(stderr: bool = False) -> Console:
    """A console without the colours that Rich gives to numbers and paths."""
    return Console(highlight=False, stderr=stderr)
