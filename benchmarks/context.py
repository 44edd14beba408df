"""What a long context costs around the forwards, and what the cache's growth in place takes in memory.

    python benchmarks/context.py

Time: the pair that ships, float32, greedy, plain decoding and trees of 16 nodes in an order that rotates, each output
compared with plain decoding's; for each round the seconds in the target's forward, in the drafter's, in the drafter's
output head and scores of pairs, and outside of all. Prompts of one place in the text end alike at every length.
Memory: real keys and values of 16 layers at 128k tokens, fed one round after the other, counted by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from measure import RESULTS, Stopwatch, alternate, require_identical, save, summarise
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.growth import growing

BUDGET = 16
# The shortest and the one whose speed is compared with it are measured on all prompts, the others on some.
SHORT, LONG = 256, 8192
CONTEXTS = (SHORT, 1024, 4096, LONG, 16_000)
FEWER = 3
# The cache whose memory is counted: layers and what one token takes in each.
NUM_LAYERS, NUM_HEADS, HEAD_DIM, DTYPE = 16, 1, 32, torch.bfloat16
CACHED = 128 * 1024


def prompts_of(tokenizer: Any, context: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Held-out code, `context` tokens up to each of `count` places."""
    ids = tokenizer("\n".join(entry["prompt"] for entry in demo_prompts()), verbose=False)["input_ids"]
    first = max(CONTEXTS)
    ends = [first + place * (len(ids) - first) // count for place in range(count)]
    parts = [torch.tensor([ids[end - context : end]]) for end in ends]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def measure_times(prompts: int, tokens: int, longest: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures by context and method, and all runs."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    stopwatch = Stopwatch(model, [drafter])
    arguments: dict[str, dict[str, Any]] = {
        "plain": {},
        "tree": {"assistant_model": drafter, "generation_strategy": "ddtree", "tree_budget": BUDGET},
    }

    def run(method: str, prompt: Any) -> tuple[dict[str, Any], list[list[int]]]:
        return stopwatch.run(prompt, tokens, **arguments[method])

    runs: dict[int, list[dict[str, Any]]] = {}
    for context in (context for context in CONTEXTS if context <= longest):
        count = prompts if context in (SHORT, LONG) else min(FEWER, prompts)
        encoded = prompts_of(tokenizer, context, count)
        for method in arguments:
            stopwatch.run(encoded[0], 4, **arguments[method])
        runs[context] = alternate(list(arguments), encoded, run, f"context of {context}")
    summary = {str(context): summarise(of_context) for context, of_context in runs.items()}
    return summary, [{"context": context, **run} for context, of_context in runs.items() for run in of_context]


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while it is active.

    Attributes:
        peak: Most bytes alive at a time, at the end of an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.steady())
        return result

    def steady(self) -> int:
        """Bytes that are alive now."""
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        return sum(self._alive.values())


@contextmanager
def concatenating(cache: DynamicCache) -> Iterator[None]:
    """The stock cache as it is."""
    yield


def memory_of(how: Callable[[DynamicCache], Any], rounds: int) -> dict[str, float]:
    """Steady and peak bytes of a cache for each byte of the keys and values in it, over rounds that feed trees.

    A round feeds the root and 16 nodes and keeps 5 of them, as the commit does. It peaks where a layer grows.
    """

    def entries(count: int) -> torch.Tensor:
        return torch.zeros((1, NUM_HEADS, count, HEAD_DIM), dtype=DTYPE)

    with StorageCounter() as counter:
        cache = DynamicCache()
        for layer in range(NUM_LAYERS):
            cache.update(entries(CACHED), entries(CACHED), layer)
        counter.peak = counter.steady()
        steady = []
        with how(cache):
            for _ in range(rounds):
                for layer in range(NUM_LAYERS):
                    cache.update(entries(1 + BUDGET), entries(1 + BUDGET), layer)
                cached = cache.get_seq_length() - BUDGET + 4
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[..., :cached, :], layer.values[..., :cached, :]
                steady.append(counter.steady())
    needed = 2 * NUM_LAYERS * cached * NUM_HEADS * HEAD_DIM * DTYPE.itemsize
    return {"needed": needed, "steady": max(steady), "peak": counter.peak}


def show(times: dict[str, Any], memory: dict[str, Any]) -> None:
    parts = "target", "drafter", "head", "outside"
    table = Table(
        "context", "plain ms", "tree ms", *parts, "tokens/forward", "against plain", "a round in plain steps"
    )
    for context, methods in times.items():
        plain, tree = methods["plain"], methods["tree"]
        table.add_row(
            context,
            f"{plain['round_ms']['whole']:.2f}",
            *(f"{tree['round_ms'][part]:.2f}" for part in ("whole", *parts)),
            f"{tree['tokens_per_forward']:.2f}",
            f"{tree['against_plain'][1]:.2f}",
            f"{tree['round_ms']['whole'] / plain['round_ms']['whole']:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    for name, entry in memory.items():
        console.print(f"{name}: steady {entry['steady'] / 1e6:.1f} MB, peak {entry['peak'] / 1e6:.1f} MB")


def main(
    prompts: Annotated[int, typer.Option(help="Prompts of 256 and of 8192 tokens; of other lengths 3.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    longest: Annotated[int, typer.Option(help="Longest context to measure.")] = max(CONTEXTS),
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "context.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Enough rounds for the room of a 64th to be used up.
    rounds = CACHED // 64 // 5 + 8
    memory = {"stock": memory_of(concatenating, 8), "in place": memory_of(growing, rounds)}
    times, runs = measure_times(prompts, tokens, longest)
    show(times, memory)
    save(output, {"times": times, "memory": memory}, runs, tokens=tokens)
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
