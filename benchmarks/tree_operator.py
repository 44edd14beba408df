"""The gated delta rule over a tree in one pass, against a loop that steps each node from its parent's state.

    python benchmarks/tree_operator.py

Random inputs in float32, a tree built from random distributions, one row. Timed is what a layer does in a round: the
outputs of all nodes, and the state after the path to the deepest node, which the loop has and the operator makes from
its factors. Both alternate; outputs and states are compared. Memory is what is kept of the nodes until the commit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from measure import RESULTS, rounded_quartiles, save
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_ddtree.attention.gated_delta_rule import tree_gated_delta_rule
from hf_ddtree.attention.path_state import PathFactors, TreePaths, advance_states
from hf_ddtree.attention.reference import delta_rule_step, over_nodes
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import top_candidates
from hf_ddtree.tree.draft_tree import DraftTree

NODES = 8, 16, 32, 64, 128
TOLERANCE = 1e-4


class Size(NamedTuple):
    """Of a layer: heads of queries and keys, heads of values, and what each head is wide."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


SIZES = {
    "the pair that ships": Size(4, 4, 32, 32),
    "16 heads of 128": Size(16, 16, 128, 128),
    "32 heads of 128, 16 of keys": Size(16, 32, 128, 128),
}


class Inputs(NamedTuple):
    """What a layer gives the rule, for a batch of one; see `tree_gated_delta_rule`."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


def make_inputs(size: Size, num_nodes: int) -> tuple[Inputs, Tensor]:
    """Random ones, and the state above the root `(1, heads, key_dim, value_dim)`."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, num_nodes, size.key_heads, size.key_dim).unbind()
    value = torch.randn(1, num_nodes, size.heads, size.value_dim)
    g, beta = torch.randn(2, 1, num_nodes, size.heads).unbind()
    inputs = Inputs(query, key, value, torch.nn.functional.logsigmoid(g + 2), beta.sigmoid())
    return inputs, torch.randn(1, size.heads, size.key_dim, size.value_dim)


def make_tree(num_drafted: int) -> DraftTree:
    """A tree as random distributions of 16 depths give it."""
    logits = 4.0 * torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    return build_tree(*top_candidates(logits, num_drafted), 0, num_drafted)


def by_node(inputs: Inputs, initial_state: Tensor, parents: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The recurrence as it is defined, one node after the other; the outputs `(1, n, heads, d_v)` and each node's
    state `(heads, d_k, d_v)`."""
    groups = inputs.value.shape[2] // inputs.key.shape[2]
    query, key = (
        torch.nn.functional.normalize(vectors[0], dim=-1).repeat_interleave(groups, dim=1)
        for vectors in (inputs.query, inputs.key)
    )
    value, g, beta = inputs.value[0], inputs.g[0, ..., None], inputs.beta[0]

    def step(node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule_step(state, query[node], key[node], value[node], g[node], beta[node])

    outputs, states = over_nodes(step, initial_state[0], parents)
    return outputs[None], states


def by_tree(inputs: Inputs, initial_state: Tensor, paths: TreePaths, path: Tensor) -> tuple[Tensor, PathFactors]:
    """The operator and the commit of a path, which changes `initial_state`."""
    outputs, factors = tree_gated_delta_rule(*inputs, paths, initial_state, use_qk_l2norm_in_kernel=True)
    advance_states([initial_state], [factors], path)
    return outputs, factors


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(size: Size, num_drafted: int, repeats: int) -> dict[str, Any]:
    """Times and bytes of both, and how far they are apart.

    Raises:
        SystemExit: If they disagree.
    """
    tree = make_tree(num_drafted)
    inputs, initial_state = make_inputs(size, len(tree))
    parents, paths = tree.parents.tolist(), TreePaths.of(tree.ancestor_mask[None])
    deepest = int(tree.depths.argmax())
    path = torch.tensor([tree.path(deepest)])
    expected, states = by_node(inputs, initial_state, parents)
    committed = initial_state.clone()
    outputs, factors = by_tree(inputs, committed, paths, path)
    error = max(float((outputs - expected).abs().max()), float((committed[0] - states[deepest]).abs().max()))
    if error > TOLERANCE:
        raise SystemExit(f"Operator and loop differ by {error:.2g} at {size} and {num_drafted} nodes.")
    # The state shrinks with every commit, which costs no other time.
    loop, operator = [], []
    for _ in range(repeats):
        loop.append(seconds_of(lambda: by_node(inputs, initial_state, parents)))
        operator.append(seconds_of(lambda: by_tree(inputs, committed, paths, path)))
    return {
        "nodes": num_drafted,
        "depth": int(tree.depths.max()),
        "error": error,
        "loop_ms": rounded_quartiles(1e3 * value for value in loop),
        "operator_ms": rounded_quartiles(1e3 * value for value in operator),
        "times": round(statistics.median(loop) / statistics.median(operator), 2),
        "loop_bytes": sum(state.nbytes for state in states),
        "operator_bytes": sum(part.nbytes for part in vars(factors).values()),
    }


@torch.no_grad()
def main(
    repeats: Annotated[int, typer.Option(help="How often each is timed.")] = 30,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "tree_operator.json",
) -> None:
    table = Table("layer", "nodes", "depth", "loop ms", "operator ms", "times", "loop MB", "operator MB", "error")
    runs = []
    for name, size in SIZES.items():
        compare(size, NODES[0], 3)
        for num_drafted in NODES:
            run = {"layer": name, **compare(size, num_drafted, repeats)}
            runs.append(run)
            table.add_row(
                name,
                str(num_drafted),
                str(run["depth"]),
                *(f"{run[f'{which}_ms'][1]:.3f}" for which in ("loop", "operator")),
                f"{run['times']:.1f}",
                *(f"{run[f'{which}_bytes'] / 1e6:.2f}" for which in ("loop", "operator")),
                f"{run['error']:.1g}",
            )
    Console(width=120).print(table)
    save(output, {}, runs, repeats=repeats)


if __name__ == "__main__":
    typer.run(main)
