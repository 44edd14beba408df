"""Trees from distributions that depend on the state of a prefix, against enumeration and a heap search."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.shape import TREE_SHAPES

pytestmark = pytest.mark.core

ROOT = 7


def sorted_candidates(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(depth, states, k)` and tokens as builders want them: every state has its own order."""
    log_probs, order = scores.sort(dim=-1, descending=True, stable=True)
    return log_probs, order + 100 * torch.arange(len(scores))[:, None, None]


def expected_tree(
    log_probs: Tensor, token_ids: Tensor, next_state: Tensor, budget: int, shape: str
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Prefixes and scores in the builder's order, from a list of all prefixes."""
    level = [(np.float32(0), (), 0, True)]
    ranked = []
    for step in range(len(log_probs)):
        children = []
        for place, (score, prefix, state, spine) in enumerate(level):
            for rank in range(log_probs.shape[2]):
                log_prob = np.float32(log_probs[step, state, rank])
                if log_prob > -np.inf:
                    longer = (*prefix, int(token_ids[step, state, rank]))
                    reached = int(next_state[step, state, rank])
                    children.append((score + log_prob, place, rank, longer, reached, spine and rank == 0))
        children.sort(key=lambda child: (-child[0], child[1], child[2]))
        level = [(score, prefix, state, spine) for score, _, _, prefix, state, spine in children]
        ranked += [(score, step, place, prefix, spine) for place, (score, prefix, _, spine) in enumerate(level)]
    ranked.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    spine = sorted((entry for entry in ranked if entry[4]), key=lambda entry: entry[1])
    if shape == "chain":
        ranked = spine
    elif shape == "spine_first":
        ranked = spine + [entry for entry in ranked if not entry[4]]
    chosen = sorted(ranked[:budget], key=lambda entry: (entry[1], -entry[0], entry[2]))
    return [entry[3] for entry in chosen], [float(entry[0]) for entry in chosen]


def heap_search(log_probs: Tensor, next_state: Tensor, budget: int) -> list[float]:
    """Scores of the best prefixes: pop the best, push its next sibling and its first child."""
    depth, _, width = log_probs.shape
    table, leads = log_probs.tolist(), next_state.tolist()
    tie = itertools.count()

    def entry(parent_score: float, step: int, state: int, rank: int) -> tuple[float, int, float, int, int, int]:
        score = float(np.float32(parent_score) + np.float32(table[step][state][rank]))
        return -score, next(tie), parent_score, step, state, rank

    heap, scores = [entry(0.0, 0, 0, 0)], []
    while heap and len(scores) < budget:
        cost, _, parent_score, step, state, rank = heapq.heappop(heap)
        scores.append(-cost)
        if rank + 1 < width:
            heapq.heappush(heap, entry(parent_score, step, state, rank + 1))
        if step + 1 < depth:
            heapq.heappush(heap, entry(-cost, step + 1, leads[step][state][rank], 0))
    return scores


def prefixes_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens_of(tree.path(node))[1:]) for node in range(1, len(tree))]


@st.composite
def search_problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Small problems, with ties, sure tokens and masked candidates in most of them."""
    depth, states, width = (draw(st.integers(1, most)) for most in (4, 3, 3))
    size = depth * states * width
    value = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.5, -torch.inf]) | st.floats(-8, 0, width=32)
    scores = torch.tensor(draw(st.lists(value, min_size=size, max_size=size)))
    log_probs, token_ids = sorted_candidates(scores.view(depth, states, width))
    leads = draw(st.lists(st.integers(0, states - 1), min_size=size, max_size=size))
    next_state = torch.tensor(leads).view(depth, states, width)
    return log_probs, token_ids, next_state, draw(st.integers(1, 40))


@pytest.mark.parametrize("shape", TREE_SHAPES)
@given(problem=search_problems())
@settings(deadline=None, max_examples=150)
def test_against_enumeration(shape: str, problem: tuple[Tensor, Tensor, Tensor, int]) -> None:
    log_probs, token_ids, next_state, budget = problem
    tree = build_tree(log_probs, token_ids, ROOT, budget, shape, next_state=next_state)
    DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
    prefixes, scores = expected_tree(log_probs, token_ids, next_state, budget, shape)
    assert tree.token_ids[0] == ROOT
    assert prefixes_of(tree) == prefixes
    assert tree.log_probs[1:].tolist() == scores


@pytest.mark.parametrize(("states", "width"), [(1, 20), (2, 100), (16, 16), (32, 8)])
@pytest.mark.parametrize("budget", [1, 2, 15, 64, 300])
def test_against_heap_search(budget: int, states: int, width: int) -> None:
    generator = torch.Generator().manual_seed(budget + states)
    for sharpness in (1.0, 3.0):
        logits = sharpness * torch.randn(10, states, width, generator=generator)
        log_probs, token_ids = sorted_candidates(logits.log_softmax(-1))
        next_state = torch.randint(states, (10, states, width), generator=generator)
        tree = build_tree(log_probs, token_ids, ROOT, budget, next_state=next_state)
        DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
        assert sorted(tree.log_probs[1:].tolist(), reverse=True) == heap_search(log_probs, next_state, budget)


@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_one_state_is_no_state(shape: str) -> None:
    logits = 3 * torch.randn(8, 1, 20, generator=torch.Generator().manual_seed(1))
    log_probs, token_ids = sorted_candidates(logits.log_softmax(-1))
    with_state = build_tree(log_probs, token_ids, ROOT, 40, shape, next_state=torch.zeros(1, 20, dtype=torch.int64))
    without = build_tree(log_probs[:, 0], token_ids[:, 0], ROOT, 40, shape)
    for part in ("token_ids", "parents", "log_probs"):
        assert torch.equal(getattr(with_state, part), getattr(without, part))


def test_the_spine_follows_the_best_candidate_after_the_one_before() -> None:
    """Of two first tokens the less probable one leads to the more probable pair."""
    log_probs = torch.tensor([[[0.5, 0.4], [0.5, 0.4]], [[0.3, 0.2], [0.9, 0.1]]]).log()
    token_ids = torch.tensor([[[1, 2], [1, 2]], [[3, 4], [5, 6]]])
    next_state = torch.tensor([[0, 1], [0, 1]])
    arguments = (log_probs, token_ids, ROOT)
    assert prefixes_of(build_tree(*arguments, 3, next_state=next_state)) == [(1,), (2,), (2, 5)]
    assert prefixes_of(build_tree(*arguments, 3, "spine_first", next_state=next_state)) == [(1,), (2,), (1, 3)]
    assert prefixes_of(build_tree(*arguments, 3, "chain", next_state=next_state)) == [(1,), (1, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_an_improbable_spine_is_kept_to_its_end(seed: int) -> None:
    """What follows the best first token is uncertain, so that best-first search would leave the spine early."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(5, 3, 4, generator=generator) * torch.tensor([0.2, 4.0, 4.0])[:, None]
    log_probs, token_ids = sorted_candidates(scores.log_softmax(-1))
    next_state = torch.randint(3, (5, 3, 4), generator=generator)
    next_state[:, 0, 0] = 0
    for budget in (5, 7, 12):
        tree = build_tree(log_probs, token_ids, ROOT, budget, "spine_first", next_state=next_state)
        DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
        prefixes, _ = expected_tree(log_probs, token_ids, next_state, budget, "spine_first")
        assert prefixes_of(tree) == prefixes
        assert tuple(token_ids[:, 0, 0].tolist()) in prefixes
