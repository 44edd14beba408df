"""`hf-ddtree demo`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..output import DDTreeStats
    from ..tree.draft_tree import DraftTree

SEED = 0


def demo(
    prompt: Annotated[str | None, typer.Option(help="Complete this instead of the code that ships.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Most nodes drafted in a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the prompts that ship to complete.")] = 3,
    sample: Annotated[bool, typer.Option("--sample", help="Sample, both with the same seed.")] = False,
) -> None:
    """Complete code that the shipped pair has never seen, by standard decoding and by ddtree, and compare."""
    from transformers.utils import logging

    from ..demo import demo_prompts, load_demo

    if prompt == "":
        raise typer.BadParameter("The prompt is empty. Give it at least one character.", param_hint="--prompt")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = make_console()
    model, drafter, tokenizer = load_demo()
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


@dataclass
class _Run:
    """One completion: its new tokens, how long it took, and the `ddtree_stats` of tree decoding."""

    token_ids: list[int]
    seconds: float
    stats: DDTreeStats | None


def _stream(
    console: Console,
    title: str,
    style: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Any,
    options: dict[str, Any],
) -> _Run:
    import torch

    from .streaming import ConsoleStreamer

    console.rule(f"[{style}]{title}", style="dim")
    torch.manual_seed(SEED)
    start = time.perf_counter()
    out = model.generate(**inputs, **options, streamer=ConsoleStreamer(tokenizer, console, style))
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
    from ..visualize import draw_tree

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
