"""`hf-ddtree check`."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from .options import Target, check_repository, check_tree_budget, usage_error
from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..check_report import CheckReport


def check(
    target: Target,
    drafter: Annotated[str | None, typer.Option(help="A drafter: a repository of the Hub or a folder.")] = None,
    tree_budget: Annotated[
        str, typer.Option(callback=check_tree_budget, help="Most nodes drafted in a round, or `auto`.")
    ] = "auto",
    context_length: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Say whether a model can be decoded with trees, what that needs, and whether a drafter fits. Reads no weights.

    The exit status is 1 if the model is not supported or the drafter does not fit.
    """
    from transformers.utils import logging

    from ..check_report import check as check_pair
    from ..demo import demo_folders

    logging.set_verbosity_error()
    if target == "demo":
        target, shipped = demo_folders()
        drafter = drafter or shipped
    check_repository("target", target, "TARGET")
    if drafter is not None:
        check_repository("drafter", drafter, "--drafter")
    budget: int | Literal["auto"] = "auto" if tree_budget == "auto" else int(tree_budget)
    try:
        report = check_pair(target, drafter, tree_budget=budget, context_length=context_length)
    except (OSError, ValueError) as error:
        raise usage_error(error) from error
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console = make_console()
        console.print(_table(report, tree_budget == "auto"))
        _print_calls(console, report)
    if not report.supported or report.drafter_fits is False:
        raise typer.Exit(code=1)


def _print_calls(console: Console, report: CheckReport) -> None:
    if report.call is None:
        return
    if report.drafter is None:
        console.print("\nWith nothing to load, it drafts from the text itself, which pays where that repeats:")
    console.print(Text(f"\n{report.call}"), soft_wrap=True)
    if report.suggestions:
        console.print("\nA drafter gains more, passed as `assistant_model=drafter` in place of `tree_lookup=True`:\n")
    for suggestion in report.suggestions:
        console.print(Text(textwrap.fill(f"- {suggestion.what}", console.width, subsequent_indent="  ")))
        if suggestion.call is not None:
            console.print(Text(f"  {suggestion.call}"), soft_wrap=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:9.2f} MiB"


def _parts(sizes: dict[str, int]) -> list[str]:
    return [f"{_mib(size)}  {name.replace('_', ' ')}" for name, size in sizes.items() if size]


def _table(report: CheckReport, is_auto: bool) -> Table:
    table = Table("", report.model, show_lines=True)
    verdict = Text("supported", style="bold green") if report.supported else Text("not supported", style="bold red")
    table.add_row("tree decoding", verdict if report.reason is None else verdict + Text(f": {report.reason}"))
    table.add_row("family", report.family + (f", {report.model_class}" if report.model_class else ""))
    layers = [f"{layer.count} {layer.kind or ''} ({', '.join(layer.modules)})" for layer in report.layers]
    table.add_row("layers", Text("\n".join(layers)))
    table.add_row("attn_implementation", report.attn_implementation)
    if report.memory is not None:
        memory = asdict(report.memory)
        most = ", the most of `auto`," if is_auto else ""
        where = f"{memory.pop('nodes') - 1} nodes and the root{most} after {memory.pop('context_length')} tokens:"
        whole = {name: memory.pop(name) for name in ("target", "context", "on_the_way")}
        total = f"{_mib(report.memory.total)}  in all, {report.memory.per_node / 2**10:.1f} KiB per node"
        table.add_row("memory of a tree", "\n".join([where, *_parts(memory), total]))
        if report.memory.peak is not None:
            peak = f"{_mib(report.memory.peak)}  at most, beside the drafter"
            table.add_row("memory of a round", "\n".join([*_parts(whole), peak]))
    if report.drafter is not None:
        fit = {True: "fits", False: "does not fit", None: "not known"}[report.drafter_fits]
        reason = "" if report.drafter_reason is None else f": {report.drafter_reason}"
        table.add_row("drafter", Text(f"{report.drafter} {fit}{reason}"))
        if report.drafter_kind is not None:
            table.add_row("its kind", f"{report.drafter_kind}: {report.drafter_tree}")
    for note in report.notes:
        table.add_row("note", Text(note))
    return table
