"""How long it takes to get from a drafter's logits to a token tree and its ancestor mask, on the CPU.

Run it with `OMP_NUM_THREADS=1 python benchmarks/tree_building.py`. The logits are random; the larger their scale, the
sharper the distributions and the deeper the trees. The second table is of trees whose distributions depend on a state:
two states, as of calibrated trees, or one for each candidate, as of conditional ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hf_ddtree.draft_tree import DraftTree, build_tree, top_candidates

VOCABULARY = 512
REPEATS = 300


def milliseconds(call: Callable[..., object], *args: object) -> str:
    """Median and spread of the time that `call(*args)` takes."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call(*args)
        times.append(1e3 * (time.perf_counter() - start))
    low, median, high = np.percentile(times, (10, 50, 90))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def ancestor_mask_of(tree: DraftTree) -> torch.Tensor:
    """Builds the mask anew; a tree keeps the one it has built."""
    vars(tree).pop("ancestor_mask", None)
    vars(tree).pop("is_chain", None)
    return tree.ancestor_mask


def time_states(generator: torch.Generator) -> Table:
    """Trees whose distributions depend on a state."""
    table = Table(title="With states, milliseconds, median (10th to 90th percentile)")
    for column in ("budget", "depth", "states", "top-k", "scale", "deepest", "build"):
        table.add_column(column, justify="right")
    sizes = ((16, 12, 2, 16), (64, 12, 2, 64), (1024, 16, 2, 64), (16, 12, 16, 16), (64, 12, 16, 16), (64, 12, 32, 32))
    for budget, depth, states, top_k in (*sizes, (1024, 16, 32, 32)):
        for scale in (2.0, 6.0):
            logits = scale * torch.randn(depth, states, VOCABULARY, generator=generator)
            log_probs, token_ids = top_candidates(logits, top_k)
            next_state = torch.randint(states, log_probs.shape, generator=generator)
            arguments = (log_probs, token_ids, 0, budget, "best_first", None, False, next_state)
            deepest = int(build_tree(*arguments).depths.max())
            cells = (budget, depth, states, top_k, f"{scale:g}", deepest, milliseconds(build_tree, *arguments))
            table.add_row(*map(str, cells))
    return table


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    table = Table(title="Milliseconds, median (10th to 90th percentile)")
    for column in ("budget", "depth", "top-k", "scale", "shape", "deepest", "candidates", "build", "mask"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for budget, depth, top_k in ((16, 12, 16), (64, 12, 16), (64, 16, 64), (256, 16, 64), (1024, 16, 64)):
        for scale in (2.0, 6.0):
            logits = scale * torch.randn(depth, VOCABULARY, generator=generator)
            log_probs, token_ids = top_candidates(logits, top_k)
            for shape in ("best_first", "spine_first"):
                tree = build_tree(log_probs, token_ids, 0, budget, shape)
                table.add_row(
                    str(budget),
                    str(depth),
                    str(top_k),
                    f"{scale:g}",
                    shape,
                    str(int(tree.depths.max())),
                    milliseconds(top_candidates, logits, top_k),
                    milliseconds(build_tree, log_probs, token_ids, 0, budget, shape, None, False),
                    milliseconds(ancestor_mask_of, tree),
                )
    Console().print(table)
    Console().print(time_states(generator))


if __name__ == "__main__":
    main()
