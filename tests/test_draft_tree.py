"""Token trees and their builders, against enumeration and against an independent heap search."""

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import top_candidates
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.shape import TREE_SHAPES

pytestmark = pytest.mark.core

ROOT = 7


# --- helpers -------------------------------------------------------------------------------------------------------


def small_tree():
    #        0
    #      1   2
    #     3 4  5
    #          6
    return DraftTree.from_parents(
        [10, 11, 12, 11, 12, 11, 14],
        [-1, 0, 0, 1, 1, 2, 5],
        [0.0, -0.5, -1.0, -1.5, -2.0, -1.25, -1.25],
    )


def prefix_of(tree, node):
    return tuple(tree.tokens_of(tree.path(node))[1:])


def prefixes_of(tree):
    return [prefix_of(tree, node) for node in range(1, len(tree))]


def random_parents(generator, size):
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, size)]


def candidates_from(scores):
    """Log-probabilities and tokens from any scores, sorted as builders want them; tokens differ between depths."""
    log_probs, order = scores.sort(dim=-1, descending=True, stable=True)
    return log_probs, order + 100 * torch.arange(len(scores))[:, None]


def enumerate_prefixes(log_probs, token_ids, depth):
    """All prefixes with probability above zero as (score, depth, prefix, on spine), best first, ties by definition."""
    found = []
    level = [(np.float32(0), (), True)]
    for step in range(depth):
        children = [
            (score + np.float32(log_probs[step, rank]), place, rank, (*prefix, int(token_ids[step, rank])), spine)
            for place, (score, prefix, spine) in enumerate(level)
            for rank in range(log_probs.shape[1])
            if log_probs[step, rank] > -torch.inf
        ]
        children.sort(key=lambda child: (-child[0], child[1], child[2]))
        level = [(score, prefix, spine and rank == 0) for score, _, rank, prefix, spine in children]
        found += [(score, step + 1, place, prefix, spine) for place, (score, prefix, spine) in enumerate(level)]
    return sorted(found, key=lambda entry: (-entry[0], entry[1], entry[2]))


def expected_prefixes(log_probs, token_ids, budget, shape):
    """What a builder must give, in its order: by depth, then by falling probability."""
    depth = len(log_probs)
    ranked = enumerate_prefixes(log_probs, token_ids, depth)
    spine = [entry for entry in ranked if entry[4]]
    if shape == "chain":
        ranked = spine
    elif shape == "spine_first":
        ranked = sorted(spine, key=lambda entry: entry[1]) + [entry for entry in ranked if not entry[4]]
    chosen = sorted(ranked[:budget], key=lambda entry: (entry[1], entry[2]))
    return [entry[3] for entry in chosen], [float(entry[0]) for entry in chosen]


def heap_search(log_probs, budget):
    """Scores of the best prefixes, found by the paper's heap of next siblings and first children."""
    depth, width = log_probs.shape
    table = log_probs.numpy()
    counter = itertools.count()
    heap = [(-table[0, 0], next(counter), np.float32(0), 0, 0)]
    scores = []
    while heap and len(scores) < budget:
        cost, _, parent_score, step, rank = heapq.heappop(heap)
        scores.append(-cost)
        if rank + 1 < width:
            heapq.heappush(
                heap, (-(parent_score + table[step, rank + 1]), next(counter), parent_score, step, rank + 1)
            )
        if step + 1 < depth:
            heapq.heappush(heap, (cost - table[step + 1, 0], next(counter), -cost, step + 1, 0))
    return scores


# --- the tree ------------------------------------------------------------------------------------------------------


def test_parts_of_a_tree():
    tree = small_tree()
    assert len(tree) == 7
    assert tree.num_drafted == 6
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.token_ids.dtype == tree.parents.dtype == tree.depths.dtype == torch.int64
    assert tree.log_probs.dtype == torch.float32
    assert tree.ancestor_mask.dtype == torch.bool
    assert not tree.is_chain
    assert repr(tree) == "DraftTree(num_drafted=6, depth=3)"


def test_walking_down():
    tree = small_tree()
    assert tree.children(0) == [1, 2]
    assert tree.children(1) == [3, 4]
    assert tree.children(6) == []
    assert tree.child_with_token(0, 12) == 2
    assert tree.child_with_token(2, 11) == 5
    assert tree.child_with_token(2, 12) is None
    assert tree.child_with_token(6, 14) is None


