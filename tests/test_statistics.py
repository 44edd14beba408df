"""`ddtree_stats`: what is counted, and its form in JSON."""

import json
import math

import pytest
from helpers.families import make_model
from helpers.side_by_side import make_oracle, make_prompt

import hf_ddtree
from hf_ddtree import DDTreeStats, DraftTree
from hf_ddtree.budget import auto

ARGUMENTS = {
    "max_new_tokens": 24,
    "do_sample": False,
    "generation_strategy": "ddtree",
    "return_dict_in_generate": True,
    "return_trees": True,
}


def generate(prompt, **kwargs):
    model = make_model("llama", "sdpa")
    plain = model.generate(prompt, max_new_tokens=24, do_sample=False)
    arguments = {"candidate_generator": make_oracle(plain, accuracy=0.8), "tree_budget": 9}
    return model.generate(prompt, **ARGUMENTS | arguments | kwargs).ddtree_stats


@pytest.mark.core
def test_acceptance_by_depth():
    stats = generate(make_prompt())
    deepest = max(int(tree.depths.max()) for trees in stats.trees for tree in trees)
    pairs = [
        (int(tree.depths.max()), len(path) - 1)
        for trees, paths in zip(stats.trees, stats.accepted_paths)
        for tree, path in zip(trees, paths)
        if path
    ]
    assert stats.drafted_by_depth == [sum(drafted >= depth for drafted, _ in pairs) for depth in range(1, deepest + 1)]
    assert stats.accepted_by_depth == [sum(got >= depth for _, got in pairs) for depth in range(1, deepest + 1)]
    assert sum(stats.accepted_by_depth) + len(pairs) == sum(stats.accepted_lengths)
    assert stats.acceptance_by_depth[0] == stats.accepted_by_depth[0] / stats.drafted_by_depth[0] > 0.5
    assert stats.rounds == stats.target_forwards - 1 == len(stats.trees)


def test_counts_by_hand():
    stats = DDTreeStats()
    chain, wide = DraftTree.chain([1, 2, 3]), DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    stats.count([chain, wide], [[0, 1], [0]])
    stats.count([DraftTree.root_only(4), chain], [[0], []])
    stats.count([chain, chain], [[0, 1, 2], [0, 1]])
    assert (stats.drafted_by_depth, stats.accepted_by_depth) == ([4, 3], [3, 1])
    assert stats.acceptance_by_depth == [3 / 4, 1 / 3]
    assert DDTreeStats().acceptance_by_depth == []


@pytest.mark.core
def test_json():
    stats = generate(make_prompt())
    read = json.loads(json.dumps(stats.to_dict()))
    assert read == stats.to_dict()
    assert read["tokens_per_forward"] == stats.tokens_per_forward
    assert read["acceptance_by_depth"] == stats.acceptance_by_depth
    assert read["trees"][0][0]["token_ids"] == stats.trees[0][0].token_ids.tolist()
    assert read["disabled_after"] is None and read["rounds_disabled"] == 0
    assert math.isclose(sum(read["stage_seconds"].values()), sum(stats.stage_seconds.values()))
    assert generate(make_prompt(), return_trees=False).to_dict()["trees"] is None
    # A copy: what is done to it does not change the statistics.
    stats.to_dict()["tree_sizes"].clear()
    assert stats.tree_sizes


def test_html_for_notebooks():
    stats = DDTreeStats()
    stats.count([DraftTree.chain([1, 2, 3])], [[0, 1]])
    stats.stage_seconds["verify"] = 0.25
    table = stats._repr_html_()
    assert "tokens per forward</th><td>2.00</td>" in table and "nodes per tree</th><td>2.0</td>" in table
    assert "<td>100% 0%</td>" in table and "verify</th><td>0.250 s, 100%</td>" in table
    assert "<td>0.00</td>" in DDTreeStats()._repr_html_()


def test_one_line_when_auto_disables_drafting(monkeypatch):
    lines = []
    type(auto.logger).warning_once.cache_clear()
    monkeypatch.setattr(auto.logger, "warning", lambda text, *_: lines.append(text))
    for _ in range(2):
        policy = hf_ddtree.AutoBudget()
        for _ in range(60):
            waste(policy)
        assert policy.drafting_disabled
    assert len(lines) == 1 and "`tree_budget`" in lines[0] and "will probe again" in lines[0]


def waste(policy):
    """A round in which a tree costs ten times a token, and nothing is accepted."""
    asked = policy.nodes_to_draft(100, 1)
    trees = [DraftTree.chain(list(range(1 + asked))) if asked else DraftTree.root_only(0)]
    size = policy.nodes_to_verify(trees, 100) if asked else 0
    policy.observe(hf_ddtree.budget.RoundCost(100, 1, size, [0], 0.1 if asked else None, 1.0 if size else 0.1))
