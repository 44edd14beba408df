"""Time of a round next to loops that do nothing else: DDTree's by its paper, and z-lab's chain (`dflash` 0.1.0).

    pip install --no-deps dflash==0.1.0
    python benchmarks/reference.py

A tiny random Qwen3 and a random DFlash drafter of z-lab's layout, one row, one thread, greedy; what forwards cost is
small, so that what goes around them shows. The loop by the paper (DDTree, arXiv:2604.12989) drafts with z-lab's
drafter, builds the tree with a heap, verifies it under a mask, walks it and picks the accepted path's keys; it knows
no other arguments, caches or models. Trees and tokens are compared in every call, methods alternate. Both loops run in
PyTorch's inference mode. `generate()` does not by itself, as its outputs may be used where gradients are taken, so
it is also called in that mode, as a caller may who takes none.

What goes around the forwards is the time of a call without that of the same forwards alone, over its rounds: the
drafter's with its head and the target's, over as many nodes after as many tokens, with masks that are there already.
"""

from __future__ import annotations

import heapq
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure import RESULTS, rounded_quartiles, save
from random_models import NO_TOKENS, scale
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_ddtree.drafters import DFlashDraftModel
from hf_ddtree.drafters.checkpoint import Checkpoint
from hf_ddtree.drafters.dflash.checkpoint import read_dflash_config
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register

BLOCK = 9
BUDGET = 16
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def make_models() -> tuple[PreTrainedModel, Any, DFlashDraftModel]:
    """The target; z-lab's drafter; ours with the same weights."""
    from dflash.model import DFlashDraftModel as Reference

    torch.manual_seed(0)
    target = scale(Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=4, tie_word_embeddings=False, **NO_TOKENS)))
    dflash = {"mask_token_id": 511, "target_layer_ids": [0, 2]}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_hidden_layers": 2,
    }
    config |= {
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "attention_bias": False,
        "dflash_config": dflash,
        **SIZES,
    }
    theirs = scale(Reference(Qwen3Config(**config)))
    ours = DFlashDraftModel(read_dflash_config(Checkpoint("random", raw_config=config))).eval()
    ours.load_state_dict(theirs.state_dict())
    return target, theirs, ours


