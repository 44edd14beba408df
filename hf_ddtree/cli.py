"""The command line: `hf-ddtree`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils import logging

import hf_ddtree

from .benchmark import DATASETS, Report, benchmark, load_prompts, make_methods
from .benchmark import compare as compare_reports
from .benchmark.methods import NAMES
from .demo import demo_folders, demo_prompts
from .drafters import is_drafter_alone
from .tree.draft_tree import DraftTree
from .visualize import draw_tree

SEED = 0
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Values of `device_map` that are no devices.
PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
# What the command line calls the arguments that errors name.
OPTIONS = {
    "batch_size": "--batch-size",
    "context_length": "--context-length",
    "drafters": "--drafter",
    "dtype": "--dtype",
    "max_new_tokens": "--max-new-tokens",
    "methods": "--method",
    "model": "TARGET",
    "output_dir": "--output",
    "prompts": "--prompts",
    "temperatures": "--temperature",
    "tree_budget": "--tree-budget",
}

app = typer.Typer(help="Token-tree speculative decoding for Transformers.", no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-ddtree {hf_ddtree.__version__}")
        raise typer.Exit()


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}.")
    return dtype


def _check_device_map(device_map: str | None) -> str | None:
    if device_map is not None and device_map not in PLACEMENTS:
        try:
            torch.empty(0, device=device_map)
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise typer.BadParameter(
                f"{device_map!r} is neither {', '.join(PLACEMENTS)} nor a device of this machine, such as 'cpu': "
                f"{_first_line(error)}"
            ) from error
    return device_map


def _check_tree_budget(tree_budget: str) -> str:
    if tree_budget != "auto" and not (tree_budget.isdecimal() and int(tree_budget) > 0):
        raise typer.BadParameter(f"{tree_budget!r} is neither `auto` nor an integer of at least 1.")
    return tree_budget


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _in_options(error: Exception) -> typer.BadParameter:
    """An error for people at the command line, who know options."""
    named = re.sub(r"`(\w+)`", lambda found: f"`{OPTIONS.get(found[1], found[1])}`", str(error))
    return typer.BadParameter(named)


def _look_up(role: str, name: str, option: str) -> None:
    """Checks that there is a target or drafter of this name, and that a target is no drafter."""
    if name == "mtp":
        return
    try:
        raw_config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            reason = f"has a config.json that cannot be read: {_first_line(error)}"
        elif Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1:
            reason = "does not exist."
        else:
            reason = f"is no folder, nor a repository that could be had from the Hub: {_first_line(error)}"
        raise typer.BadParameter(f"The {role} {name!r} {reason}", param_hint=option) from error
    if not raw_config:
        raise typer.BadParameter(f"The {role} {name!r} has no config.json.", param_hint=option)
    if role == "target" and is_drafter_alone(raw_config):
        raise typer.BadParameter(
            f"{name!r} is a drafter. Name its target first, and it as `--drafter`.", param_hint=option
        )


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Token-tree speculative decoding for Transformers."""


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Option(help="Complete this instead of the code that ships.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Most nodes drafted in a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the prompts that ship to complete.")] = 3,
    sample: Annotated[bool, typer.Option("--sample", help="Sample, both with the same seed.")] = False,
) -> None:
    """Complete code that the shipped pair has never seen, by plain generate() and by ddtree, and compare."""
    if prompt == "":
        raise typer.BadParameter("The prompt is empty. Give it at least one character.", param_hint="--prompt")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(highlight=False)
    model, drafter, tokenizer = hf_ddtree.load_demo()
    options = {"max_new_tokens": max_new_tokens, "do_sample": sample, "return_dict_in_generate": True}
    ddtree_options = {
        "assistant_model": drafter,
        "generation_strategy": "ddtree",
        "tree_budget": budget,
        "return_trees": True,
    }
    chosen = [{"prompt": prompt, "module": "--prompt"}] if prompt is not None else demo_prompts()[:prompts]

    plain_runs, ddtree_runs = [], []
    for place, entry in enumerate(chosen, start=1):
        inputs = tokenizer(entry["prompt"], return_tensors="pt").to(model.device)
        if place == 1:
            for warm_up in ({}, ddtree_options):
                model.generate(**inputs, **{**options, "max_new_tokens": 8}, **warm_up)
        console.rule(f"[bold]{place} of {len(chosen)}: {entry['module']}")
        console.print(Text(entry["prompt"], style="dim"), soft_wrap=True)
        plain_runs.append(_stream(console, "plain generate()", "cyan", model, tokenizer, inputs, options))
        ddtree_runs.append(_stream(console, "ddtree", "green", model, tokenizer, inputs, options | ddtree_options))

    console.rule("[bold]one round's tree")
    _draw_best_round(console, tokenizer, ddtree_runs)
    console.rule("[bold]result")
    identical = [plain.token_ids == tree.token_ids for plain, tree in zip(plain_runs, ddtree_runs)]
    console.print(_comparison(plain_runs, ddtree_runs))
    if all(identical):
        console.print("[bold green]Identical[/]: every token is the one that plain generate() gives.")
    else:
        console.print(f"[bold red]Not identical[/] on {identical.count(False)} of {len(identical)} prompts.")
        raise typer.Exit(code=1)


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A repository of the Hub, a folder, or `demo`.")],
    drafter: Annotated[str | None, typer.Option(help="A drafter: a repository of the Hub or a folder.")] = None,
    tree_budget: Annotated[
        str, typer.Option(callback=_check_tree_budget, help="Most nodes drafted in a round, or `auto`.")
    ] = "auto",
    context_length: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Say whether a model can be decoded by tree, what that needs, and whether a drafter fits. Reads no weights.

    The exit status is 1 if the model is not supported or the drafter does not fit.
    """
    logging.set_verbosity_error()
    if target == "demo":
        target, shipped = demo_folders()
        drafter = drafter or shipped
    _look_up("target", target, "TARGET")
    if drafter is not None:
        _look_up("drafter", drafter, "--drafter")
    budget: int | Literal["auto"] = "auto" if tree_budget == "auto" else int(tree_budget)
    try:
        report = hf_ddtree.check(target, drafter, tree_budget=budget, context_length=context_length)
    except (OSError, ValueError) as error:
        raise _in_options(error) from error
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_report_table(report, tree_budget == "auto"))
        if report.call is not None:
            console.print(Text(f"\n{report.call}"), soft_wrap=True)
    if not report.supported or report.drafter_fits is False:
        raise typer.Exit(code=1)


@app.command()
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
        list[str], typer.Option(help=f"What to measure besides plain decoding: {NAMES}. May be repeated.")
    ] = ["chain", "tree:16", "auto"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.")] = 1,
    temperature: Annotated[list[float], typer.Option(min=0, help="0 for greedy decoding. May be repeated.")] = [0.0],  # noqa: B006
    dtype: Annotated[str, typer.Option(callback=_check_dtype, help=f"Of the target: {', '.join(DTYPES)}.")] = "auto",
    device_map: Annotated[
        str | None,
        typer.Option(callback=_check_device_map, help="Where to put the target, such as `auto` or `cuda`."),
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
    """Measure methods of decoding on the same prompts, and compare their tokens with plain decoding's.

    Not compared are the tokens of several rows that sample, and of assisted decoding that samples: they draw in
    another order. The exit status is 1 if a token differs in float32.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(highlight=False)
    try:
        if compare is not None:
            console.print(compare_reports(*map(Report.load, compare)))
            return
        model, tokenizer, drafters, texts = _load_for_bench(target, drafter or [], prompts, limit, dtype, device_map)
        methods = make_methods(method, drafters)
        with Progress(console=Console(stderr=True)) as progress:

            def tell(done: int, total: int) -> None:
                if progress.tasks:
                    progress.update(progress.task_ids[0], completed=done)
                    return
                progress.add_task("runs", total=total, completed=done)
                if done == total:
                    console.print(Text(f"All {total} runs are in {output} already."), soft_wrap=True)

            report = benchmark(
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
        raise _in_options(error) from error
    # Of several processes the last one to end reports on all.
    if output is None or (output / "report.json").exists():
        where = "" if output is None else f"; results in {output}"
        console.print(Text(f"{report.caption()}{where}\n"), soft_wrap=True)
        console.print(report.table())
        console.print()
        console.print(report.rounds_table())
    if output is not None and (output / "report.json").exists():
        if find_spec("matplotlib"):
            report.plot(output / "report.png")
        else:
            console.print("No report.png is drawn, as matplotlib is not installed.")
    differing = [entry.label for entry in report.summaries() if entry.differs]
    if differing and model.dtype == torch.float32:
        console.print(f"[bold red]Not identical[/] to plain decoding: {', '.join(differing)}.")
        raise typer.Exit(code=1)


def _load_for_bench(
    target: str, drafters: list[str], prompts: str | None, limit: int, dtype: str, device_map: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, PreTrainedModel], list[str]]:
    is_demo = target == "demo"
    if is_demo:
        target, shipped = demo_folders()
        drafters = [shipped, *drafters]
        dtype = "float32" if dtype == "auto" else dtype
    _look_up("target", target, "TARGET")
    for name in drafters:
        _look_up("drafter", name, "--drafter")
    if prompts is not None:
        texts = load_prompts(prompts, limit)
    elif is_demo:
        texts = [entry["prompt"] for entry in demo_prompts()[:limit]]
    else:
        raise ValueError("`--prompts` is missing: only the target `demo` has prompts of its own.")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map=device_map)
    tokenizer = AutoTokenizer.from_pretrained(target)
    loaded = {label: hf_ddtree.load_drafter(name, target_model=model) for label, name in _labels(drafters).items()}
    return model, tokenizer, loaded, texts


