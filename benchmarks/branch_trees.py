"""Trees of a DFlash drafter without a selector: marginals, calibrated, and with what the target said of each branch.

The demo pair, whose DFlash 2 drafter is read by its marginals alone. Every prompt is decoded by every method, and the
tokens are compared with standard decoding's: when sampling, from the same seed. "first call" starts each prompt with
nothing known of the target, "memory" hands what it said from prompt to prompt. The calibration and the powers learn
from prompt to prompt in all of them. It measures no time, so other work on the machine does no harm.

    OMP_NUM_THREADS=1 python benchmarks/branch_trees.py greedy 16
    OMP_NUM_THREADS=1 python benchmarks/branch_trees.py sampled 16 --method memory

Each run adds its figures to the file, of all methods or of one. The constants of the trees were chosen on the prompts
from number 60 on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track

import hf_ddtree
from hf_ddtree.demo import demo_prompts, load_demo

OUTPUT = Path(__file__).parent / "results" / "branch_trees.json"
METHODS = ("calibrated", "first call", "memory")
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.7}}


def main(
    text: Annotated[str, typer.Argument(help='"greedy" or "sampled", at temperature 0.7.')],
    budget: Annotated[int, typer.Argument(help="Tree budget.")],
    method: Annotated[str | None, typer.Option(help="One of the methods: " + ", ".join(METHODS))] = None,
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    output: Annotated[Path, typer.Option(help="JSON file.")] = OUTPUT,
) -> None:
    transformers.logging.set_verbosity_error()
    model, drafter, tokenizer = load_demo()
    drafter.is_conditional = False
    encoded = [tokenizer(entry["prompt"], return_tensors="pt") for entry in demo_prompts()[:prompts]]
    options = {"max_new_tokens": new_tokens, **SAMPLING[text]}
    plain: dict[int, list[list[int]]] = {}
    by_method: dict[str, list[tuple[int, int]]] = {}
    for name in METHODS if method is None else [method]:
        drafter.calibration = hf_ddtree.Calibration()
        memory = hf_ddtree.DraftMemory()
        for index, inputs in enumerate(track(encoded, name, console=Console(stderr=True))):
            if index not in plain:
                torch.manual_seed(index)
                plain[index] = model.generate(**inputs, **options).tolist()
            if name == "first call":
                memory = hf_ddtree.DraftMemory()
            torch.manual_seed(index)
            out = model.generate(
                **inputs,
                **options,
                draft_memory=None if name == "calibrated" else memory,
                assistant_model=drafter,
                generation_strategy="ddtree",
                tree_budget=budget,
                return_dict_in_generate=True,
            )
            if out.sequences.tolist() != plain[index]:
                raise RuntimeError(f"{name} gave other tokens than standard decoding for prompt {index}")
            count = out.sequences.shape[1] - inputs["input_ids"].shape[1]
            by_method.setdefault(name, []).append((count, out.ddtree_stats.target_forwards))
    report = json.loads(output.read_text()) if output.exists() else {}
    report["settings"] = {
        "prompts": prompts,
        "new_tokens": new_tokens,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    rates = report.setdefault("tokens_per_forward", {}).setdefault(text, {}).setdefault(str(budget), {})
    for name, counts in by_method.items():
        # From the second prompt on, as a memory holds nothing before.
        rates[name] = round(sum(tokens for tokens, _ in counts[1:]) / sum(forwards for _, forwards in counts[1:]), 3)
    report.setdefault("runs", {}).setdefault(text, {}).setdefault(str(budget), {}).update(by_method)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(text, budget, rates)


if __name__ == "__main__":
    typer.run(main)
