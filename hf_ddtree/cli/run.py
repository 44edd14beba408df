"""`hf-ddtree run` and `hf-ddtree serve`: programs that call `generate()`, with drafting switched on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..validation import install_command
from .options import check_repository, check_tree_budget, first_line, usage_error

AT_START = Path(__file__).parent / "at_start"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Drafter = Annotated[
    str | None,
    typer.Option(help="A repository of the Hub, a folder, `mtp` or `lookup`; by default prompt lookup alone."),
]
Budget = Annotated[str, typer.Option(callback=check_tree_budget, help="Most nodes drafted in a round, or `auto`.")]
Lookup = Annotated[
    bool | None, typer.Option("--tree-lookup/--no-tree-lookup", help="Whether to look up beside the drafter as well.")
]
Log = Annotated[bool, typer.Option("--log/--no-log", help="One line per `generate()` call: what it gained.")]


def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A Python file, `-m` and a module, or a command.")],
    drafter: Drafter = None,
    tree_budget: Budget = "auto",
    tree_lookup: Lookup = None,
    log: Log = False,
) -> None:
    """Run any Python program with tree decoding as the default of every `generate()` call; its code stays as it is.

    Everything after PROGRAM is passed on to it. The processes that it starts have the default as well. Models that
    cannot be decoded by tree, and calls that name another way to decode, are decoded by the standard method.
    """
    if drafter not in (None, "lookup", "mtp"):
        check_repository("drafter", drafter, "--drafter")
    command = _command([program, *context.args])
    _replace_process(command, _environment(drafter, tree_budget, tree_lookup, log))


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A repository of the Hub, a folder, or `demo`.")],
    drafter: Drafter = None,
    tree_budget: Budget = "auto",
    tree_lookup: Lookup = None,
    log: Log = True,
    record_to: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A folder to record requests and answers to, for `hf-ddtree train`."),
    ] = None,
    record_gib: Annotated[
        float, typer.Option(min=1 / 1024, help="Most GiB of that folder; beyond, the oldest texts go.")
    ] = 1.0,
    record_features: Annotated[
        bool, typer.Option("--record-features", help="Record what the drafter reads of the model as well.")
    ] = False,
) -> None:
    """Serve a model by Transformers' own server, which speaks OpenAI's interface, with drafting switched on.

    Options of `transformers serve`, such as `--port`, go after MODEL. Requests may switch drafting off, by
    `"generation_strategy": "standard"` in their `generation_config`, but name no other drafter.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise typer.BadParameter(f"The server needs more packages: {install_command('serve')}.")
    if model == "demo":
        from ..demo import demo_folders

        model, demo_drafter = demo_folders()
        drafter = drafter or demo_drafter
    check_repository("target", model, "MODEL")
    reads = None if drafter in (None, "lookup") else _check_pair(model, drafter)
    recording = None
    if record_to is not None:
        size = int(record_gib * 2**30)
        recording = {"path": str(record_to.absolute()), "max_bytes": size, "features": record_features}
        _tell_recording(recording, reads)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, *context.args]
    _replace_process(command, _environment(drafter, tree_budget, tree_lookup, log, recording))


def _tell_recording(recording: Mapping[str, Any], feature_size: int | None) -> None:
    """Says what is recorded, and what that takes, before anything is."""
    from ..recording.record import bytes_per_token

    if recording["features"] and feature_size is None:
        typer.echo("Nothing is known of features that this drafter reads, so tokens alone may be recorded.", err=True)
    per_token = bytes_per_token(feature_size or 0 if recording["features"] else 0)
    most = recording["max_bytes"]
    typer.echo(
        f"What clients send and get is recorded to {recording['path']}: {per_token:,} bytes per token, "
        f"{most / 2**30:.2f} GiB at most, which is up to {most // per_token:,} tokens. Beyond, the oldest texts go.",
        err=True,
    )


def _check_pair(model: str, drafter: str) -> int | None:
    """Refuses a drafter that does not fit before the server loads anything.

    Returns:
        Numbers per token that the drafter reads of the target, if that is known.
    """
    from ..check_report import check

    if drafter != "mtp":
        check_repository("drafter", drafter, "--drafter")
    try:
        report = check(model, drafter)
    except (OSError, ValueError) as error:
        raise usage_error(error) from error
    if not report.supported or report.drafter_fits is False:
        raise typer.BadParameter(str(report.drafter_reason or report.reason), param_hint="--drafter")
    return report.feature_size


def _command(words: Sequence[str]) -> list[str]:
    """The command that runs a program: a Python file, `-m` and a module, or what a shell would run."""
    program, *arguments = words
    if program == "-m" or program.endswith(".py"):
        if program != "-m" and not Path(program).is_file():
            raise typer.BadParameter(f"There is no file {program!r}.", param_hint="PROGRAM")
        return [sys.executable, program, *arguments]
    beside = Path(sys.executable).parent / program
    found = str(beside) if os.access(beside, os.X_OK) and beside.is_file() else shutil.which(program)
    if found is None:
        raise typer.BadParameter(
            f"{program!r} is no Python file, and no command that is installed beside {sys.executable} or on the PATH. "
            "A module runs as `hf-ddtree run -m MODULE`.",
            param_hint="PROGRAM",
        )
    return [found, *arguments]


def _environment(
    drafter: str | None,
    tree_budget: str,
    tree_lookup: bool | None,
    log: bool,
    record_to: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The environment in which every Python process has tree decoding as its default."""
    from ..process_defaults import VARIABLE, to_variable

    budget = tree_budget if tree_budget == "auto" else int(tree_budget)
    if drafter in (None, "lookup") and tree_lookup is False:
        raise typer.BadParameter(
            "Without a drafter there is nothing else to draft with.", param_hint="--no-tree-lookup"
        )
    drafter = drafter or "lookup"
    defaults = to_variable(drafter=drafter, tree_budget=budget, tree_lookup=tree_lookup, record_to=record_to)
    paths = [str(AT_START), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: defaults, "HF_DDTREE_LOG": str(int(log)), "PYTHONPATH": os.pathsep.join(paths)}


def _replace_process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Goes on as another program, which gets the signals that this process would have got."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], list(command), dict(environment))
    except OSError as error:
        raise typer.BadParameter(f"{command[0]!r} cannot be run: {first_line(error)}", param_hint="PROGRAM") from error
