"""Growing a tree level by level, against a search that opens one prefix at a time."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
import torch

from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.growing_tree import GrowingTree

VOCAB = 5


def distribution(prefix, seed):
    """The candidates after a prefix of drafted tokens: `(log_probs, token_ids)`, best first."""
    generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
    logits = torch.randn(VOCAB, generator=generator) * 2
    if random.Random(hash((seed, prefix))).random() < 0.2:
        logits[1:] = -torch.inf
    log_probs = logits.log_softmax(dim=-1)
    return log_probs.topk(VOCAB)


def grow(root, budget, depth, shape, seed, top_k=VOCAB):
    tree = GrowingTree(root, budget, shape)
    for _ in range(depth):
        if not len(tree.frontier):
            break
        branches, frontier = tree.branches()
        prefixes = [tuple(branches.tokens_of(branches.path(node))[1:]) for node in frontier]
        log_probs, token_ids = zip(*(distribution(prefix, seed) for prefix in prefixes))
        tree.grow(torch.stack(log_probs)[:, :top_k], torch.stack(token_ids)[:, :top_k])
    return tree.tree()


def paths(tree):
    """The path log-probability of each node, by its tokens."""
    return {tuple(tree.tokens_of(tree.path(node))[1:]): float(tree.log_probs[node]) for node in range(1, len(tree))}


def best_first(budget, depth, seed):
    """The prefixes that a search with a heap takes, with their log-probabilities."""
    count = itertools.count()
    heap, taken = [], {}

    def open_prefix(prefix, log_prob):
        if len(prefix) < depth:
            for step, token in zip(*(part.tolist() for part in distribution(prefix, seed))):
                if step > -torch.inf:
                    heapq.heappush(heap, (-(log_prob + step), len(prefix), next(count), (*prefix, token)))

    open_prefix((), 0.0)
    while heap and len(taken) < budget:
        cost, _, _, prefix = heapq.heappop(heap)
        taken[prefix] = -cost
        open_prefix(prefix, -cost)
    return taken


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (1, 4), (4, 2), (9, 3), (20, 5), (60, 3), (200, 3)])
def test_best_first(budget, depth):
    for seed in range(12):
        tree = grow(3, budget, depth, "best_first", seed)
        expected = best_first(budget, depth, seed)
        got = paths(tree)
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, abs=1e-4)
        DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
        assert tree.token_ids[0] == 3
        order = [(int(depth), -float(log_prob)) for depth, log_prob in zip(tree.depths, tree.log_probs)]
        assert order == sorted(order)


@pytest.mark.parametrize("shape", ["chain", "spine_first"])
@pytest.mark.parametrize(("budget", "depth"), [(1, 3), (3, 3), (4, 5), (12, 4)])
def test_spine(shape, budget, depth):
    for seed in range(12):
        spine, prefix = [], ()
        for _ in range(min(depth, budget)):
            prefix = (*prefix, int(distribution(prefix, seed)[1][0]))
            spine.append(prefix)
        got = paths(grow(3, budget, depth, shape, seed))
        if shape == "chain":
            assert set(got) == set(spine)
        else:
            others = [prefix for prefix in best_first(200, depth, seed) if prefix not in spine]
            rest = set(got) - set(spine)
            assert set(spine) <= set(got)
            # The rest are the best of what hangs on what is kept.
            assert rest == set(others[: len(rest)]) and len(got) == min(budget, len(spine) + len(others))


@pytest.mark.parametrize("shape", ["best_first", "spine_first", "chain"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_same_distribution_everywhere_gives_the_tree_of_marginals(shape, top_k):
    """Ties included: half of the log-probabilities are multiples of a half."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        levels = -torch.rand(4, 5, generator=generator) * 3
        levels = (levels.mul(2).round() / 2 if seed % 2 else levels).sort(dim=-1, descending=True).values
        token_ids = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(4)])
        expected = build_tree(levels[:, :top_k], token_ids[:, :top_k], 7, 10, shape=shape)
        tree = GrowingTree(7, 10, shape)
        for log_probs, tokens in zip(levels, token_ids):
            size = len(tree.frontier)
            tree.grow(log_probs[:top_k].expand(size, -1), tokens[:top_k].expand(size, -1))
        got = tree.tree()
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.parents.tolist() == expected.parents.tolist()
        torch.testing.assert_close(got.log_probs, expected.log_probs)


def test_nothing_to_draft():
    tree = GrowingTree(2, 4)
    tree.grow(torch.full((1, 3), -torch.inf), torch.arange(3)[None])
    assert not len(tree.frontier)
    assert tree.tree().token_ids.tolist() == [2]
