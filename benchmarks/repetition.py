"""Speed by how repetitive the text is: the pair that ships on held-out code.

    python benchmarks/repetition.py

Float32, greedy, one row. The prompts are told apart by standard decoding's output: the larger the share of distinct
6-grams of its tokens, the less it repeats itself. For every prompt all methods run one after the other, in an order
that rotates, and every output is compared with standard decoding's. Times are from the first token on, without
prefill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from measure import RESULTS, Stopwatch, alternate, require_identical, save, summarise
from rich.console import Console
from rich.table import Table

import hf_ddtree
from hf_ddtree.benchmark import distinct_share, make_methods
from hf_ddtree.demo import demo_prompts

METHODS = "plain", "lookup", "chain", "tree:16"
GROUPS = "repetitive", "in between", "varied"


def measure(prompts: int, tokens: int) -> list[dict[str, Any]]:
    """Every method on prompts that are spread evenly over those that ship; each run with its prompt's share."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    arguments = {method.name: method.arguments for method in make_methods(METHODS, {"": drafter})}
    stopwatch = Stopwatch(model, [drafter])
    entries = demo_prompts()
    chosen = [entries[place * len(entries) // prompts]["prompt"] for place in range(prompts)]
    encoded = [tokenizer(text, return_tensors="pt") for text in chosen]
    shares: dict[int, float] = {}

    def run(method: str, prompt: tuple[int, Any]) -> tuple[dict[str, Any], list[list[int]]]:
        index, inputs = prompt
        row, sequences = stopwatch.run(inputs, tokens, **arguments[method])
        if method == "plain":
            shares[index] = round(distinct_share(sequences[0][inputs["input_ids"].shape[1] :]), 4)
        return row, sequences

    for method in METHODS:
        stopwatch.run(encoded[0], 8, **arguments[method])
    runs = alternate(METHODS, list(enumerate(encoded)), run, "prompts")
    return [{**one, "distinct": shares[one["prompt"]]} for one in runs]


def group(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs in equal parts of their prompts, from those with the smallest share of distinct 6-grams on."""
    shares = {run["prompt"]: run["distinct"] for run in runs}
    in_order = sorted(shares, key=lambda prompt: (shares[prompt], prompt))
    place = {prompt: GROUPS[index * len(GROUPS) // len(in_order)] for index, prompt in enumerate(in_order)}
    return {name: of_group for name in GROUPS if (of_group := [run for run in runs if place[run["prompt"]] == name])}


def show(summary: dict[str, dict[str, Any]]) -> None:
    table = Table("text", "method", "tokens/s", "against plain", "tokens/forward")
    for name, methods in summary.items():
        for method in METHODS:
            figures = methods[method]
            together = figures["together"]
            speeds = f"{together['tokens_per_second']:.1f}", f"{together['against_plain']:.2f}"
            table.add_row(name, method, *speeds, f"{figures['tokens_per_forward']:.2f}")
    Console().print(table)


def main(
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 33,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 96,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "repetition.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    runs = measure(prompts, tokens)
    summary = {name: summarise(of_group) for name, of_group in group(runs).items()}
    show(summary)
    save(output, summary, runs, prompts=prompts, tokens=tokens)
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
