"""Trees on marginals and on what the target said: their probabilities, against the formula, and their search."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.generator_grid import CALLS, check_case, random_tokens
from helpers.random_drafter import make_drafter
from torch import Tensor

from hf_ddtree import Calibration, DraftMemory, DraftTree
from hf_ddtree.candidate_generators.branch_search import (
    HALF_COUNT,
    LEAST_SUCCESSOR,
    OFF_SPINE,
    ON_SPINE,
    SUCCESSORS,
    BranchCandidates,
    search_branches,
)
from hf_ddtree.draft_memory.successor_tables import WIDTH, SuccessorTables
from hf_ddtree.drafters.mixture import Powers
from hf_ddtree.tree.build import build_tree

DEPTH, FEW = 4, 3
LAST = (7, 1, 2)
POWERS = (1.1, 0.6, 0.4)


def marginals(seed: int, depth: int = DEPTH, width: int = FEW) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(depth, 2, width)` of 90% of the mass, off the spine flatter, and tokens `(depth, width)`."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(depth, 1, width, generator=draw).sort(descending=True).values * torch.tensor([[2.0], [1.0]])
    token_ids = torch.stack([torch.randperm(9, generator=draw)[:width] for _ in range(depth)])
    return (logits.softmax(-1) * 0.9).log(), token_ids


def taught_tables(seed: int, rounds: int = 40, tokens: int = 9) -> SuccessorTables:
    tables, draw = SuccessorTables(), np.random.default_rng(seed)
    for _ in range(rounds):
        contexts = draw.integers(0, tokens, (3, 3))
        said = np.stack([draw.permutation(tokens)[:3] for _ in range(3)])
        tables.teach(contexts, said, draw.dirichlet(np.ones(4), 3)[:, :3].astype(np.float32))
    return tables


def make_candidates(seed: int, tables: SuccessorTables, powers: Powers | None = None) -> BranchCandidates:
    return BranchCandidates(*marginals(seed), tables, powers or Powers(POWERS), LAST)


@pytest.mark.parametrize("seed", range(10))
def test_probabilities_are_products(seed: int) -> None:
    tables = taught_tables(seed)
    log_probs, token_ids = marginals(seed)
    candidates = make_candidates(seed, tables)
    seen = 0
    for depth, off_spine, context in itertools.product(range(DEPTH), (False, True), [(1, 2, 3), (4, 4, 5), (8, 0, 1)]):
        tokens, got = candidates.after(context, depth, off_spine)
        successors, probs, count = tables.entry(tables.slot_of(context))
        said = {token: prob for token, prob in zip(successors, probs) if prob > 0}
        stated = dict(zip(token_ids[depth].tolist(), log_probs[depth, int(off_spine)].exp().tolist()))
        least = 0.5 * min(*stated.values(), 1e-3) + 1e-9
        weight = POWERS[SUCCESSORS] * count / (count + HALF_COUNT)
        power = POWERS[OFF_SPINE if off_spine else ON_SPINE]
        products = {
            token: stated.get(token, least) ** power * (1 + said.get(token, 0.0) / LEAST_SUCCESSOR) ** weight
            for token in stated.keys() | said.keys()
        }
        outside = (1 - sum(stated.values())) ** power * (1 + max(0, 1 - sum(probs)) / LEAST_SUCCESSOR) ** weight
        total = sum(products.values()) + outside
        expected = {token: math.log(product / total) for token, product in products.items()}
        assert dict(zip(tokens, got)) == pytest.approx({t: p for t, p in expected.items() if p > -12}, rel=1e-4)
        assert got == sorted(got, reverse=True)
        seen += len(said.keys() - stated.keys())
    assert seen > 10


@pytest.mark.parametrize("shape", ["best_first", "spine_first"])
@pytest.mark.parametrize("budget", [1, 5, 12, 40])
def test_nothing_known_gives_the_calibrated_tree(budget: int, shape: Any) -> None:
    calibration = Calibration()
    for seed in range(50):
        stated, token_ids = marginals(seed)
        calibration.learn(stated[:, 0], token_ids, [int(token_ids[0, seed % 3]), int(token_ids[1, 0]), 99])
    for seed in range(20):
        stated, token_ids = marginals(100 + seed, width=5)
        log_probs, tokens, next_state = calibration.calibrate(stated[:, 0].contiguous(), token_ids)
        expected = build_tree(log_probs, tokens, LAST[-1], budget, shape, next_state=next_state)
        candidates = BranchCandidates(log_probs, token_ids, SuccessorTables(), Powers(POWERS), LAST)
        got = search_branches(candidates, budget, shape)
        assert paths_of(got) == paths_of(expected)
        assert torch.allclose(got.log_probs, expected.log_probs, atol=1e-5)


def paths_of(tree: DraftTree) -> list[list[int]]:
    return [tree.tokens_of(tree.path(node)) for node in range(len(tree))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [3, 10, 30])
def test_the_most_probable_prefixes(seed: int, budget: int) -> None:
    """Against a list of all prefixes, each with the product of its tokens' probabilities after its branch."""
    candidates = make_candidates(seed, taught_tables(seed))
    found: list[tuple[float, tuple[int, ...]]] = []

    def follow(prefix: tuple[int, ...], log_prob: float, off_spine: bool) -> None:
        context = (*LAST, *prefix)[-3:]
        for token, more in zip(*candidates.after(context, len(prefix), off_spine)):
            found.append((log_prob + more, (*prefix, token)))
            if len(prefix) + 1 < DEPTH:
                off = off_spine or token != candidates.best(len(prefix))
                follow((*prefix, token), log_prob + more, off)

    follow((), 0.0, False)
    best = sorted(found, reverse=True)[:budget]
    tree = search_branches(candidates, budget)
    DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
    assert {tuple(path[1:]) for path in paths_of(tree)[1:]} == {prefix for _, prefix in best}
    assert sorted(tree.log_probs[1:].tolist(), reverse=True) == pytest.approx([log_prob for log_prob, _ in best])
    narrow = search_branches(candidates, budget, most_children=1)
    assert narrow.is_chain and len(narrow) == 1 + min(budget, DEPTH)


