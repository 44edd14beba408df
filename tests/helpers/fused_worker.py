"""The kernels of `hf_ddtree.attention.fused`, run by Triton's interpreter on the CPU; prints what was compared.

A process of its own: Triton decides when it is imported whether it interprets or compiles.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from test_tree_attention import Decoding, check_round, random_tokens  # noqa: E402

from helpers.families import VOCAB_SIZE, make_model  # noqa: E402
from helpers.random_trees import SHAPES, random_path, random_tree  # noqa: E402
from hf_ddtree.attention import fused  # noqa: E402
from hf_ddtree.attention.causal_conv import ancestor_windows, tree_causal_conv  # noqa: E402
from hf_ddtree.attention.gated_delta_rule import tree_gated_delta_rule  # noqa: E402
from hf_ddtree.attention.path_state import TreePaths, advance_states  # noqa: E402
from hf_ddtree.attention.reference import delta_rule_step, over_nodes  # noqa: E402
from hf_ddtree.target.past_recording import recording_past  # noqa: E402
from hf_ddtree.tree.tree_batch import TreeBatch  # noqa: E402

CPU = torch.device("cpu")


class Always(dict):
    """Verdicts that a kernel is right, before it has run."""

    def __contains__(self, form: object) -> bool:
        return True

    def __missing__(self, form: object) -> bool:
        return True


def trees_of(rng: random.Random, rows: int, num_nodes: int) -> list:
    """Of at most `num_nodes`."""
    sizes = [num_nodes] + [rng.randint(1, num_nodes) for _ in range(rows - 1)]
    return [random_tree(rng, rng.choice(list(SHAPES)), 1, VOCAB_SIZE, size) for size in sizes]


def compare_gated_delta(seed: int, num_nodes: int, key_heads: int, groups: int, key_dim: int, value_dim: int) -> None:
    """Outputs of every node and the state behind a path, against the recurrence node by node."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, heads = 1 + seed % 2, key_heads * groups
    trees = trees_of(rng, rows, num_nodes)
    # As models pass them: views of one projection.
    query_key = torch.randn((rows, num_nodes, 2 * key_heads * key_dim + 3), generator=generator)
    query, key = (
        query_key[..., part * key_heads * key_dim :][..., : key_heads * key_dim].unflatten(-1, (key_heads, key_dim))
        for part in (0, 1)
    )
    value = torch.randn((rows, num_nodes, heads, value_dim), generator=generator)
    g = -torch.rand((rows, num_nodes, heads), generator=generator) * (200.0 if seed % 3 == 0 else 2.0)
    beta = torch.rand((rows, num_nodes, heads), generator=generator)
    state = torch.randn((rows, heads, key_dim, value_dim), generator=generator)
    paths = TreePaths.of(TreeBatch.from_trees(trees, CPU, num_nodes).ancestor_mask)
    is_normalised = seed % 4 != 1
    if not is_normalised:
        query, key = query / 8, key / 8
    output, factors = tree_gated_delta_rule(query, key, value, g, beta, paths, state, is_normalised)
    for row, tree in enumerate(trees):
        of_heads = [part[row].repeat_interleave(groups, dim=1) for part in (query, key)]
        if is_normalised:
            of_heads = [part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in of_heads]
        queries, keys = of_heads

        def step(node: int, state: torch.Tensor, row=row, queries=queries, keys=keys):
            return delta_rule_step(
                state, queries[node], keys[node], value[row, node], g[row, node, :, None], beta[row, node]
            )

        expected, states = over_nodes(step, state[row], tree.parents.tolist())
        torch.testing.assert_close(output[row, : len(tree)], expected, atol=2e-5, rtol=1e-5)
        path = random_path(rng, tree)
        advanced = state[row : row + 1].clone()
        of_row = type(factors)(*(part[row : row + 1] for part in vars(factors).values()))
        advance_states([advanced], [of_row], torch.tensor([path]))
        torch.testing.assert_close(advanced[0], states[path[-1]], atol=2e-5, rtol=1e-5)


def compare_convolution(seed: int, dtype: torch.dtype) -> None:
    """With and without bias and activation, against PyTorch's operations."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, channels, size, num_nodes, cached = 1 + seed % 2, 300, 2 + seed % 3, 9, 5
    windows = ancestor_windows(TreeBatch.from_trees(trees_of(rng, rows, num_nodes), CPU, num_nodes), size, cached)
    inputs = torch.randn((rows, cached + num_nodes, channels), generator=generator).to(dtype).transpose(1, 2)
    weight = torch.randn((channels, size), generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if seed % 2 else None
    for activation in (None, torch.nn.SiLU()):
        fused._is_right, kept = {}, fused._is_right
        expected = tree_causal_conv(inputs, weight, windows, bias, activation)  # compares by itself as well
        assert all(fused._is_right.values()) and fused._is_right, fused._is_right
        fused._is_right = kept
        actual = tree_causal_conv(inputs, weight, windows, bias, activation)
        assert actual.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # the interpreter truncates where a GPU rounds
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def main() -> None:
    fused.can_run = lambda device: True
    fused._is_right = Always()
    shapes = [(1, 1, 1, 16, 16), (2, 2, 2, 24, 20), (17, 1, 2, 32, 40), (33, 2, 1, 40, 16), (65, 1, 2, 16, 33)]
    for seed, shape in enumerate([*shapes, *shapes[1:3]]):
        compare_gated_delta(seed, *shape)
    print("the gated delta rule is right")
    for seed in range(4):
        compare_convolution(seed, (torch.float32, torch.bfloat16)[seed // 2])
    print("the convolution is right")
    rng = random.Random(0)
    for family in ("qwen3_5", "qwen3_next"):
        model = make_model(family, "sdpa")
        for length, shape, padding in ((1, "deep", None), (13, "bushy", None), (12, "deep", 5)):
            check_round(model, rng, length, shape, padding)
        decoding = Decoding(model, [random_tokens(rng, 3)])
        with recording_past(decoding.cache):
            for _ in range(8):
                tree = random_tree(rng, "bushy", rng.randrange(VOCAB_SIZE), VOCAB_SIZE, 9)
                decoding.verify([tree])
                decoding.commit([random_path(rng, tree)])
        expected = model(torch.tensor([[*decoding.committed[0], 7]])).logits[:, -1]
        torch.testing.assert_close(decoding.next_logits([[7]])[:, -1], expected, atol=1e-4, rtol=1e-4)
    print("models are right")


if __name__ == "__main__":
    main()
