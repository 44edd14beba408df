"""The command line: `hf-ddtree`."""

from __future__ import annotations

from typing import Annotated

import typer

import hf_ddtree

from . import bench, check, demo, replay, run, train
from .terminal import AnyEncodingGroup

app = typer.Typer(
    cls=AnyEncodingGroup,
    help="Token-tree speculative decoding for Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-ddtree {hf_ddtree.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Token-tree speculative decoding for Transformers."""


for command in (demo.demo, replay.replay, check.check, bench.bench, train.train):
    app.command()(command)
app.command(context_settings=run.PASSED_ON)(run.serve)
app.command(context_settings={**run.PASSED_ON, "allow_interspersed_args": False})(run.run)
