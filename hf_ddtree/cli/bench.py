"""`hf-ddtree bench`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.text import Text

from ..benchmark.methods import NAMES
from ..benchmark.prompts import DATASETS
from .options import DTYPES, check_device_map, check_dtype, check_repository, usage_error
from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..benchmark import Report


def bench(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A repository of the Hub, a folder, or `demo`.")
    ] = "demo",
    drafter: Annotated[
        list[str] | None, typer.Option(help="A drafter: a repository of the Hub or a folder. May be repeated.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help=f"A JSONL or text file, or one of {', '.join(DATASETS)}.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 20,
    method: Annotated[
        list[str], typer.Option(help=f"What to measure besides standard decoding: {NAMES}. May be repeated.")
    ] = ["chain", "tree:16", "auto"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.")] = 1,
    temperature: Annotated[list[float], typer.Option(min=0, help="0 for greedy decoding. May be repeated.")] = [0.0],  # noqa: B006
    dtype: Annotated[str, typer.Option(callback=check_dtype, help=f"Of the target: {', '.join(DTYPES)}.")] = "auto",
    device_map: Annotated[
        str | None,
        typer.Option(callback=check_device_map, help="Where to put the target, such as `auto` or `cuda`."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="A folder for every run, report.json and report.png. Goes on with what is there."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing, but show the changes between two folders of `--output` or reports."),
    ] = None,
) -> None:
    """Measure methods of decoding on the same prompts, and compare their tokens with standard decoding's.

    Not compared are the tokens of several rows that sample, and of assisted decoding that samples: they draw in
    another order. The exit status is 1 if a token differs in float32.
    """
    from transformers.utils import logging

    from .. import benchmark as measuring

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = make_console()
    try:
        if compare is not None:
            console.print(measuring.compare(*map(measuring.Report.load, compare)))
            return
        model, tokenizer, drafters, texts = _load(target, drafter or [], prompts, limit, dtype, device_map)
        methods = measuring.make_methods(method, drafters)
        with Progress(console=make_console(stderr=True)) as progress:

            def tell(done: int, total: int) -> None:
                if progress.tasks:
                    progress.update(progress.task_ids[0], completed=done)
                    return
                progress.add_task("runs", total=total, completed=done)
                if done == total:
                    console.print(Text(f"All {total} runs are in {output} already."), soft_wrap=True)

            report = measuring.benchmark(
                model,
                tokenizer,
                texts,
                methods,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                temperatures=temperature,
                output_dir=output,
                on_run=tell,
            )
    except KeyboardInterrupt:
        console.print(
            f"Stopped. The same command goes on with what is in {output}."
            if output is not None
            else "Stopped. Nothing was kept: with `--output FOLDER` the same command goes on where it was stopped."
        )
        raise typer.Exit(code=130) from None
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error
    # Of several processes the last one to end reports on all.
    if output is None or (output / "report.json").exists():
        _show(console, report, output)
    differing = [entry.label for entry in report.summaries() if entry.differs]
    if differing and report.about["settings"]["dtype"] == "torch.float32":
        console.print(f"[bold red]Not identical[/] to standard decoding: {', '.join(differing)}.")
        raise typer.Exit(code=1)


def _show(console: Console, report: Report, output: Path | None) -> None:
    where = "" if output is None else f"; results in {output}"
    console.print(Text(f"{report.caption()}{where}\n"), soft_wrap=True)
    console.print(report.table())
    console.print()
    console.print(report.rounds_table())
    if output is None:
        return
    if find_spec("matplotlib"):
        report.plot(output / "report.png")
    else:
        console.print("No report.png is drawn, as matplotlib is not installed.")


def _load(
    target: str, drafters: list[str], prompts: str | None, limit: int, dtype: str, device_map: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, PreTrainedModel], list[str]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..benchmark import load_prompts
    from ..demo import demo_folders, demo_prompts
    from ..drafter_kinds import load_drafter

    is_demo = target == "demo"
    if is_demo:
        target, shipped = demo_folders()
        drafters = [shipped, *drafters]
        dtype = "float32" if dtype == "auto" else dtype
    check_repository("target", target, "TARGET")
    for name in drafters:
        check_repository("drafter", name, "--drafter")
    if prompts is not None:
        texts = load_prompts(prompts, limit)
    elif is_demo:
        texts = [entry["prompt"] for entry in demo_prompts()[:limit]]
    else:
        raise ValueError("`--prompts` is missing: only the target `demo` has prompts of its own.")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map=device_map)
    tokenizer = AutoTokenizer.from_pretrained(target)
    loaded = {label: load_drafter(name, target_model=model) for label, name in _labels(drafters).items()}
    return model, tokenizer, loaded, texts


def _labels(names: list[str]) -> dict[str, str]:
    """Drafters by as many last parts of their paths as tell them apart."""
    paths = list({Path(name): name for name in names}.items())
    count = 1
    while len(labels := {"/".join(path.parts[-count:]): name for path, name in paths}) < len(paths):
        count += 1
    return labels