def _labels(names: list[str]) -> dict[str, str]:
    """Drafters by as many last parts of their paths as tell them apart."""
    paths = list({Path(name): name for name in names}.items())
    count = 1
    while len(labels := {"/".join(path.parts[-count:]): name for path, name in paths}) < len(paths):
        count += 1
    return labels


def _report_table(report: hf_ddtree.CheckReport, is_auto: bool) -> Table:
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
        where = f"{memory.pop('nodes')} nodes{most} behind {memory.pop('context_length')} tokens:"
        parts = [f"{size / 2**20:9.2f} MiB  {name.replace('_', ' ')}" for name, size in memory.items() if size]
        total = f"{report.memory.total / 2**20:9.2f} MiB  in all, {report.memory.per_node / 2**10:.1f} KiB a node"
        table.add_row("memory of a tree", "\n".join([where, *parts, total]))
    if report.drafter is not None:
        fit = {True: "fits", False: "does not fit", None: "not known"}[report.drafter_fits]
        reason = "" if report.drafter_reason is None else f": {report.drafter_reason}"
        table.add_row("drafter", Text(f"{report.drafter} {fit}{reason}"))
    for note in report.notes:
        table.add_row("note", Text(note))
    return table


@dataclass
class _Run:
    """One completion: its new tokens, how long it took, and the `ddtree_stats` of tree decoding."""

    token_ids: list[int]
    seconds: float
    stats: hf_ddtree.DDTreeStats | None


