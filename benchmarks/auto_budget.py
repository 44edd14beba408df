"""Standard decoding, chain, trees of fixed sizes and `tree_budget="auto"`: the pair that ships on several workloads.

    python benchmarks/auto_budget.py

Float32, greedy. For every batch of prompts all methods run one after the other, in an order that rotates, and every
output is compared with standard decoding's. Times are from the first token on, without prefill. `auto` is measured
twice: at its first use, with nothing learned in each call; and warmed, after one call on another prompt. With
`--workloads` the file's figures of other workloads are kept.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import transformers
import typer
from measure import RESULTS, Stopwatch, against, alternate, require_identical, save, summarise
from rich.console import Console
from rich.table import Table

import hf_ddtree
from hf_ddtree.benchmark import make_methods
from hf_ddtree.demo import demo_prompts

SETTINGS = "plain", "chain", "tree:4", "tree:8", "tree:16", "tree:32", "tree:64"
FIRST_USE, WARMED = "auto, first use", "auto"


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        new_tokens: Tokens to generate for each prompt.
        is_prose: Prompts are pages of the Python reference, and else held-out code.
        batch_size: Prompts that are decoded together, padded at the left.
        context: Length of the prompts, made of as many as it takes; None for a prompt alone.
        has_random_drafter: Whether the drafter has random weights.
        fixed_tokens: Tokens to generate with the fixed settings; None for `new_tokens`.
    """

    new_tokens: int = 160
    is_prose: bool = False
    batch_size: int = 1
    context: int | None = None
    has_random_drafter: bool = False
    fixed_tokens: int | None = None


WORKLOADS = {
    "code": Workload(),
    "prose": Workload(is_prose=True),
    "random drafter": Workload(new_tokens=512, has_random_drafter=True, fixed_tokens=48),
    "batch of 4": Workload(new_tokens=96, batch_size=4),
    "context of 4096": Workload(new_tokens=96, context=4096),
}


def texts_of(workload: Workload) -> list[str]:
    """All prompts there are: code that ends where the body of a function begins, or the first lines of prose."""
    if not workload.is_prose:
        return [entry["prompt"] for entry in demo_prompts()]
    pages = [page for _, page in sorted(topics.items()) if len(page) > 1000]
    return [page[:500].rsplit(" ", 1)[0] for page in pages]


def encode(tokenizer: Any, workload: Workload, count: int) -> list[Any]:
    """`count` batches of prompts."""
    texts = texts_of(workload)
    if workload.context is not None:
        ids = tokenizer("\n".join(texts), verbose=False)["input_ids"]
        step = (len(ids) - workload.context) // count
        parts = [torch.tensor([ids[place * step :][: workload.context]]) for place in range(count)]
        return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]
    size = workload.batch_size
    if count * size > len(texts):
        raise typer.BadParameter(f"There are {len(texts)} texts for batches of {size}.", param_hint="--prompts")
    batches = [texts[first : first + size] for first in range(0, count * size, size)]
    return [tokenizer(batch, return_tensors="pt", padding=True, padding_side="left") for batch in batches]


def randomise(drafter: Any) -> None:
    """Gives a drafter weights that know nothing."""
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.05)


def measure(
    stopwatch: Stopwatch, drafter: Any, prompts: Sequence[Any], workload: Workload, title: str
) -> list[dict[str, Any]]:
    """Every method on all prompts but the last, which is there to warm up."""
    arguments = {method.name: method.arguments for method in make_methods(SETTINGS, {"": drafter})}
    policy = hf_ddtree.AutoBudget()
    auto = {"assistant_model": drafter, "generation_strategy": "ddtree"}

    def run(method: str, prompt: Any) -> tuple[dict[str, Any], list[list[int]]]:
        if method in arguments:
            is_short = method != "plain" and workload.fixed_tokens is not None
            new_tokens = workload.fixed_tokens if is_short else workload.new_tokens
            return stopwatch.run(prompt, min(new_tokens, workload.new_tokens), **arguments[method])
        budget = policy if method == WARMED else hf_ddtree.AutoBudget()
        return stopwatch.run(prompt, workload.new_tokens, tree_budget=budget, **auto)

    *measured, last = prompts
    for method in SETTINGS:
        stopwatch.run(last, 8, **arguments[method])
    run(WARMED, last)
    return alternate([*SETTINGS, FIRST_USE, WARMED], measured, run, title)


def conclude(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The methods' figures, and quartiles over prompts of auto against the fixed setting that was fastest."""
    methods = summarise(runs)
    fixed = [name for name in methods if name not in (FIRST_USE, WARMED)]
    best = max(fixed, key=lambda name: methods[name]["together"]["tokens_per_second"])
    return {
        "methods": methods,
        "best_fixed": best,
        "auto_against_best": against(runs, WARMED, best),
        "first_use_against_best": against(runs, FIRST_USE, best),
    }


def show(name: str, entry: dict[str, Any]) -> None:
    columns = "method", "tokens/s", "against plain", "quartiles", "tokens/forward", "nodes", "round ms", "outside"
    speeds = {method: figures["together"]["tokens_per_second"] for method, figures in entry["methods"].items()}
    best = entry["best_fixed"]
    caption = f"fastest fixed setting: {best}; auto {speeds[WARMED] / speeds[best]:.2f} of it, "
    table = Table(*columns, title=name, caption=f"{caption}at first use {speeds[FIRST_USE] / speeds[best]:.2f}")
    for method, figures in entry["methods"].items():
        low, _, high = figures["against_plain"]
        table.add_row(
            method,
            f"{speeds[method]:.1f}",
            f"{figures['together']['against_plain']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{figures['tokens_per_forward']:.2f}",
            f"{figures['nodes']:.1f}",
            f"{figures['together']['round_ms']:.2f}",
            f"{figures['round_ms']['outside'] / figures['round_ms']['whole']:.1%}",
        )
    Console(width=110).print(table)


def main(
    prompts: Annotated[int, typer.Option(help="Batches of prompts of each workload.")] = 10,
    tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most; by default the workload's.")] = None,
    workloads: Annotated[list[str] | None, typer.Option(help=f"Of: {'; '.join(WORKLOADS)}.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "auto_budget.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if unknown := set(workloads or ()) - set(WORKLOADS):
        raise typer.BadParameter(f"No workload {', '.join(unknown)}.", param_hint="--workloads")
    model, drafter, tokenizer = hf_ddtree.load_demo()
    random_drafter = copy.deepcopy(drafter)
    randomise(random_drafter)
    stopwatch = Stopwatch(model, [drafter, random_drafter])
    chosen = workloads or list(WORKLOADS)
    before = json.loads(output.read_text())["runs"] if workloads and output.exists() else []
    runs = {name: [run for run in before if run["workload"] == name and name not in chosen] for name in WORKLOADS}
    for name in chosen:
        workload = WORKLOADS[name]
        if tokens is not None:
            workload = replace(workload, new_tokens=min(tokens, workload.new_tokens))
        encoded = encode(tokenizer, workload, prompts + 1)
        of_workload = measure(
            stopwatch, random_drafter if workload.has_random_drafter else drafter, encoded, workload, name
        )
        runs[name] = [{"workload": name, **run} for run in of_workload]
        summary = {name: conclude(of_workload) for name, of_workload in runs.items() if of_workload}
        show(name, summary[name])
        save(output, summary, [*chain.from_iterable(runs.values())], prompts=prompts)
    require_identical([*chain.from_iterable(runs.values())])


if __name__ == "__main__":
    typer.run(main)
