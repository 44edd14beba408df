"""Each kind of drafter on the target that ships with the package: tokens per forward and speed.

    python benchmarks/drafters.py --output benchmarks/results/drafters.json

Float32. Greedy on held-out code, and on prompts made of it that ask for repetition: a fragment twice and its first
lines once more, or a fragment and half of it quoted. And sampled, where the target hardly ever repeats itself. All
methods run one after the other on each prompt, in an order that rotates, and every output is compared with
standard decoding's.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from measure import rounded_quartiles
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree.benchmark import describe_machine
from hf_ddtree.demo import demo_prompts
from hf_ddtree.draft_memory.match_accuracy import MATCH_LENGTHS
from hf_ddtree.draft_memory.ngram_index import NgramIndex

# Noise in the copy of the target that stands for a small causal language model, in standard deviations of a weight.
NOISE = 0.1
SEED = 0
# Drafters left out where text is sampled: a chain, and one that is as slow as the target.
NOT_SAMPLED = "DFlash 2, chain", "causal language model"


def edit(fragment: str) -> str:
    """A fragment, the same again, and its first lines once more."""
    first = "\n".join(fragment.rstrip("\n").split("\n")[:2])
    return f"{fragment}\n{fragment}\n{first}\n"


def quote(fragment: str) -> str:
    """A fragment, and its first half quoted."""
    lines = fragment.rstrip("\n").split("\n")
    half = "\n".join(lines[: max(1, len(lines) // 2)])
    return f"{fragment}\n# As above:\n{half}\n"


def texts(prompts: int) -> dict[str, list[str]]:
    """Prompts of each kind of text."""
    fragments = [entry["prompt"] for entry in demo_prompts()[:prompts]]
    repeated = [(edit, quote)[place % 2](fragment) for place, fragment in enumerate(fragments)]
    return {"code": fragments, "repetitive": repeated, "sampled": fragments}


def index_milliseconds(length: int = 8192) -> float:
    """What prompt lookup takes for its index of a prompt of random tokens; the best of ten."""
    tokens = torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(SEED)).tolist()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        NgramIndex(MATCH_LENGTHS).extend(tokens)
        seconds.append(time.perf_counter() - start)
    return round(min(seconds) * 1e3, 2)


def noisy_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A language model that agrees with the target most of the time, and is as slow."""
    generator = torch.Generator().manual_seed(SEED)
    noisy = copy.deepcopy(model).requires_grad_(False)
    for weight in noisy.parameters():
        if weight.ndim > 1:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=NOISE * float(weight.std()))
    return noisy


def kinds(model: PreTrainedModel, drafter: PreTrainedModel) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each kind of drafter with its arguments of `generate()`, or why it has no figures."""
    yield "DFlash 2, chain", {"assistant_model": drafter, "generation_strategy": "dflash"}
    yield "DFlash 2", {"assistant_model": drafter}
    yield "DFlash 2 by marginals, as DFlash", {"assistant_model": drafter, "tree_probabilities": "marginal"}
    blind = hf_ddtree.load_demo()[1]
    blind.is_conditional = False
    # A memory for each call: what it hands on is measured by `branch_trees.py`.
    yield "by marginals, and what the target said", {"assistant_model": blind, "draft_memory": hf_ddtree.DraftMemory}
    yield "causal language model", {"assistant_model": noisy_copy(model)}
    yield "prompt lookup", {"tree_lookup": True}
    yield "DFlash 2 and prompt lookup", {"assistant_model": drafter, "tree_lookup": True}
    yield "speculators, native, multi-token prediction", "none is trained for the target that ships"


def fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call, with a new memory if they name the class."""
    return {name: value() if value is hf_ddtree.DraftMemory else value for name, value in arguments.items()}


