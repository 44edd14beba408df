"""`hf-ddtree doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .terminal import make_console


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Look at the environment: versions, kernels, attention; say what is slow, and how to mend it."""
    from ..environment import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    console = make_console()
    table = Table("", "found", show_lines=True)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice is not None:
            text.append(f"\n{finding.advice}", style="bold yellow")
        table.add_row(finding.subject, text)
    console.print(table)
    if not any(finding.advice for finding in findings):
        console.print("[bold green]Nothing to mend.[/]")
