"""What a long context costs around the forwards, what it does to drafts, and what the cache takes in memory.

    python benchmarks/context.py

Time: the pair that ships, float32, greedy, standard decoding and trees of 16 nodes in an order that rotates, each
output compared with standard decoding's; for each round the seconds in the target's forward, in the drafter's, in the
drafter's output head and scores of pairs, and outside of all. Prompts of one place in the text end alike at every
length. Trees are built twice: of what the drafter drafts, and of drafts as accurate at every length, at the drafter's
cost.
Texts: what standard decoding writes after short and after long prompts, written after both, to tell whether it is the
context or the text that is hard to draft.
Memory: real keys and values of 16 layers at 128k tokens, fed one round after the other, counted by storage.
"""

from __future__ import annotations

import statistics
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
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import hf_ddtree
from hf_ddtree import DFlashTreeCandidateGenerator, DraftContext, DraftTree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.target.preallocation import ROOM_DIVISOR, growing
from hf_ddtree.testing import SetAccuracyGenerator
from hf_ddtree.tree.build import build_tree

BUDGET = 16
# About the tokens per forward of the pair.
ACCURACY = 0.88
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


class SetAccuracyDrafter(DFlashTreeCandidateGenerator):
    """Pays for what its drafter drafts, and proposes drafts of a set accuracy instead.

    Args:
        drafter, model: The pair.
        text: Tokens that standard decoding writes after the prompt. Which of them are drafted right depends on `seed`
            alone.
        prompt_length: Tokens before it.
        seed: Of the drafts.
    """

    def __init__(self, drafter: Any, model: Any, text: Tensor, prompt_length: int, seed: int) -> None:
        super().__init__(drafter, model)
        self._prompt_length = prompt_length
        horizon, vocab_size = drafter.config.draft_length, model.config.vocab_size
        self._drafts = SetAccuracyGenerator(text, vocab_size, ACCURACY, horizon=horizon, seed=seed)

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        super().propose(context, budget)
        candidates = self._drafts.candidates(context.root_positions[0] + 1 - self._prompt_length)
        return [build_tree(*candidates, context.roots[0], budget)]


class Dictation(LogitsProcessor):
    """Makes the target write a given text after its prompt."""

    def __init__(self, text: Tensor, prompt_length: int) -> None:
        self._text = text
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._text[input_ids.shape[1] - self._prompt_length]
        return torch.full_like(scores, -torch.inf).index_fill_(1, token[None], 0.0)


class Context:
    """The pair, with prompts of one length and what standard decoding writes after them.

    Args:
        length: Of the prompts.
        count: Number of prompts.
        tokens: To generate.
    """

    def __init__(self, pair: tuple[Any, Any, Any], length: int, count: int, tokens: int) -> None:
        self.model, self.drafter, tokenizer = pair
        self.length, self.tokens = length, tokens
        self.prompts = prompts_of(tokenizer, length, count)
        self.texts = [
            self.model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0, length:]
            for prompt in self.prompts
        ]

    def measure(self, stopwatch: Stopwatch) -> list[dict[str, Any]]:
        """Standard decoding and trees on all prompts."""

        def run(method: str, index: int) -> tuple[dict[str, Any], list[list[int]]]:
            arguments: dict[str, Any] = {"generation_strategy": "ddtree", "tree_budget": BUDGET}
            if method == "plain":
                arguments = {}
            elif method == "tree":
                arguments["assistant_model"] = self.drafter
            else:
                text = self.texts[index]
                generator = SetAccuracyDrafter(self.drafter, self.model, text, self.length, index)
                arguments["candidate_generator"] = generator
            return stopwatch.run(self.prompts[index], self.tokens, **arguments)

        run("tree", 0)
        methods = "plain", "tree", "set accuracy"
        return alternate(methods, range(len(self.prompts)), run, f"context of {self.length}")

    def tokens_per_forward(self, texts: list[Tensor]) -> float:
        """Of trees, where the target writes one of the texts after each prompt."""
        lengths: list[int] = []
        for prompt, text in zip(self.prompts, texts):
            out = self.model.generate(
                **prompt,
                max_new_tokens=self.tokens,
                do_sample=False,
                return_dict_in_generate=True,
                assistant_model=self.drafter,
                generation_strategy="ddtree",
                tree_budget=BUDGET,
                logits_processor=LogitsProcessorList([Dictation(text, self.length)]),
            )
            lengths += out.ddtree_stats.accepted_lengths
        return round(statistics.mean(lengths), 3)


def measure(prompts: int, tokens: int, longest: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of time by context and method, of texts by context and by the context they are from; and all runs."""
    pair = hf_ddtree.load_demo()
    stopwatch = Stopwatch(pair[0], [pair[1]])
    times, contexts, runs = {}, {}, []
    for length in (length for length in CONTEXTS if length <= longest):
        is_compared = length in (SHORT, LONG)
        context = Context(pair, length, prompts if is_compared else min(FEWER, prompts), tokens)
        of_context = context.measure(stopwatch)
        times[str(length)] = summarise(of_context)
        runs += [{"context": length, **run} for run in of_context]
        if is_compared:
            contexts[str(length)] = context
    texts = {
        name: {origin: context.tokens_per_forward(other.texts) for origin, other in contexts.items()}
        for name, context in contexts.items()
    }
    return {"times": times, "texts": texts}, runs


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


def show(summary: dict[str, Any]) -> None:
    parts = "target", "drafter", "head", "outside"
    columns = "context", "method", "ms", *parts, "tokens/forward", "against plain", "a round in plain steps"
    table = Table(*columns)
    for context, methods in summary["times"].items():
        for method, figures in methods.items():
            times = figures["round_ms"]
            table.add_row(
                context,
                method,
                *(f"{times[part]:.2f}" for part in ("whole", *parts)),
                f"{figures['tokens_per_forward']:.2f}",
                f"{figures['against_plain'][1]:.2f}",
                f"{times['whole'] / methods['plain']['round_ms']['whole']:.2f}",
            )
    console = Console(width=120)
    console.print(table)
    for context, origins in summary["texts"].items():
        for origin, tokens in origins.items():
            console.print(f"after {context} tokens, texts written after {origin}: {tokens:.2f} tokens per forward")
    for name, entry in summary["memory"].items():
        console.print(f"{name}: steady {entry['steady'] / 1e6:.1f} MB, peak {entry['peak'] / 1e6:.1f} MB")


def main(
    prompts: Annotated[int, typer.Option(help="Prompts of 256 and of 8192 tokens; of other lengths 3.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    longest: Annotated[int, typer.Option(help="Longest context to measure.")] = max(CONTEXTS),
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "context.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Enough rounds for the room to be used up.
    rounds = CACHED // ROOM_DIVISOR // 5 + 8
    memory = {"stock": memory_of(concatenating, 8), "in place": memory_of(growing, rounds)}
    summary, runs = measure(prompts, tokens, longest)
    summary["memory"] = memory
    show(summary)
    save(output, summary, runs, tokens=tokens, accuracy=ACCURACY)
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