def test_walking_up():
    tree = small_tree()
    assert tree.path(0) == [0]
    assert tree.path(6) == [0, 2, 5, 6]
    assert tree.tokens_of(tree.path(6)) == [10, 12, 11, 14]
    assert tree.tokens_of([]) == []


def test_root_only():
    tree = DraftTree.root_only(5)
    assert tree.token_ids.tolist() == [5]
    assert tree.parents.tolist() == [-1]
    assert tree.log_probs.tolist() == [0]
    assert tree.ancestor_mask.tolist() == [[True]]
    assert tree.num_drafted == 0
    assert tree.is_chain
    assert tree.children(0) == []


def test_without_log_probs_all_paths_count_the_same():
    tree = DraftTree.from_parents(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]))
    assert tree.log_probs.tolist() == [0, 0, 0]
    assert tree.truncate(1).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64])
def test_a_chain_is_known_as_one(size):
    tree = DraftTree.from_parents(list(range(size)), list(range(-1, size - 1)))
    assert tree.is_chain
    assert torch.equal(tree.ancestor_mask, torch.ones(size, size, dtype=torch.bool).tril())
    assert tree.depths.tolist() == list(range(size))


@pytest.mark.parametrize("seed", range(20))
def test_mask_and_depths_against_walking_parents(seed):
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 80, (), generator=generator))
    parents = random_parents(generator, size)
    tree = DraftTree.from_parents(list(range(size)), parents)
    for node in range(size):
        ancestors = []
        step = node
        while step >= 0:
            ancestors.append(step)
            step = parents[step]
        assert tree.path(node) == ancestors[::-1]
        assert tree.depths[node] == len(ancestors) - 1
        assert tree.ancestor_mask[node].nonzero().flatten().tolist() == sorted(ancestors)
        assert all(tree.child_with_token(node, child) == child for child in tree.children(node))
    assert tree.depth == int(tree.depths.max())
    assert sorted(child for node in range(size) for child in tree.children(node)) == list(range(1, size))


