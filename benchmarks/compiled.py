"""What a static cache and `torch.compile` change in plain and in tree decoding on the CPU.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --target demo --prompts 4 --output build/compiled_demo.json

Two targets: `qwen3`, 57 million random weights with drafts that are right as often as they are told to be and cost
nothing, and `demo`, the hybrid pair that ships. Greedy, float32. For each prompt all methods run one after the other,
in an order that rotates, and every output is compared with standard decoding's over a dynamic cache. Times are from
the first token on. The first call of each method, which compiles, is timed apart.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from measure import RESULTS, alternate, require_identical, save, summarise
from random_models import make_qwen3, random_prompts
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.target.compiled import num_graphs
from hf_ddtree.testing import SetAccuracyGenerator

PROMPT_LENGTH = 64
ACCURACY = 0.7
CACHES = "", ", static", ", compiled"
METHODS = [f"{way}{cache}" for way in ("plain", "tree") for cache in CACHES]
# The arguments that decode by tree, made from the sequence that standard decoding gives.
Drafting = Callable[[Tensor], dict[str, Any]]


class Clock(BaseStreamer):
    """When the prompt came, and then each token or several at once."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left."""


def compile_config() -> CompileConfig:
    config = CompileConfig(mode="default", dynamic=True)
    config._compile_all_devices = True
    return config


def demo_target(count: int) -> tuple[Any, list[dict[str, Tensor]], Drafting]:
    """The pair that ships."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    texts = [entry["prompt"] for entry in demo_prompts()[:count]]
    prompts = [tokenizer(text, return_tensors="pt", max_length=PROMPT_LENGTH, truncation=True) for text in texts]
    return model, prompts, lambda sequence: {"assistant_model": drafter}


def random_target(count: int) -> tuple[Any, list[dict[str, Tensor]], Drafting]:
    """A Qwen3 of random weights, whose drafts are as accurate as they are told to be."""
    model = make_qwen3(576, 10)
    vocab_size = model.config.vocab_size

    def drafting(sequence: Tensor) -> dict[str, Any]:
        return {"candidate_generator": SetAccuracyGenerator(sequence, vocab_size, ACCURACY)}

    return model, random_prompts(vocab_size, count, PROMPT_LENGTH), drafting


def measure(
    model: Any, prompts: list[dict[str, Tensor]], drafting: Drafting, budget: int, tokens: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures by method, and all runs but the first of each method."""
    static = {"cache_implementation": "static", "max_cache_len": PROMPT_LENGTH + tokens}
    caches = {"": {}, ", static": static, ", compiled": static | {"compile_config": compile_config()}}
    sequences = [model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0] for prompt in prompts]

    def run(method: str, index: int) -> tuple[dict[str, Any], list[list[int]]]:
        way, comma, cache = method.partition(",")
        arguments = dict(caches[comma + cache])
        if way == "tree":
            arguments |= drafting(sequences[index]) | {"generation_strategy": "ddtree", "tree_budget": budget}
        graphs, clock, start = num_graphs(), Clock(), time.perf_counter()
        out = model.generate(
            **prompts[index],
            **arguments,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            streamer=clock,
        )
        end = time.perf_counter()
        num_new = out.sequences.shape[1] - prompts[index]["input_ids"].shape[1] - 1
        row = {"tokens": num_new, "rows": 1, "rounds": num_new, "seconds": round(end - clock.times[1], 6)}
        if way == "tree":
            stats = out.ddtree_stats
            row |= {"accepted_lengths": stats.accepted_lengths, "tree_sizes": stats.tree_sizes}
            row["rounds"] = len(stats.accepted_lengths)
        row["round_ms"] = {"whole": round(1e3 * row["seconds"] / row["rounds"], 3)}
        return row | {"call_seconds": round(end - start, 3), "graphs": num_graphs() - graphs}, out.sequences.tolist()

    first = {method: run(method, 0)[0] for method in METHODS}
    runs = alternate(METHODS, range(len(prompts)), run, "prompts")
    summary = summarise(runs)
    for method, figures in summary.items():
        graphs = sum(run["graphs"] for run in runs if run["method"] == method)
        figures |= {"first_call_seconds": first[method]["call_seconds"], "graphs": first[method]["graphs"]}
        figures["graphs_later"] = graphs
    return summary, runs


def show(title: str, summary: dict[str, Any]) -> None:
    columns = (
        "method",
        "tokens/s",
        "quartiles",
        "against plain",
        "tokens/forward",
        "round ms",
        "first call s",
        "graphs",
    )
    table = Table(*columns, title=title, caption="graphs: compiled in the first call, and in all others")
    for name, figures in summary.items():
        low, median, high = figures["tokens_per_second"]
        table.add_row(
            name,
            f"{median:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{figures['against_plain'][1]:.2f}",
            f"{figures['tokens_per_forward']:.2f}",
            f"{figures['round_ms']['whole']:.2f}",
            f"{figures['first_call_seconds']:.1f}",
            f"{figures['graphs']}+{figures['graphs_later']}",
        )
    Console(width=110).print(table)


def main(
    target: Annotated[str, typer.Option(help="`qwen3` or `demo`.")] = "qwen3",
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 6,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    budget: Annotated[int, typer.Option(help="Drafted nodes of a round.")] = 16,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "compiled.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    targets = {"qwen3": random_target, "demo": demo_target}
    if target not in targets:
        raise typer.BadParameter(f"Must be `qwen3` or `demo`, not `{target}`.", param_hint="--target")
    model, texts, drafting = targets[target](prompts)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # What another run has compiled would not be compiled again.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        summary, runs = measure(model, texts, drafting, budget, tokens)
    show(f"{target}, {parameters / 1e6:.1f} M parameters", summary)
    save(output, summary, runs, target=target, parameters=parameters, tokens=tokens, budget=budget)
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
