"""Trees on conditional probabilities, on marginal ones and chains: tokens per target forward of the demo pair.

Every prompt is decoded greedily with every method, and the tokens are compared with standard decoding's. Run it with
`OMP_NUM_THREADS=1 python benchmarks/tree_probabilities.py --prompts 40`; it measures no time, so other work on the
machine does no harm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

import hf_ddtree
from hf_ddtree.demo import demo_prompts, load_demo

BUDGETS = (8, 16, 32, 64)
METHODS: dict[str, dict[str, Any]] = {
    "chain": {
        "generation_strategy": "dflash",
        "tree_budget": 16,
        "tree_probabilities": "marginal",
        "calibrate": False,
    },
    "selector_chain": {"generation_strategy": "dflash", "tree_budget": 16},
} | {
    f"{probabilities}_{budget}": {
        "generation_strategy": "ddtree",
        "tree_budget": budget,
        "tree_probabilities": probabilities,
        "calibrate": False,
    }
    for probabilities in ("marginal", "conditional")
    for budget in BUDGETS
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--drafter", type=Path, help="folder of another drafter for the same target")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    model, drafter, tokenizer = load_demo()
    if args.drafter:
        drafter = hf_ddtree.load_drafter(args.drafter, target_model=model)
    emitted, forwards = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0)
    per_prompt: dict[str, list[float]] = {method: [] for method in METHODS}
    for entry in track(demo_prompts()[: args.prompts], "prompts"):
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        plain = model.generate(**inputs, max_new_tokens=args.new_tokens)
        options = {"max_new_tokens": args.new_tokens, "assistant_model": drafter, "return_dict_in_generate": True}
        for method, knobs in METHODS.items():
            output = model.generate(**inputs, **options, **knobs)
            if not torch.equal(output.sequences, plain):
                raise RuntimeError(f"{method} gave other tokens than standard decoding for {entry['module']}")
            count = plain.shape[1] - inputs["input_ids"].shape[1]
            emitted[method] += count
            forwards[method] += output.ddtree_stats.target_forwards
            per_prompt[method].append(round(count / output.ddtree_stats.target_forwards, 3))
    result = {
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_forward": {method: round(emitted[method] / forwards[method], 3) for method in METHODS},
        "tokens_per_forward_by_prompt": per_prompt,
    }
    print(json.dumps(result["tokens_per_forward"], indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
