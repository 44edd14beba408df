"""The command line: `hf-ddtree`."""

from __future__ import annotations

from typing import Annotated

import typer

import hf_ddtree

from ..environment import versions
from . import bench, check, demo, doctor, replay, report, run, train
from .terminal import AnyEncodingGroup

app = typer.Typer(
    cls=AnyEncodingGroup,
    help="Token-tree speculative decoding for Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-ddtree {hf_ddtree.__version__}")
        for name, version in versions().items():
            if version is not None and name != "hf-ddtree":
                typer.echo(f"{name} {version}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions of what matters, and exit."
        ),
    ] = False,
) -> None:
    """Token-tree speculative decoding for Transformers."""


for command in (demo.demo, replay.replay, check.check, doctor.doctor, bench.bench, train.train, report.report):
    app.command()(command)
app.command(context_settings=run.PASSED_ON)(run.serve)
app.command(context_settings={**run.PASSED_ON, "allow_interspersed_args": False})(run.run)