class _ConsoleStreamer(TextStreamer):
    """Prints text as it is generated, in one style."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, style: str) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console
        self._style = style

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._console.print(Text(text, style=self._style), end="\n" if stream_end else "", soft_wrap=True)


def _stream(
    console: Console,
    title: str,
    style: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Any,
    options: dict[str, Any],
) -> _Run:
    console.rule(f"[{style}]{title}", style="dim")
    torch.manual_seed(SEED)
    start = time.perf_counter()
    out = model.generate(**inputs, **options, streamer=_ConsoleStreamer(tokenizer, console, style))
    seconds = time.perf_counter() - start
    token_ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    console.print(f"[dim]{len(token_ids)} tokens in {seconds:.2f} s, {len(token_ids) / seconds:.1f} tokens/s")
    return _Run(token_ids, seconds, getattr(out, "ddtree_stats", None))


def _comparison(plain_runs: list[_Run], ddtree_runs: list[_Run]) -> Table:
    table = Table("", "tokens/s", "speedup", "tokens per target forward")
    speeds = [
        sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)
        for runs in (plain_runs, ddtree_runs)
    ]
    lengths = [length for run in ddtree_runs if run.stats for length in run.stats.accepted_lengths]
    table.add_row("plain generate()", f"{speeds[0]:.1f}", "", "1")
    table.add_row(
        "ddtree", f"{speeds[1]:.1f}", f"{speeds[1] / speeds[0]:.2f}x", f"{sum(lengths) / max(1, len(lengths)):.2f}"
    )
    return table


def _draw_best_round(console: Console, tokenizer: PreTrainedTokenizerBase, runs: list[_Run]) -> None:
    """Draws the round that accepted most of those whose path strays from the drafter's best chain, if any does."""
    rounds = []
    for run in runs:
        if run.stats is None or run.stats.trees is None or run.stats.accepted_paths is None:
            continue
        roots = [int(trees[0].token_ids[0]) for trees in run.stats.trees]
        for trees, paths, next_root in zip(run.stats.trees, run.stats.accepted_paths, [*roots[1:], None]):
            rounds.append((trees[0], paths[0], next_root))
    if not rounds:
        console.print("The output ended before a tree was drafted.")
        return
    tree, path, next_token_id = max(rounds, key=lambda entry: (_strays(*entry[:2]), len(entry[1])))
    console.print(draw_tree(tree, tokenizer, path, next_token_id))
    console.print(
        f"[dim]Of {tree.num_drafted} drafted tokens, the target took {len(path) - 1} (✓) and then picked its own, "
        "all in one forward. Percentages are the drafter's, for the whole path."
    )


def _strays(tree: DraftTree, path: list[int]) -> bool:
    """Whether some node of the path is not the most probable child of its parent, which comes first."""
    return any(tree.children(parent)[0] != child for parent, child in zip(path, path[1:]))


if __name__ == "__main__":
    app(prog_name="hf-ddtree")