@pytest.mark.parametrize(
    ("token_ids", "parents", "log_probs", "message"),
    [
        ([], [], None, r"`token_ids` is empty"),
        ([1, 2], [-1], None, r"`parents` has 1 entries for 2 `token_ids`"),
        ([1, -2], [-1, 0], None, r"`token_ids\[1\]` is -2"),
        ([1, 2], [0, 0], None, r"`parents\[0\]` is 0"),
        ([1, 2, 3], [-1, 2, 0], None, r"`parents\[1\]` is 2, but must be between 0 and 0"),
        ([1, 2, 3], [-1, 0, 2], None, r"`parents\[2\]` is 2, but must be between 0 and 1"),
        ([1, 2, 3], [-1, 0, -1], None, r"`parents\[2\]` is -1"),
        ([1, 2, 3, 2], [-1, 0, 0, 0], None, r"Node 0 has two children with token 2"),
        ([1.0, 2.0], [-1, 0], None, r"`token_ids` has dtype torch.float32"),
        ([1, 2], [-1.0, 0.0], None, r"`parents` has dtype torch.float32"),
        ([[1, 2]], [[-1, 0]], None, r"`token_ids` has shape \(1, 2\)"),
        ([1, 2], [[-1], [0]], None, r"`parents` has shape \(2, 1\)"),
        ([1, 2], [-1, 0], [0.0], r"`log_probs` has shape \(1,\)"),
        ([1, 2], [-1, 0], [0.0, float("nan")], r"`log_probs\[1\]` is NaN"),
        ([1, 2], [-1, 0], [-1.0, -2.0], r"`log_probs\[0\]` is -1.0"),
        ([1, 2, 3], [-1, 0, 1], [0.0, -2.0, -1.0], r"`log_probs\[2\]` is -1.0, more than its parent's -2.0"),
        ([1, 2], [-1, 0], [0.0, 0.5], r"`log_probs\[1\]` is 0.5"),
    ],
)
def test_from_parents_refuses_what_is_no_tree(token_ids, parents, log_probs, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(token_ids, parents, log_probs)


# --- truncation ----------------------------------------------------------------------------------------------------


def test_truncate_keeps_the_most_probable():
    tree = small_tree()
    assert tree.truncate(6) is tree
    assert prefixes_of(tree.truncate(4)) == [(11,), (12,), (12, 11), (12, 11, 14)]
    assert prefixes_of(tree.truncate(1)) == [(11,)]
    assert tree.truncate(4).log_probs.tolist() == [0.0, -0.5, -1.0, -1.25, -1.25]


@pytest.mark.parametrize("budget", [0, -1, 2.0, True])
def test_truncate_refuses_bad_budgets(budget):
    with pytest.raises(ValueError, match="`budget`"):
        small_tree().truncate(budget)


@given(seed=st.integers(0, 2**31), size=st.integers(1, 40), budget=st.integers(1, 40))
@settings(deadline=None)
def test_truncate_gives_a_tree_of_the_best(seed, size, budget):
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(generator, size)
    log_probs = [0.0]
    for parent in parents[1:]:
        log_probs.append(log_probs[parent] - int(torch.randint(3, (), generator=generator)))
    tree = DraftTree.from_parents(list(range(size)), parents, log_probs)
    small = tree.truncate(budget)
    checked = DraftTree.from_parents(small.token_ids, small.parents, small.log_probs)
    assert checked.num_drafted == min(budget, size - 1)
    assert set(prefixes_of(small)) <= set(prefixes_of(tree))
    assert sorted(small.log_probs.tolist()) == sorted(log_probs)[len(log_probs) - len(small) :]


def test_limit_depth_cuts_what_lies_deeper():
    tree = small_tree()
    assert tree.limit_depth(3) is tree
    assert tree.limit_depth(0).token_ids.tolist() == [10]
    assert prefixes_of(tree.limit_depth(1)) == [(11,), (12,)]
    shallow = tree.limit_depth(2)
    DraftTree.from_parents(shallow.token_ids, shallow.parents, shallow.log_probs)
    assert prefixes_of(shallow) == [(11,), (12,), (11, 11), (11, 12), (12, 11)]
    assert shallow.log_probs.tolist() == [0.0, -0.5, -1.0, -1.5, -2.0, -1.25]


# --- builders ------------------------------------------------------------------------------------------------------


@st.composite
def search_problems(draw):
    """Small problems, with ties, sure tokens and masked candidates in most of them."""
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.5, -torch.inf]) | st.floats(-8, 0, width=32)
    scores = torch.tensor(draw(st.lists(value, min_size=depth * width, max_size=depth * width)))
    log_probs, token_ids = candidates_from(scores.view(depth, width))
    budget = draw(st.integers(1, 40))
    return log_probs, token_ids, budget


@pytest.mark.parametrize("shape", TREE_SHAPES)
@given(problem=search_problems())
@settings(deadline=None, max_examples=200)
def test_against_enumeration(shape, problem):
    log_probs, token_ids, budget = problem
    tree = build_tree(log_probs, token_ids, ROOT, budget, shape)
    DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
    prefixes, scores = expected_prefixes(log_probs, token_ids, budget, shape)
    assert tree.token_ids[0] == ROOT
    assert prefixes_of(tree) == prefixes
    assert tree.log_probs[1:].tolist() == scores