def best_first(log_probs: Tensor, token_ids: Tensor, root: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the `BUDGET` most probable prefixes, from `(depth, k)` candidates."""
    costs, candidates = (-log_probs).tolist(), token_ids.tolist()
    tokens, parents, depths, path_costs = [root], [-1], [0], [0.0]
    heap = [(costs[0][0], 0, 0)]
    while heap and len(tokens) <= BUDGET:
        cost, parent, rank = heapq.heappop(heap)
        depth, node = depths[parent], len(tokens)
        tokens.append(candidates[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        path_costs.append(cost)
        if rank + 1 < len(costs[depth]):
            heapq.heappush(heap, (path_costs[parent] + costs[depth][rank + 1], parent, rank + 1))
        if depth + 1 < len(costs):
            heapq.heappush(heap, (cost + costs[depth + 1][0], node, 0))
    return tokens, parents, depths


@torch.inference_mode()
def by_the_paper(target: Any, drafter: Any, prompt: Tensor, new_tokens: int) -> tuple[list[int], list[int], Any]:
    """Emitted tokens, how many each round emitted, and the tokens of each round's tree as paths from its root."""
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache(config=drafter.config)
    outputs = target(prompt, use_cache=True, output_hidden_states=True, **{CACHE_KEY: cache})
    emitted, rounds, trees = [int(outputs.logits[0, -1].argmax())], [], []
    features = torch.cat([outputs.hidden_states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)
    start, block = prompt.shape[1], torch.full((1, BLOCK), drafter.mask_token_id)
    while len(emitted) < new_tokens:
        block[0, 0] = emitted[-1]
        drafted = drafter(
            target_hidden=features,
            noise_embedding=target.model.embed_tokens(block),
            position_ids=torch.arange(start - features.shape[1], start + BLOCK)[None],
            past_key_values=draft_cache,
            use_cache=True,
        )
        draft_cache.crop(start - draft_cache.get_seq_length())
        logits = target.lm_head(drafted[0, 1:])
        tokens, parents, depths = best_first(*logits.log_softmax(-1).topk(BUDGET), emitted[-1])
        visible = torch.ones((len(tokens), start + len(tokens)), dtype=torch.bool)
        visible[:, start:] = False
        for node, parent in enumerate(parents):
            if parent >= 0:
                visible[node] = visible[parent]
            visible[node, start + node] = True
        outputs = target(
            torch.tensor([tokens]),
            attention_mask=visible[None, None],
            position_ids=torch.tensor([depths]) + start,
            use_cache=True,
            output_hidden_states=True,
            **{CACHE_KEY: cache},
        )
        chosen, children = outputs.logits[0].argmax(-1).tolist(), dict(zip(zip(parents, tokens), range(len(tokens))))
        path = [0]
        while (child := children.get((path[-1], chosen[path[-1]]))) is not None and child > 0:
            path.append(child)
        emitted += [chosen[node] for node in path]
        kept = torch.tensor([*range(start), *(start + node for node in path)])
        if path == list(range(len(path))):
            cache.crop(len(path) - len(tokens))
        else:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.index_select(2, kept), layer.values.index_select(2, kept)
        hidden = [outputs.hidden_states[layer + 1][:, path] for layer in drafter.target_layer_ids]
        features, start = torch.cat(hidden, dim=-1), start + len(path)
        rounds.append(len(path))
        trees.append(sorted(zip(depths, tokens)))
    return emitted[:new_tokens], rounds, trees


@torch.no_grad()
def forwards_alone(target: Any, drafter: Any, prompt: Tensor, rounds: list[int], nodes: int, is_tree: bool) -> float:
    """Seconds of the forwards of rounds that emit so many tokens each, with trees of so many nodes or chains."""
    caches = DynamicCache(config=target.config), DynamicCache(config=drafter.config)
    width = drafter.config.hidden_size * len(drafter.target_layer_ids)
    start, num_new, seconds = prompt.shape[1], prompt.shape[1], 0.0
    target(prompt, use_cache=True, **{CACHE_KEY: caches[0]})
    block, tokens = torch.zeros((1, BLOCK), dtype=torch.long), torch.zeros((1, nodes), dtype=torch.long)
    for length in rounds:
        features = torch.zeros((1, num_new, width))
        mask = torch.ones((1, 1, nodes, start + nodes), dtype=torch.bool).tril(start) if is_tree else None
        positions = torch.arange(start, start + nodes)[None], torch.arange(start - num_new, start + BLOCK)[None]
        begin = time.perf_counter()
        drafted = drafter(
            target_hidden=features,
            noise_embedding=target.model.embed_tokens(block),
            position_ids=positions[1],
            past_key_values=caches[1],
            use_cache=True,
        )
        target.lm_head(drafted[:, 1:])
        target(tokens, attention_mask=mask, position_ids=positions[0], use_cache=True, **{CACHE_KEY: caches[0]})
        seconds += time.perf_counter() - begin
        start, num_new = start + length, length
        caches[1].crop(start - length - caches[1].get_seq_length())
        caches[0].crop(start - caches[0].get_seq_length())
    return seconds


def ours(
    target: Any, drafter: Any, prompt: Tensor, new_tokens: int, strategy: str
) -> tuple[list[int], list[int], Any]:
    """The same of `generate()` with the drafter."""
    # A fixed one: "auto", the default of a chain, would soon draft nothing with a random drafter.
    budget = {"tree_budget": BUDGET if strategy == "ddtree" else BLOCK - 1, "calibrate": False}
    output = target.generate(
        prompt,
        max_new_tokens=new_tokens,
        do_sample=False,
        generation_strategy=strategy,
        assistant_model=drafter,
        return_dict_in_generate=True,
        return_trees=strategy == "ddtree",
        **budget,
    )
    stats = output.ddtree_stats
    trees = [sorted(zip(tree.depths.tolist(), tree.token_ids.tolist())) for [tree] in stats.trees or []]
    return output.sequences[0, prompt.shape[1] :].tolist(), stats.accepted_lengths, trees


@torch.inference_mode()
def ours_in_inference_mode(*arguments: Any) -> tuple[list[int], list[int], Any]:
    """The same as `ours`, by a caller who takes no gradients."""
    return ours(*arguments)


def z_lab(target: Any, drafter: Any, prompt: Tensor, new_tokens: int) -> tuple[list[int], list[int], Any]:
    """The same of z-lab's loop, whose trees are chains."""
    from dflash.model import dflash_generate

    start = prompt.shape[1]
    tokens = dflash_generate(drafter, target, prompt, new_tokens, None)
    return tokens[0, start : start + new_tokens].tolist(), [], []


def main(
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens of each output.")] = 128,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "reference.json",
) -> None:
    torch.set_num_threads(1)
    register()
    target, theirs, drafter = make_models()
    methods: dict[str, Any] = {
        "DDTree's loop": lambda prompt: by_the_paper(target, theirs, prompt, tokens),
        "tree of 16": lambda prompt: ours(target, drafter, prompt, tokens, "ddtree"),
        "z-lab's chain": lambda prompt: z_lab(target, theirs, prompt, tokens),
        'chain (`"dflash"`)': lambda prompt: ours(target, drafter, prompt, tokens, "dflash"),
        **{
            f"{name}, in inference mode": lambda prompt, strategy=strategy: ours_in_inference_mode(
                target, drafter, prompt, tokens, strategy
            )
            for name, strategy in (("tree of 16", "ddtree"), ('chain (`"dflash"`)', "dflash"))
        },
    }
    alone: dict[str, Any] = {
        name: lambda prompt, rounds, is_tree=is_tree: forwards_alone(
            target, theirs, prompt, rounds, 1 + BUDGET if is_tree else BLOCK, is_tree
        )
        for name, is_tree in (("tree of 16", True), ('chain (`"dflash"`)', False))
    }
    runs = []
    for number in range(-1, prompts):
        prompt = torch.randint(0, 500, (1, 32), generator=torch.Generator().manual_seed(number + 1))
        expected = target.generate(prompt, max_new_tokens=tokens, do_sample=False)[0, 32:].tolist()
        found, seconds, around = {}, {}, {}
        shift = number % len(methods)
        for name in [*list(methods)[shift:], *list(methods)[:shift]]:
            start = time.perf_counter()
            found[name] = methods[name](prompt)
            seconds[name] = time.perf_counter() - start
            if name in alone:
                around[name] = seconds[name] - alone[name](prompt, found[name][1])
            if found[name][0] != expected:
                raise SystemExit(f"{name} gave other tokens than standard decoding.")
        reference, tree = found["DDTree's loop"], found["tree of 16"]
        # The last round is cut to the tokens that may still be emitted.
        if reference[2][:-BLOCK] != tree[2][: len(reference[2]) - BLOCK]:
            raise SystemExit("The trees differ.")
        if number >= 0:  # the first one warms up
            runs += [{"prompt": number, "method": name, "seconds": value} for name, value in seconds.items()]
            for run in runs[-len(methods) :]:
                if run["method"] in around:
                    run["around_ms"] = 1e3 * around[run["method"]] / len(found[run["method"]][1])
    times = {name: [run["seconds"] for run in runs if run["method"] == name] for name in methods}
    table = Table("method", "ms per call", "against its reference", "ms per round around the forwards")
    summary = {}
    references = {"tree of 16": "DDTree's loop", 'chain (`"dflash"`)': "z-lab's chain"}
    for name, values in times.items():
        reference_times = times[references.get(name.partition(",")[0], name)]
        ratios = [one / other for one, other in zip(values, reference_times)]
        summary[name] = {"ms": rounded_quartiles(1e3 * value for value in values), "ratio": rounded_quartiles(ratios)}
        row = [name, f"{1e3 * statistics.median(values):.1f}", f"{statistics.median(ratios):.2f}", ""]
        of_rounds = [run["around_ms"] for run in runs if run["method"] == name and "around_ms" in run]
        if of_rounds:
            summary[name]["around_ms"] = rounded_quartiles(of_rounds)
            row[-1] = f"{statistics.median(of_rounds):.2f}"
        table.add_row(*row)
    Console(width=120).print(table)
    save(output, summary, runs, prompts=prompts, tokens=tokens)


if __name__ == "__main__":
    typer.run(main)
