"""Trees on conditional probabilities, on marginal ones and chains: tokens per target forward of the demo pair.

Every prompt is decoded with every method, and the tokens are compared with standard decoding's: when sampling, from
the same seed. "learned" is conditional trees whose power is learned from prompt to prompt. It measures no time, so
other work on the machine does no harm.

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
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    options = {"max_new_tokens": args.new_tokens, **sampling}
    encoded = [tokenizer(entry["prompt"], return_tensors="pt") for entry in demo_prompts()[: args.prompts]]
    plain: list[torch.Tensor] = []
    for place, inputs in enumerate(track(encoded, "standard decoding")):
        torch.manual_seed(place)
        plain.append(model.generate(**inputs, **options))
    result = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    rates, per_prompt = (result.get(name, {}) for name in ("tokens_per_forward", "tokens_per_forward_by_prompt"))
    for method in args.methods.split(","):
        drafter.calibration = hf_ddtree.Calibration()
        counts, forwards = [], []
        for place, inputs in enumerate(track(encoded, method)):
            torch.manual_seed(place)
            drafts = {"assistant_model": drafter, "return_dict_in_generate": True, **METHODS[method]}
            output = model.generate(**inputs, **options, **drafts)
            if not torch.equal(output.sequences, plain[place]):
                raise RuntimeError(f"{method} gave other tokens than standard decoding for prompt {place}")
            counts.append(plain[place].shape[1] - inputs["input_ids"].shape[1])
            forwards.append(output.ddtree_stats.target_forwards)
        rates[method] = round(sum(counts) / sum(forwards), 3)
        per_prompt[method] = [round(count / of_prompt, 3) for count, of_prompt in zip(counts, forwards)]
        print(method, rates[method], flush=True)
        if args.output:
            result = {
                "prompts": args.prompts,
                "new_tokens": args.new_tokens,
                "temperature": args.temperature,
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "tokens_per_forward": rates,
                "tokens_per_forward_by_prompt": per_prompt,
            }
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