@pytest.mark.parametrize("temperature", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("budget", [1, 2, 15, 64, 255, 1024])
def test_against_heap_search(budget, temperature):
    generator = torch.Generator().manual_seed(budget)
    for _ in range(5):
        logits = temperature * torch.randn(12, 300, generator=generator)
        log_probs, token_ids = top_candidates(logits, budget)
        tree = build_tree(log_probs, token_ids, ROOT, budget)
        DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
        assert sorted(tree.log_probs[1:].tolist(), reverse=True) == heap_search(log_probs, budget)
        full = logits.log_softmax(dim=-1)
        for node in range(1, len(tree)):
            prefix = prefix_of(tree, node)
            assert tree.log_probs[node].item() == pytest.approx(
                sum(full[step, token].item() for step, token in enumerate(prefix)), abs=1e-3
            )


def test_more_candidates_than_the_budget_change_nothing():
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    few, many = (build_tree(*top_candidates(logits, top_k), ROOT, 20) for top_k in (20, 200))
    assert torch.equal(few.token_ids, many.token_ids)
    assert torch.equal(few.parents, many.parents)


@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_nodes_are_ordered_by_depth_then_probability(shape):
    logits = 3 * torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    tree = build_tree(*top_candidates(logits, 16), ROOT, 40, shape)
    order = list(zip(tree.depths.tolist(), (-tree.log_probs).tolist()))
    assert order == sorted(order)


def test_spine_first_reaches_the_last_depth():
    log_probs, token_ids = candidates_from(torch.full((10, 6), -2.0))
    assert build_tree(log_probs, token_ids, ROOT, 12).depths.max() == 2
    tree = build_tree(log_probs, token_ids, ROOT, 12, "spine_first")
    assert tree.depths.max() == 10
    assert tree.num_drafted == 12
    assert tuple(token_ids[:, 0].tolist()) in prefixes_of(tree)


@pytest.mark.parametrize("shape", ["spine_first", "chain"])
def test_a_budget_below_the_spine_cuts_it(shape):
    log_probs, token_ids = candidates_from(torch.full((10, 6), -2.0))
    tree = build_tree(log_probs, token_ids, ROOT, 4, shape)
    assert tree.is_chain
    assert tree.num_drafted == 4


@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_masked_candidates_are_never_drafted(shape):
    inf = torch.inf
    log_probs = torch.tensor([[-0.5, -1.0], [-0.7, -inf], [-inf, -inf]])
    tree = build_tree(log_probs, torch.tensor([[1, 2], [3, 4], [5, 6]]), ROOT, 50, shape)
    assert prefixes_of(tree) == ([(1,), (1, 3)] if shape == "chain" else [(1,), (2,), (1, 3), (2, 3)])
    nothing = build_tree(torch.full((2, 3), -inf), torch.tensor([[1, 2, 3], [1, 2, 3]]), ROOT, 5, shape)
    assert nothing.token_ids.tolist() == [ROOT]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "`budget` must be an integer of at least 1"),
        ({"budget": -3}, "`budget`"),
        ({"budget": 4.0}, "`budget`"),
        ({"shape": "bushy"}, "`shape` must be one of"),
    ],
)
def test_build_tree_refuses_bad_arguments(changes, message):
    arguments = {
        "log_probs": torch.tensor([[-0.5, -1.0]]),
        "token_ids": torch.tensor([[1, 2]]),
        "root_token_id": ROOT,
        "budget": 4,
    }
    with pytest.raises(ValueError, match=message):
        build_tree(**{**arguments, **changes})


# --- candidates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 40), (3, 5, 40)])
def test_top_candidates(shape, dtype):
    logits = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)
    log_probs, token_ids = top_candidates(logits, 7)
    assert log_probs.dtype == torch.float32
    assert token_ids.dtype == torch.int64
    assert log_probs.shape == token_ids.shape == (*shape[:-1], 7)
    expected = logits.float().log_softmax(dim=-1)
    torch.testing.assert_close(log_probs, expected.gather(-1, token_ids))
    torch.testing.assert_close(log_probs, expected.topk(7, dim=-1).values)


def test_top_candidates_of_a_small_vocabulary():
    log_probs, token_ids = top_candidates(torch.randn(2, 3), 8)
    assert log_probs.shape == (2, 3)
    assert token_ids.sort(dim=-1).values.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_certain_token_has_log_probability_zero():
    logits = torch.full((1, 1000), -1e4)
    logits[0, 3] = 37.123
    log_probs, token_ids = top_candidates(logits, 1)
    assert log_probs.item() == 0
    assert token_ids.item() == 3


@pytest.mark.parametrize("top_k", [0, -1, 2.5, None])
def test_top_candidates_refuses_bad_counts(top_k):
    with pytest.raises(ValueError, match="`top_k`"):
        top_candidates(torch.randn(2, 3), top_k)


def test_tokens_without_probability_stay_impossible():
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [torch.nan, 0.0, 1.0]])
    log_probs, token_ids = top_candidates(logits, 3)
    assert token_ids[0].tolist() == [2, 0, 1]
    assert log_probs[0, 2] == -torch.inf and (log_probs[1] == -torch.inf).all()
    assert prefixes_of(build_tree(log_probs, token_ids, ROOT, 9)) == [(2,), (0,)]


def test_html_for_notebooks_has_every_node_below_its_parent():
    tree = DraftTree.from_parents([10, 11, 12, 13], [-1, 0, 0, 2], [0.0, -0.5, -1.0, -2.0])
    assert tree._repr_html_() == (
        "<ul><li>10 <small>100.0%</small><ul><li>11 <small>60.7%</small></li>"
        "<li>12 <small>36.8%</small><ul><li>13 <small>13.5%</small></li></ul></li></ul></li></ul>"
    )
