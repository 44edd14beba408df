"""`hf-ddtree doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .options import DeviceMap, Dtype, usage_error
from .terminal import make_console


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="A repository of the Hub, a folder, or `demo`.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="DRAFTER", help="A repository of the Hub or a folder; `demo` has its own."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompts as in use: a JSONL or text file, a folder, or a dataset; `demo` has its own."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of the prompts are used.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    template_options: Annotated[
        str, typer.Option(help="Arguments of the chat template as JSON, such as '{\"enable_thinking\": false}'.")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Look at the environment, or at why a drafter is seldom right.

    Without arguments: versions, kernels, attention; what is slow, and how to
    mend it. With TARGET and DRAFTER: what decoding accepts, what the same text
    allows, and which known fault fits; the exit status is 1 if there is one.
    """
    if target is None:
        _environment(as_json)
        return
    from .drafter_doctor import diagnosis_of, table_of

    try:
        found = diagnosis_of(target, drafter, prompts, template_options, count, max_new_tokens, dtype, device_map)
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console = make_console()
        console.print(table_of(found))
        for text in [*found.findings(), *found.notes]:
            console.print(Text(f"\n{text}"))
    if not found.is_well:
        raise typer.Exit(code=1)


def _environment(as_json: bool) -> None:
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
