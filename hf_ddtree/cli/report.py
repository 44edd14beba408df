"""`hf-ddtree report`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from .options import usage_error
from .terminal import make_console


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `hf-ddtree train` wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write a page that compares training runs: loss, tokens per forward and hit rates, by their logs.

    The page is one file that needs no network. Runs may still go on.
    """
    from ..training.report import read_run, write_report

    names = Counter(run.resolve().name for run in runs)
    try:
        read = [read_run(run, str(run) if names[run.resolve().name] > 1 else None) for run in runs]
        write_report(read, output)
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error
    make_console().print(f"Written to {output}: open it in a browser.", soft_wrap=True, markup=False)
