"""Speed of plain decoding, chain and trees on the pair that ships with the package.

    python benchmarks/demo_speed.py --output benchmarks/results/demo_speed.json
    python benchmarks/demo_speed.py --batch-size 4 --budgets 16 --output benchmarks/results/demo_speed_batch_4.json
    python benchmarks/demo_speed.py --random-drafter --prompts 8 --max-new-tokens 512 --budgets 16 \
        --output benchmarks/results/demo_speed_random_drafter.json

Greedy, float32. For every batch of prompts all methods run one after the other, in an order that rotates from batch to
batch, and every output is compared with plain decoding's. Reported are medians over batches with their quartiles.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hf_ddtree
from hf_ddtree.benchmark.run import describe_machine
from hf_ddtree.demo import demo_prompts


class ForwardTimer:
    """Seconds of each of a module's forwards."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seconds: list[float] = []
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main(
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 256,
    budgets: Annotated[list[int], typer.Option(help="Tree budgets.")] = [8, 16, 32],  # noqa: B006
    batch_size: Annotated[int, typer.Option(help="Prompts that are decoded together, padded at the left.")] = 1,
    random_drafter: Annotated[bool, typer.Option(help="Give the drafter random weights.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the raw figures as JSON.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    model, drafter, tokenizer = hf_ddtree.load_demo()
    if random_drafter:
        torch.manual_seed(0)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    methods: dict[str, dict[str, Any]] = {"plain": {}, "chain": {"generation_strategy": "dflash"}}
    for budget in budgets:
        methods[f"tree {budget}"] = {"generation_strategy": "ddtree", "tree_budget": budget}
    methods["auto"] = {"generation_strategy": "ddtree", "tree_budget": "auto"}
    for name, arguments in methods.items():
        if name != "plain":
            arguments["assistant_model"] = drafter
    texts = [entry["prompt"] for entry in demo_prompts()[:prompts]]
    if len(texts) < prompts:
        raise typer.BadParameter(f"The pair ships {len(texts)} prompts.", param_hint="--prompts")
    inputs = [
        tokenizer(texts[first : first + batch_size], return_tensors="pt", padding=True, padding_side="left")
        for first in range(0, prompts, batch_size)
    ]
    target_timer, drafter_timer = ForwardTimer(model), ForwardTimer(drafter)

    def run(name: str, prompt: Any) -> dict[str, Any]:
        target_timer.seconds.clear()
        drafter_timer.seconds.clear()
        start = time.perf_counter()
        out = model.generate(
            **prompt, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, **methods[name]
        )
        seconds = time.perf_counter() - start
        tokens = int((out.sequences[:, prompt["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())
        row: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "prefill_seconds": target_timer.seconds[0]}
        if name != "plain":
            stats = out.ddtree_stats
            row |= {
                "target_seconds": sum(target_timer.seconds[1:]),
                "drafter_seconds": sum(drafter_timer.seconds),
                "rounds": stats.target_forwards - 1,
                "accepted_lengths": stats.accepted_lengths,
                "stage_seconds": stats.stage_seconds,
            }
        return row | {"sequences": out.sequences.tolist()}

    for name in methods:
        run(name, inputs[0])
    names = list(methods)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for index, prompt in enumerate(track(inputs, "batches", console=Console(stderr=True))):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            rows[name].append(run(name, prompt))
    for name in names:
        for row, plain in zip(rows[name], rows["plain"]):
            row["identical"] = row["sequences"] == plain["sequences"]
    for row in (row for name in names for row in rows[name]):
        del row["sequences"]

    summary = {name: summarise(rows[name], rows["plain"]) for name in names}
    show(summary)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": describe_machine(model),
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "summary": summary,
            "rows": rows,
        }
        output.write_text(json.dumps(report, indent=1) + "\n")
    if not all(entry["identical"] == len(inputs) for entry in summary.values()):
        raise SystemExit("Some outputs differ from plain decoding's.")


def summarise(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [row["tokens"] / row["seconds"] for row in rows]
    summary: dict[str, Any] = {
        "identical": sum(row["identical"] for row in rows),
        "tokens_per_second": quartiles(speeds),
        "speedup": quartiles([one["seconds"] / row["seconds"] for row, one in zip(rows, plain)]),
    }
    if "rounds" in rows[0]:
        rounds = sum(row["rounds"] for row in rows)
        stages = {name: sum(row["stage_seconds"][name] for row in rows) for name in rows[0]["stage_seconds"]}
        target, drafter = (sum(row[f"{name}_seconds"] for row in rows) for name in ("target", "drafter"))
        summary |= {
            "tokens_per_forward": statistics.mean(length for row in rows for length in row["accepted_lengths"]),
            "round_ms": {name: round(seconds / rounds * 1e3, 3) for name, seconds in stages.items()},
            "target_forward_ms": round(target / rounds * 1e3, 3),
            "drafter_forward_ms": round(drafter / rounds * 1e3, 3),
            "outside_forwards": round(1 - (target + drafter) / sum(stages.values()), 4),
        }
    return summary


def show(summary: dict[str, Any]) -> None:
    columns = "method", "identical", "tokens/s", "quartiles", "speedup", "tokens/forward", "round ms", "outside"
    table = Table(*columns, caption="outside: share of a round that is spent outside of the two models' forwards")
    for name, entry in summary.items():
        low, median, high = entry["tokens_per_second"]
        cells = [name, str(entry["identical"]), f"{median:.1f}", f"{low:.1f}-{high:.1f}", f"{entry['speedup'][1]:.2f}"]
        if "round_ms" in entry:
            total = sum(entry["round_ms"].values())
            cells += [f"{entry['tokens_per_forward']:.2f}", f"{total:.2f}", f"{entry['outside_forwards']:.1%}"]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
