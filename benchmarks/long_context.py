"""What a tree's forward costs in forwards over one token, from short to long contexts.

    python benchmarks/long_context.py

Random models in float32, on one thread, whose query heads share key heads: with full attention in every layer, and
with a recurrent state in three layers of four. The cache is filled with random keys and values. Each tree is timed
with tree attention, with Transformers' attention function in its place, and in turn with a single token; their logits
are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from measure import RESULTS, rounded_quartiles, save
from random_models import NO_TOKENS, scale
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3_5TextConfig
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

from hf_ddtree.attention import attention_dispatch, dispatch
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.cache_rows import CommittedRows
from hf_ddtree.target.model import CachedModel
from hf_ddtree.target.preallocation import growing
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import top_candidates
from hf_ddtree.tree.draft_tree import DraftTree

CONTEXTS = 256, 4096, 8192, 32768
BUDGETS = 1, 16, 64
# Transformers' function copies the context for each query head, which takes seconds where it is long.
LONGEST_ORIGINAL = 8192
VOCAB_SIZE = 8000
TOLERANCE = 1e-3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}


def make_llama(num_heads: int, num_key_heads: int) -> PreTrainedModel:
    """Four layers of full attention with heads of 128."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_key_heads, "head_dim": 128}
    return scale(LlamaForCausalLM(LlamaConfig(**SIZES, **heads, num_hidden_layers=4)))


def make_hybrid() -> PreTrainedModel:
    """A Qwen3.5 of eight layers, two of them with full attention, 16 query heads and 4 key heads of 256."""
    config = Qwen3_5TextConfig(
        **SIZES,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    )
    return scale(Qwen3_5ForCausalLM(config))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama, 16 heads on 4": lambda: make_llama(16, 4),
    "Llama, 16 heads on 2": lambda: make_llama(16, 2),
    "Qwen3.5, 16 heads on 4": make_hybrid,
}


def make_tree(num_drafted: int) -> DraftTree:
    """A tree as random distributions of 16 depths give it."""
    logits = 4.0 * torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    return build_tree(*top_candidates(logits, num_drafted), 0, num_drafted)


def filled(model: PreTrainedModel, num_cached: int) -> CachedModel:
    """The model with a cache of random keys and values, and states that a short prompt leaves."""
    cache = DynamicCache(config=model.config)
    model(torch.arange(8)[None], use_cache=True, **{CACHE_KEY: cache})
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            shape = (*layer.keys.shape[:2], num_cached, layer.keys.shape[3])
            layer.keys, layer.values = (torch.randn(shape, generator=generator) for _ in range(2))
    arguments = {CACHE_KEY: cache, "position_ids": torch.arange(num_cached + 1)[None], "use_cache": True}
    return CachedModel(model, arguments, CommittedRows(num_cached, arguments, 1, torch.device("cpu")))


@contextmanager
def transformers_attention() -> Iterator[None]:
    """Leaves attention over a tree to the function of Transformers."""
    with mock.patch.object(attention_dispatch, "current_pass", lambda: None):
        yield


def seconds_and_logits(cached: CachedModel, tree: DraftTree) -> tuple[float, Tensor]:
    """Of one forward over the tree, no node of which is committed."""
    start = time.perf_counter()
    verification = cached.verify([tree])
    seconds = time.perf_counter() - start
    cached.commit(verification.tree_pass, [[]])
    return seconds, verification.logits


def seconds_of_token(cached: CachedModel) -> float:
    """Of standard decoding's forward over one token, which stays in the cache."""
    start = time.perf_counter()
    cached.step([DraftTree.root_only(1)])
    return time.perf_counter() - start


def compare(cached: CachedModel, num_drafted: int, repeats: int, with_original: bool) -> dict[str, Any]:
    """Times of a tree's forward and of a token's, in turn.

    Raises:
        SystemExit: If the two attentions disagree.
    """
    tree = make_tree(num_drafted)
    seconds: dict[str, list[float]] = {"token": [], "tree": [], "original": []}
    for repeat in range(repeats + 1):
        taken = {"token": seconds_of_token(cached)}
        taken["tree"], logits = seconds_and_logits(cached, tree)
        if with_original:
            with transformers_attention():
                taken["original"], expected = seconds_and_logits(cached, tree)
            if (error := float((logits - expected).abs().max())) > TOLERANCE:
                raise SystemExit(f"Logits differ by {error:.2g} at {num_drafted} nodes.")
        if repeat:  # the first one warms up
            for name, value in taken.items():
                seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items() if values}
    return {
        "nodes": num_drafted,
        **{
            f"{name}_ms": rounded_quartiles(1e3 * value for value in values)
            for name, values in seconds.items()
            if values
        },
        "tokens": round(median["tree"] / median["token"], 3),
        "faster": round(median["original"] / median["tree"], 3) if with_original else None,
    }


@torch.no_grad()
def main(
    repeats: Annotated[int, typer.Option(help="How often each is timed.")] = 3,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "long_context.json",
) -> None:
    table = Table(
        "model", "context", "nodes", "token, ms", "tree, ms", "Transformers' attention, ms", "tree in tokens"
    )
    runs = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        dispatch.install(model)
        for num_cached in CONTEXTS:
            cached = filled(model, num_cached)
            with cached.recording_past(), growing(cached.cache):
                for num_drafted in BUDGETS:
                    run = compare(cached, num_drafted, repeats, num_cached <= LONGEST_ORIGINAL)
                    runs.append({"model": name, "context": num_cached, **run})
                    times = (run.get(f"{which}_ms") for which in ("token", "tree", "original"))
                    cells = ("" if spread is None else f"{spread[1]:.1f}" for spread in times)
                    table.add_row(name, str(num_cached), str(num_drafted), *cells, f"{run['tokens']:.2f}")
    Console(width=120).print(table)
    save(output, {}, runs, repeats=repeats)


if __name__ == "__main__":
    typer.run(main)
