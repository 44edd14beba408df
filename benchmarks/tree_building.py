"""How long it takes to get from a drafter's logits to a token tree and its ancestor mask, on one core.

    python benchmarks/tree_building.py

The logits are random; the larger their scale, the sharper the distributions and the deeper the trees. Distributions
of calibrated trees have two states, those of conditional ones a state for each candidate. Calibration costs what it
takes to learn from a round and to correct the next one's probabilities.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure import RESULTS, rounded_quartiles, save
from rich.console import Console
from rich.table import Table

from hf_ddtree.drafters.calibration import Calibration
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import best_tokens, conditional_candidates, top_candidates
from hf_ddtree.tree.draft_tree import DraftTree

VOCABULARY = 512
SCALES = 2.0, 6.0
# Nodes, depth and candidates.
MARGINAL = (16, 12, 16), (64, 12, 16), (64, 16, 64), (256, 16, 64), (1024, 16, 64)
CALIBRATED = (16, 12, 16), (64, 12, 64), (1024, 16, 64)
CONDITIONAL = (16, 11, 16), (16, 11, 32), (64, 11, 32), (1024, 16, 32)


def ancestor_mask_of(tree: DraftTree) -> torch.Tensor:
    """Builds the mask anew; a tree keeps the one it has built."""
    for name in ("ancestor_mask", "is_chain", "_parent_list"):
        vars(tree).pop(name, None)
    return tree.ancestor_mask


class Timer:
    """Times calls.

    Args:
        repeats: How often each.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def __call__(self, call: Callable[..., object], *args: object) -> list[float]:
        """Quartiles of the milliseconds that `call(*args)` takes."""
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            call(*args)
            times.append(1e3 * (time.perf_counter() - start))
        return rounded_quartiles(times)


def marginal(timer: Timer, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    for nodes, depth, top_k in MARGINAL:
        for scale in SCALES:
            logits = scale * torch.randn(depth, VOCABULARY, generator=generator)
            candidates = top_candidates(logits, top_k)
            for shape in ("best_first", "spine_first"):
                arguments = (*candidates, 0, nodes, shape)
                yield figures(timer, arguments, f"marginal, {shape}", nodes, depth, top_k, scale) | {
                    "candidates": timer(top_candidates, logits, top_k)
                }


def calibrated(timer: Timer, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    for nodes, depth, top_k in CALIBRATED:
        for scale in SCALES:
            log_probs, token_ids = top_candidates(scale * torch.randn(depth, VOCABULARY, generator=generator), top_k)
            calibration, emitted = Calibration(), token_ids[:, 0].tolist()

            def round_of() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                calibration.learn(log_probs, token_ids, emitted)  # noqa: B023
                return calibration.calibrate(log_probs, token_ids)  # noqa: B023

            probs, tokens, next_state = round_of()
            arguments = (probs, tokens, 0, nodes, "best_first", next_state)
            yield figures(timer, arguments, "calibrated", nodes, depth, top_k, scale) | {
                "calibration": timer(round_of)
            }


def conditional(timer: Timer, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    for nodes, depth, top_k in CONDITIONAL:
        for scale in SCALES:
            best = best_tokens(scale * torch.randn(depth, VOCABULARY, generator=generator), top_k)
            scores = torch.randn(depth, top_k, top_k, generator=generator)
            probs, tokens, next_state = conditional_candidates(*best, scores)
            arguments = (probs, tokens, 0, nodes, "best_first", next_state)
            yield figures(timer, arguments, "conditional", nodes, depth, top_k, scale) | {
                "candidates": timer(conditional_candidates, *best, scores)
            }


def figures(
    timer: Timer, arguments: tuple[Any, ...], what: str, nodes: int, depth: int, top_k: int, scale: float
) -> dict[str, Any]:
    *of_marginals, last = arguments
    states = {"next_state": last} if isinstance(last, torch.Tensor) else {}
    build = functools.partial(build_tree, *(of_marginals if states else arguments), **states)
    tree = build()
    about = {"what": what, "nodes": nodes, "depth": depth, "top_k": top_k, "scale": scale}
    about["deepest"] = int(tree.depths.max())
    return about | {"build": timer(build), "mask": timer(ancestor_mask_of, tree)}


def main(
    repeats: Annotated[int, typer.Option(help="How often each is timed.")] = 300,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "tree_building.json",
) -> None:
    torch.set_num_threads(1)
    generator, timer = torch.Generator().manual_seed(0), Timer(repeats)
    runs = [run for kind in (marginal, calibrated, conditional) for run in kind(timer, generator)]
    columns = "what", "nodes", "depth", "top_k", "scale", "deepest", "candidates", "calibration", "build", "mask"
    table = Table(*columns, title="Milliseconds, medians")
    for run in runs:
        values = (run.get(column, "") for column in columns)
        table.add_row(*(f"{value[1]:.3f}" if isinstance(value, list) else str(value) for value in values))
    Console(width=110).print(table)
    save(output, {}, runs, repeats=repeats)


if __name__ == "__main__":
    typer.run(main)