def test_the_spine_comes_first() -> None:
    """The best candidate after each best one, down to the last depth, whatever else is more probable."""
    candidates = make_candidates(3, taught_tables(3))
    spine, context, off_spine = [], LAST, False
    for depth in range(DEPTH):
        token = candidates.after(context, depth, off_spine)[0][0]
        off_spine = off_spine or token != candidates.best(depth)
        spine.append(token)
        context = (*context[1:], token)
    assert paths_of(search_branches(candidates, DEPTH, "spine_first"))[-1] == [LAST[-1], *spine]
    assert [LAST[-1], *spine] in paths_of(search_branches(candidates, 8, "spine_first"))


def test_powers_become_those_of_the_target() -> None:
    """Tokens drawn from a mixture of given powers, of which one is not used by half of the draws."""
    draw, true, powers = random.Random(0), (1.4, 0.5, 0.8), Powers((1.0, 0.7, 0.3))
    rounds = []
    for _ in range(6000):
        place, count = draw.randrange(2), draw.randrange(3, 8)
        log_factors = np.array([[draw.gauss(0, 1.5) for _ in range(count)] for _ in range(2)])
        chances = np.exp(true[place] * log_factors[0] + true[2] * log_factors[1])
        chosen = draw.choices(range(count), chances)[0]
        rounds.append(((place, 2), log_factors.tolist(), chosen))
    for first in range(0, len(rounds), 7):
        powers.learn(*zip(*rounds[first : first + 7]))
    assert powers.values == pytest.approx(true, abs=0.1)


def test_learning_makes_what_was_emitted_more_probable() -> None:
    tables, powers = taught_tables(5), Powers(POWERS)
    emitted = [3, 5, 1]

    def log_likelihood() -> float:
        total, context, off_spine = 0.0, LAST, False
        fresh = make_candidates(5, tables, powers)
        for depth, token in enumerate(emitted):
            total += dict(zip(*fresh.after(context, depth, off_spine))).get(token, -12.0)
            off_spine = off_spine or token != fresh.best(depth)
            context = (*context[1:], token)
        return total

    before = log_likelihood()
    for _ in range(50):
        make_candidates(5, tables, powers).learn(emitted)
    assert powers.values != POWERS and log_likelihood() > before + 0.1


# --- decoding -------------------------------------------------------------------------------------------------------


def wrong_memory(seed: int) -> DraftMemory:
    """Says that each context goes on with tokens drawn at random, after very many observations."""
    memory, draw = DraftMemory(), np.random.default_rng(seed)
    contexts = draw.integers(0, VOCAB_SIZE, (600, 3))
    said = np.stack([draw.permutation(VOCAB_SIZE)[:WIDTH] for _ in range(600)])
    for _ in range(5):
        memory.tables.teach(contexts, said, np.full((600, WIDTH), 1 / WIDTH, dtype=np.float32))
    return memory


@pytest.mark.core
@pytest.mark.parametrize("call", CALLS)
def test_wrong_tables_change_no_token(call: str) -> None:
    seed, shapes = len(call), (None, "spine_first")

    def make_drafts(model: Any) -> dict[str, Any]:
        options = {"tree_shape": shapes[seed % 2], "tree_lookup": (False, True, "text")[seed % 3]}
        return {
            "assistant_model": make_drafter(model),
            "tree_budget": 14,
            "draft_memory": wrong_memory(seed),
        } | options

    check_case((("llama", "qwen3_5", "mistral")[seed % 3], call), make_drafts)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_call_drafts_what_the_target_said_in_an_earlier_one(do_sample: bool) -> None:
    model = make_model("qwen3_5", "sdpa")
    drafter, memory = make_drafter(model), DraftMemory()
    input_ids = random_tokens(3, (2, 8), VOCAB_SIZE)
    options = {"max_new_tokens": 40, "do_sample": do_sample, "pad_token_id": 0, "attention_mask": torch.ones(2, 8)}
    options |= {"return_dict_in_generate": True, "output_scores": do_sample, "eos_token_id": None}
    torch.manual_seed(0)
    plain = model.generate(input_ids, **options).sequences
    rates = []
    for kept in (DraftMemory(), memory, memory):
        torch.manual_seed(0)
        output = model.generate(
            input_ids,
            **options,
            assistant_model=drafter,
            generation_strategy="ddtree",
            tree_budget=16,
            draft_memory=kept,
        )
        assert output.sequences.tolist() == plain.tolist()
        rates.append(output.ddtree_stats.tokens_per_forward)
    assert do_sample or rates[2] > 1.4 * rates[0]
    assert drafter.calibration.powers[do_sample].values != drafter.calibration.powers[not do_sample].values


@pytest.mark.parametrize("knobs", [{"tree_probabilities": "marginal"}, {"calibrate": False}, {"version": 2}])
def test_a_memory_that_nothing_is_drafted_from_is_refused(knobs: dict[str, Any]) -> None:
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model, version=knobs.pop("version", 1))
    options = {"assistant_model": drafter, "generation_strategy": "ddtree", "max_new_tokens": 4, **knobs}
    with pytest.raises(ValueError, match="`draft_memory` is given, but nothing is drafted from it"):
        model.generate(random_tokens(0, (1, 5), VOCAB_SIZE), draft_memory=DraftMemory(), **options)
