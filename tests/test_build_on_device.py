"""Trees found by tensor operations are exactly those of `build_tree`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.build_on_device import search_trees
from hf_ddtree.tree.candidates import conditional_candidates
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.shape import TREE_SHAPES


def assert_same(found: list[DraftTree], expected: list[DraftTree]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.parents, other.parents)
        assert torch.equal(one.log_probs, other.log_probs)
        assert (one.token_ids.dtype, one.parents.dtype, one.log_probs.dtype) == (
            other.token_ids.dtype,
            other.parents.dtype,
            other.log_probs.dtype,
        )


def candidates(
    seed: int, shape: tuple[int, ...], coarse: bool, impossible: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities that descend and tokens that differ; coarse ones tie often, some are impossible."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 4, shape) / 2 if coarse else rng.exponential(1.0, shape)
    costs = np.where(rng.random(shape) < impossible, np.inf, costs)
    tokens = rng.random((*shape[:-1], 60)).argsort(axis=-1)[..., : shape[-1]]
    return torch.from_numpy(-np.sort(costs, axis=-1)).float(), torch.from_numpy(tokens)


sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "batch": st.integers(1, 3),
        "depth": st.integers(1, 9),
        "k": st.integers(1, 9),
        "budget": st.integers(1, 40),
        "shape": st.sampled_from(TREE_SHAPES),
        "coarse": st.booleans(),
        "impossible": st.sampled_from((0.0, 0.1, 0.7)),
    }
)


@settings(max_examples=300, deadline=None)
@given(sizes)
def test_marginal_trees(size):
    log_probs, token_ids = candidates(
        size["seed"], (size["batch"], size["depth"], size["k"]), size["coarse"], size["impossible"]
    )
    roots, options = list(range(size["batch"])), (size["budget"], size["shape"])
    found = search_trees(log_probs, token_ids, roots, *options)
    expected = [build_tree(*row, root, *options) for *row, root in zip(log_probs, token_ids, roots)]
    assert_same(found, expected)


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(1, 4), st.booleans())
def test_trees_of_candidates_with_states(size, num_states, same_everywhere):
    shape = (size["batch"], size["depth"], num_states, size["k"])
    log_probs, token_ids = candidates(size["seed"], shape, size["coarse"], size["impossible"])
    rng = np.random.default_rng(size["seed"])
    next_state = torch.from_numpy(rng.integers(0, num_states, shape[2:] if same_everywhere else shape))
    roots, options = list(range(size["batch"])), (size["budget"], size["shape"])
    found = search_trees(log_probs, token_ids, roots, *options, next_state=next_state)
    next_states = next_state.expand(shape)
    expected = [
        build_tree(*row, root, *options, next_state=state)
        for *row, state, root in zip(log_probs, token_ids, next_states, roots)
    ]
    assert_same(found, expected)


@pytest.mark.parametrize("shape", TREE_SHAPES)
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_trees_of_pair_scores(shape, budget):
    torch.manual_seed(budget)
    logits = torch.randn(2, 12, 500) * 3
    log_probs, token_ids = logits.log_softmax(-1).topk(16)
    candidates_given = conditional_candidates(log_probs, token_ids, torch.randn(2, 12, 16, 16))
    found = search_trees(*candidates_given[:2], [7, 8], budget, shape, next_state=candidates_given[2])
    expected = [
        build_tree(*row, root, budget, shape, next_state=state) for *row, state, root in zip(*candidates_given, [7, 8])
    ]
    assert_same(found, expected)
    assert max(map(len, found)) == (13 if shape == "chain" else budget + 1)


def test_arguments_are_checked():
    log_probs, token_ids = candidates(0, (1, 3, 4), False, 0.0)
    with pytest.raises(ValueError, match="budget"):
        search_trees(log_probs, token_ids, [0], 0)
    with pytest.raises(ValueError, match="shape"):
        search_trees(log_probs, token_ids, [0], 4, "bushy")
