"""`hf-ddtree bench`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..benchmark.methods import DEFAULTS, DEFAULTS_WITHOUT_DRAFTER, NAMES
from ..benchmark.prompts import DATASETS
from ..validation import install_command
from .options import DeviceMap, Dtype, Target, check_repository, usage_error
from .progress import PlainProgress
from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..benchmark import Report


def bench(
    target: Target = "demo",
    drafter: Annotated[
        list[str] | None, typer.Option(help="A drafter: a repository of the Hub or a folder. May be repeated.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help=f"A JSONL or text file, or one of {', '.join(DATASETS)}.", show_default="the code that ships"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 20,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure besides standard decoding: {NAMES}. May be repeated.",
            show_default=f"{', '.join(DEFAULTS)}; without a drafter {', '.join(DEFAULTS_WITHOUT_DRAFTER)}",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.")] = 1,
    temperature: Annotated[list[float], typer.Option(min=0, help="0 for greedy decoding. May be repeated.")] = [0.0],  # noqa: B006
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="A folder for every run, report.json and report.png. Goes on with what is there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON in place of tables.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing, but show the changes between two folders of `--output` or reports."),
    ] = None,
) -> None:
    """Measure methods of decoding on the same prompts, and compare their tokens with standard decoding's.

    Tokens of several rows that sample are not compared, nor those of assisted
    decoding that samples: they draw in another order. The exit status is 1 if a
    token differs in float32.
    """
    from rich.progress import Progress
    from transformers.utils import logging

    from .. import benchmark as measuring

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = make_console()
    messages = make_console(stderr=True)
    lines = PlainProgress(messages)
    finished_before = False

    def tell(done: int, total: int) -> None:
        nonlocal finished_before
        if not progress.tasks:
            progress.add_task("runs", total=total)
            finished_before = done == total
        progress.update(progress.task_ids[0], completed=done)
        if not finished_before:
            lines.tell(done / total, f"{done} of {total} runs")

    try:
        if compare is not None:
            if as_json:
                raise ValueError("`--json` is for measurements. Leave it out, or `--compare`.")
            console.print(measuring.compare(*map(measuring.Report.load, compare)))
            return
        model, tokenizer, drafters, texts, names = _load(
            target, drafter or [], prompts, limit, method, dtype, device_map
        )
        with Progress(console=messages, disable=not messages.is_terminal) as progress:
            report = measuring.benchmark(
                model,
                tokenizer,
                texts,
                measuring.make_methods(names, drafters),
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                temperatures=temperature,
                output_dir=output,
                on_run=tell,
            )
    except KeyboardInterrupt:
        messages.print(
            f"Stopped. The same command goes on with what is in {output}."
            if output is not None
            else "Stopped. Nothing was kept: with `--output FOLDER` the same command goes on where it was stopped."
        )
        raise typer.Exit(code=130) from None
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error
    if finished_before:
        messages.print(Text(f"All {len(report.runs)} runs are in {output} already."), soft_wrap=True)
    # Of several processes the last one to end reports on all.
    if output is None or (output / "report.json").exists():
        if as_json:
            typer.echo(report.to_json(), nl=False)
        else:
            _show(console, report, output)
        if output is not None:
            _draw(messages, report, output)
    differing = [entry.label for entry in report.summaries() if entry.differs]
    if differing and report.about["settings"]["dtype"] == "torch.float32":
        messages.print(f"[bold red]Not identical[/] to standard decoding: {', '.join(differing)}.")
        raise typer.Exit(code=1)


def _show(console: Console, report: Report, output: Path | None) -> None:
    console.print(Text(f"{report.caption()}\n"))
    if output is not None:
        console.print(Text(f"Results in {output}\n"), soft_wrap=True)
    console.print(report.table())
    console.print()
    console.print(report.rounds_table())


def _draw(messages: Console, report: Report, output: Path) -> None:
    if find_spec("matplotlib"):
        report.plot(output / "report.png")
    else:
        messages.print(Text(f"No report.png is drawn, as matplotlib is not installed: {install_command('plots')}."))


def _load(
    target: str,
    drafters: list[str],
    prompts: str | None,
    limit: int,
    methods: list[str] | None,
    dtype: str,
    device_map: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, PreTrainedModel], list[str], list[str]]:
    """Target, tokenizer, drafters, prompts and names of methods; what is wrong is said before weights are read."""
    from ..benchmark import load_prompts
    from ..benchmark.methods import check_methods
    from ..demo import demo_folders, demo_prompts
    from ..drafter_kinds import load_drafter
    from .loading import load_target

    if target == "demo":
        target, shipped = demo_folders()
        drafters = [shipped, *drafters]
        dtype = "float32" if dtype == "auto" else dtype
    names = list(methods or (DEFAULTS if drafters else DEFAULTS_WITHOUT_DRAFTER))
    check_methods(names, bool(drafters))
    check_repository("target", target, "TARGET")
    for name in drafters:
        check_repository("drafter", name, "--drafter")
    texts = [entry["prompt"] for entry in demo_prompts()[:limit]] if prompts is None else load_prompts(prompts, limit)
    model, tokenizer = load_target(target, dtype, device_map)
    loaded = {label: load_drafter(name, target_model=model) for label, name in _labels(drafters).items()}
    return model, tokenizer, loaded, texts, names


def _labels(names: list[str]) -> dict[str, str]:
    """Drafters by as many last parts of their paths as tell them apart."""
    paths = list({Path(name): name for name in names}.items())
    count = 1
    while len(labels := {"/".join(path.parts[-count:]): name for path, name in paths}) < len(paths):
        count += 1
    return labels
