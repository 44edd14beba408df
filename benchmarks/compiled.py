"""What a static cache and `torch.compile` change in tree decoding on the CPU.

    python benchmarks/compiled.py --output benchmarks/results/compiled.json
    python benchmarks/compiled.py --target demo --prompts 4

Two targets: `qwen3`, about 60 million random weights with a generator that is right as often as it is told to be, and
`demo`, the hybrid pair that ships, whose graphs take the compiler many minutes. Greedy, float32. For each prompt all
methods run one after the other, in an order that rotates, and every output is compared with plain decoding's. Reported
are medians over prompts with their quartiles, without the first call of each method, which compiles; its time is given
apart.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import CompileConfig, Qwen3Config, Qwen3ForCausalLM

import hf_ddtree
from hf_ddtree.benchmark.run import describe_machine
from hf_ddtree.compiled import num_graphs
from hf_ddtree.demo import demo_prompts
from hf_ddtree.testing import OracleTreeCandidateGenerator

LONGEST_PROMPT = 160


def compile_config() -> CompileConfig:
    config = CompileConfig(mode="default", dynamic=True)
    config._compile_all_devices = True
    return config


def demo_target(num_prompts: int) -> tuple[Any, list[Tensor], Callable[[Tensor], dict[str, Any]]]:
    """The model that ships, prompts, and what makes it decode by tree."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    prompts = [
        tokenizer(entry["prompt"], return_tensors="pt").input_ids[:, :LONGEST_PROMPT]
        for entry in demo_prompts()[:num_prompts]
    ]
    return model, prompts, lambda plain: {"assistant_model": drafter}


def random_target(num_prompts: int) -> tuple[Any, list[Tensor], Callable[[Tensor], dict[str, Any]]]:
    """A Qwen3 of random weights; a generator that hides the right continuation among others."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16_384,
        hidden_size=640,
        intermediate_size=1_920,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    prompts = [torch.randint(1, config.vocab_size, (1, 64 + 8 * index)) for index in range(num_prompts)]

    def strategy(plain: Tensor) -> dict[str, Any]:
        return {"candidate_generator": OracleTreeCandidateGenerator(plain, config.vocab_size, accuracy=0.85)}

    return model, prompts, strategy


def measure(
    model: Any,
    prompts: list[Tensor],
    strategy: Callable[[Tensor], dict[str, Any]],
    tree_budget: int,
    max_new_tokens: int,
) -> dict[str, dict[str, Any]]:
    """Runs all methods on all prompts."""
    static = {"cache_implementation": "static", "max_cache_len": LONGEST_PROMPT + max_new_tokens}
    caches = {
        "dynamic": {},
        "static": static,
        "compiled": static | {"compile_config": compile_config()},
    }
    methods = [(way, cache) for way in ("plain", "tree") for cache in caches]
    rows: dict[str, list[dict[str, Any]]] = {f"{way}, {cache}": [] for way, cache in methods}
    first_calls: dict[str, dict[str, Any]] = {}
    for index, prompt in enumerate([prompts[0], *prompts]):
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        plain = model.generate(prompt, **arguments).sequences
        shift = index % len(methods)
        for way, cache in methods[shift:] + methods[:shift]:
            tree = {"generation_strategy": "ddtree", "tree_budget": tree_budget} | strategy(plain)
            graphs, start = num_graphs(), time.perf_counter()
            out = model.generate(prompt, **arguments, **caches[cache], **(tree if way == "tree" else {}))
            seconds = time.perf_counter() - start
            tokens = out.sequences.shape[1] - prompt.shape[1]
            row = {
                "tokens_per_second": tokens / seconds,
                "identical": torch.equal(out.sequences, plain),
                "seconds": seconds,
                "graphs": num_graphs() - graphs,
            }
            if way == "tree":
                rounds = out.ddtree_stats.target_forwards - 1
                row["tokens_per_forward"] = (tokens - 1) / rounds
                row["verify_ms"] = 1e3 * out.ddtree_stats.stage_seconds["verify"] / rounds
            name = f"{way}, {cache}"
            if index == 0:
                first_calls[name] = row
            else:
                rows[name].append(row)
    return {name: summarise(of_method, first_calls[name]) for name, of_method in rows.items()}


def summarise(rows: list[dict[str, Any]], first_call: dict[str, Any]) -> dict[str, Any]:
    summary = {
        "identical": sum(row["identical"] for row in [first_call, *rows]),
        "calls": 1 + len(rows),
        "tokens_per_second": [
            round(value, 2)
            for value in statistics.quantiles([row["tokens_per_second"] for row in rows], n=4, method="inclusive")
        ],
        "first_call_seconds": round(first_call["seconds"], 2),
        "graphs_in_first_call": first_call["graphs"],
        "graphs_later": sum(row["graphs"] for row in rows),
    }
    for name in ("tokens_per_forward", "verify_ms"):
        if name in rows[0]:
            summary[name] = round(statistics.median(row[name] for row in rows), 2)
    return summary


def show(title: str, summary: dict[str, dict[str, Any]]) -> None:
    columns = "method", "identical", "tokens/s", "quartiles", "tokens/forward", "verify ms", "first call s", "graphs"
    table = Table(*columns, title=title, caption="graphs: compiled in the first call, and in all others")
    for name, entry in summary.items():
        low, median, high = entry["tokens_per_second"]
        of_tree = [f"{entry[key]:.2f}" if key in entry else "" for key in ("tokens_per_forward", "verify_ms")]
        table.add_row(
            name,
            f"{entry['identical']} of {entry['calls']}",
            f"{median:.1f}",
            f"{low:.1f}-{high:.1f}",
            *of_tree,
            f"{entry['first_call_seconds']:.1f}",
            f"{entry['graphs_in_first_call']}+{entry['graphs_later']}",
        )
    Console().print(table)


def main(
    target: Annotated[str, typer.Option(help="`qwen3` or `demo`.")] = "qwen3",
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    tree_budget: Annotated[int, typer.Option(help="Drafted nodes of a round.")] = 16,
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    model, texts, strategy = {"qwen3": random_target, "demo": demo_target}[target](prompts)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    summary = measure(model, texts, strategy, tree_budget, max_new_tokens)
    show(f"{target}, {parameters / 1e6:.1f} M parameters", summary)
    report = {
        "machine": describe_machine(model),
        "target": target,
        "parameters": parameters,
        "max_new_tokens": max_new_tokens,
        "tree_budget": tree_budget,
        "summary": summary,
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary))
    if not all(entry["identical"] == entry["calls"] for entry in summary.values()):
        raise SystemExit("Some outputs differ from plain decoding's.")


if __name__ == "__main__":
    typer.run(main)
