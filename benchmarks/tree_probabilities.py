"""Trees on conditional probabilities, on marginal ones and chains: tokens per target forward of the demo pair.

Every prompt is decoded with every method, and the tokens are compared with standard decoding's: when sampling, from the
same seed. "learned" is conditional trees whose power is learned from prompt to prompt. It measures no time, so other
work on the machine does no harm.

    OMP_NUM_THREADS=1 python benchmarks/tree_probabilities.py --prompts 40
    OMP_NUM_THREADS=1 python benchmarks/tree_probabilities.py --prompts 16 --temperature 0.7 --new-tokens 128

With `--methods learned_16,learned_32` these alone are run, and added to the figures that the file has of others.
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
        "tree_probabilities": probabilities.replace("learned", "conditional"),
        "calibrate": probabilities == "learned",
    }
    for probabilities in ("marginal", "conditional", "learned")
    for budget in BUDGETS
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="to sample at; 0 for greedy")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--drafter", type=Path, help="folder of another drafter for the same target")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    model, drafter, tokenizer = load_demo()
    if args.drafter:
        drafter = hf_ddtree.load_drafter(args.drafter, target_model=model)
    methods = {name: METHODS[name] for name in args.methods.split(",")}
    emitted, forwards = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    per_prompt: dict[str, list[float]] = {method: [] for method in methods}
    calibrations = {method: hf_ddtree.Calibration() for method in methods}
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    for place, entry in enumerate(track(demo_prompts()[: args.prompts], "prompts")):
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        options = {"max_new_tokens": args.new_tokens, **sampling}
        torch.manual_seed(place)
        plain = model.generate(**inputs, **options)
        options |= {"assistant_model": drafter, "return_dict_in_generate": True}
        for method, knobs in methods.items():
            drafter.calibration = calibrations[method]
            torch.manual_seed(place)
            output = model.generate(**inputs, **options, **knobs)
            if not torch.equal(output.sequences, plain):
                raise RuntimeError(f"{method} gave other tokens than standard decoding for {entry['module']}")
            count = plain.shape[1] - inputs["input_ids"].shape[1]
            emitted[method] += count
            forwards[method] += output.ddtree_stats.target_forwards
            per_prompt[method].append(round(count / output.ddtree_stats.target_forwards, 3))
    known = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    rates = {method: round(emitted[method] / forwards[method], 3) for method in methods}
    result = {
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "temperature": args.temperature,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_forward": known.get("tokens_per_forward", {}) | rates,
        "tokens_per_forward_by_prompt": known.get("tokens_per_forward_by_prompt", {}) | per_prompt,
    }
    print(json.dumps(result["tokens_per_forward"], indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