def main(
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts of each kind of text.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 96,
    budget: Annotated[str, typer.Option(help='Tree budget: a number, or "auto".')] = "16",
    output: Annotated[Path | None, typer.Option(help="Where to write the raw figures as JSON.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    model, drafter, tokenizer = hf_ddtree.load_demo()
    methods: dict[str, dict[str, Any]] = {"plain": {}}
    missing: dict[str, str] = {}
    for name, arguments in kinds(model, drafter):
        if isinstance(arguments, str):
            missing[name] = arguments
            continue
        arguments = {
            "generation_strategy": "ddtree",
            "tree_budget": int(budget) if budget.isdigit() else budget,
            **arguments,
        }
        try:
            model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4, **fresh(arguments))
        except ValueError as error:
            missing[name] = str(error)
        else:
            methods[name] = arguments

    runs = []
    for text, entries in texts(prompts).items():
        names = [name for name in methods if text != "sampled" or name not in NOT_SAMPLED]
        for index, entry in enumerate(track(entries, text, console=Console(stderr=True))):
            inputs = tokenizer(entry, return_tensors="pt")
            shift = index % len(names)
            of_prompt = {}
            for name in names[shift:] + names[:shift]:
                torch.manual_seed(SEED)
                arguments = fresh(methods[name])
                start = time.perf_counter()
                out = model.generate(
                    **inputs,
                    max_new_tokens=max_new_tokens,
                    do_sample=text == "sampled",
                    return_dict_in_generate=True,
                    **arguments,
                )
                seconds = time.perf_counter() - start
                stats = getattr(out, "ddtree_stats", None)
                of_prompt[name] = out.sequences.tolist()
                runs.append(
                    {
                        "text": text,
                        "prompt": index,
                        "method": name,
                        "tokens": out.sequences.shape[1] - inputs["input_ids"].shape[1],
                        "seconds": seconds,
                        "accepted_lengths": None if stats is None else stats.accepted_lengths,
                        "tree_sizes": None if stats is None else stats.tree_sizes,
                        "draft_forwards": None if stats is None else stats.draft_forwards,
                    }
                )
            for run in runs[-len(names) :]:
                run["identical"] = of_prompt[run["method"]] == of_prompt["plain"]

    summary = summarise(runs)
    show(summary, missing)
    index_ms = index_milliseconds()
    Console().print(f"index of 8192 tokens for prompt lookup: {index_ms} ms")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {"prompts": prompts, "max_new_tokens": max_new_tokens, "tree_budget": budget}
        report = {"machine": describe_machine(model.device), "settings": settings, "summary": summary}
        report |= {"missing": missing, "index_milliseconds": index_ms, "runs": runs}
        output.write_text(json.dumps(report, indent=1) + "\n")
    if not all(run["identical"] for run in runs):
        raise SystemExit("Some outputs differ from standard decoding's.")


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By method, then text: tokens per forward of all prompts together, and quartiles of each prompt's speed."""
    plain = {(run["text"], run["prompt"]): run["seconds"] for run in runs if run["method"] == "plain"}
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        summary.setdefault(run["method"], {}).setdefault(run["text"], []).append(run)
    for texts_of_method in summary.values():
        for text, of_text in texts_of_method.items():
            lengths = [length for run in of_text for length in run["accepted_lengths"] or [1]]
            texts_of_method[text] = {
                "identical": sum(run["identical"] for run in of_text),
                "tokens_per_forward": round(statistics.mean(lengths), 3),
                "tokens_per_second": rounded_quartiles([run["tokens"] / run["seconds"] for run in of_text]),
                "speedup": rounded_quartiles([plain[text, run["prompt"]] / run["seconds"] for run in of_text]),
            }
    return summary


def cells(summary: dict[str, dict[str, dict[str, Any]]]) -> Iterator[list[str]]:
    """For each method its name, and tokens per forward and speed on each kind of text."""
    for name, of_text in summary.items():
        row = [name]
        for text in summary["plain"]:
            entry = of_text.get(text)
            row += ["", ""] if entry is None else [f"{entry['tokens_per_forward']:.2f}", f"{entry['speedup'][1]:.2f}x"]
        yield row


def show(summary: dict[str, dict[str, dict[str, Any]]], missing: dict[str, str]) -> None:
    columns = [column for text in summary["plain"] for column in (f"{text}\ntok/fwd", "speed")]
    table = Table("drafter", *columns, caption="speed: against standard decoding, median over prompts")
    for row in cells(summary):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: no figures, {reason}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
