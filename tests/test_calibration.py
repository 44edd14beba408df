"""What a drafter learns of its errors: from the right evidence, towards the right probabilities, and never a token."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.families import make_model
from helpers.random_drafter import make_drafter
from torch import Tensor
from transformers import PreTrainedModel

from hf_ddtree import Calibration, DDTreeConfig, DraftTree
from hf_ddtree.candidate_generators import DFlashTreeCandidateGenerator, DraftContext
from hf_ddtree.drafters.calibration import DEPTHS, PRIOR, RANKS, SURPRISES
from hf_ddtree.tree.build import build_tree

DEPTH, WIDTH = 5, 6


def make_candidates(seed: int, depth: int = DEPTH, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Candidates that hold 90% of each depth's probability, and of which each is a token of its own."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(depth, width, generator=generator).mul(2).softmax(-1).mul(0.9)
    return probs.sort(descending=True).values.log(), torch.arange(depth * width).view(depth, width)


def place(depth: int, on_spine: bool, rank: int, probability: float) -> tuple[int, int, int, int]:
    """Where a candidate's class stands in `factors`, found without the code under test."""
    surprise = -math.log(probability)
    return (
        max(i for i, first in enumerate(DEPTHS) if depth >= first),
        0 if on_spine else 1,
        max(i for i, first in enumerate(RANKS) if rank >= first),
        max(i for i, least in enumerate(SURPRISES) if surprise > least or i == 0),
    )


def expected_factors(rounds: list[tuple[Tensor, Tensor, list[int]]]) -> np.ndarray:
    """The corrections, with a loop over every node that was reached and every candidate below it."""
    right = np.zeros((len(DEPTHS), 2, len(RANKS), len(SURPRISES)))
    stated = np.zeros_like(right)
    for log_probs, token_ids, emitted in rounds:
        on_spine = True
        right, stated = right * (1 - 1 / 1024), stated * (1 - 1 / 1024)
        for depth, token in enumerate(emitted[: len(log_probs)], start=1):
            for rank, probability in enumerate(log_probs[depth - 1].double().exp().tolist()):
                at = place(depth, on_spine, rank, probability)
                stated[at] += probability
                right[at] += int(token_ids[depth - 1, rank]) == token
            on_spine = on_spine and int(token_ids[depth - 1, 0]) == token
            if token not in token_ids[depth - 1].tolist():
                break
    return (right + PRIOR) / (stated + PRIOR)


def random_rounds(seed: int, count: int) -> list[tuple[Tensor, Tensor, list[int]]]:
    """Rounds that end on the spine, off it, with a token that is no candidate, and beyond the last depth."""
    chooser = np.random.default_rng(seed)
    rounds = []
    for i in range(count):
        log_probs, token_ids = make_candidates(seed + i)
        ranks = [int(chooser.choice([0, 0, 0, 1, 2, 4])) for _ in range(int(chooser.integers(1, DEPTH + 2)))]
        emitted = [int(token_ids[min(depth, DEPTH - 1), rank]) for depth, rank in enumerate(ranks)]
        if chooser.random() < 0.5:
            emitted[int(chooser.integers(len(emitted)))] = 999
        rounds.append((log_probs, token_ids, emitted))
    return rounds


# --- the table ------------------------------------------------------------------------------------------------------


def test_evidence_goes_where_it_belongs() -> None:
    rounds = random_rounds(0, 60)
    calibration = Calibration()
    for one in rounds:
        calibration.learn(*one)
    expected = expected_factors(rounds)
    np.testing.assert_allclose(calibration.factors, expected, rtol=1e-5)
    assert (np.abs(expected - 1) > 0.05).sum() > 15


def test_calibrated_probabilities() -> None:
    calibration = Calibration()
    for one in random_rounds(1, 200):
        calibration.learn(*one)
    log_probs, token_ids = make_candidates(7)
    calibrated, tokens, next_state = calibration.calibrate(log_probs, token_ids)
    assert calibrated.shape == (DEPTH, 2, WIDTH) and tokens.tolist() == token_ids[:, None].expand(-1, 2, -1).tolist()
    assert next_state.tolist() == [[0] + [1] * (WIDTH - 1), [1] * WIDTH]
    factors = calibration.factors
    for depth in range(DEPTH):
        for off_spine in range(2):
            least = 1.0
            for rank, probability in enumerate(log_probs[depth].exp().tolist()):
                corrected = probability * factors[place(depth + 1, not off_spine, rank, probability)]
                least = min(least, corrected)
                assert math.isclose(float(calibrated[depth, off_spine, rank].exp()), least, rel_tol=1e-4)


def test_neutral_at_first() -> None:
    calibration = Calibration()
    assert calibration.is_neutral and (calibration.factors == 1).all()
    log_probs, token_ids = make_candidates(3)
    calibrated, tokens, next_state = calibration.calibrate(log_probs, token_ids)
    tree = build_tree(calibrated, tokens, 0, 20, next_state=next_state)
    plain = build_tree(log_probs, token_ids, 0, 20)
    assert (tree.token_ids.tolist(), tree.parents.tolist()) == (plain.token_ids.tolist(), plain.parents.tolist())


def test_tree_avoids_what_was_always_wrong() -> None:
    """Below a sibling nothing that was stated ever came true, so that most siblings stay leaves."""
    calibration = Calibration()
    log_probs, token_ids = make_candidates(11)
    for _ in range(400):
        for depth in range(DEPTH - 1):
            calibration.learn(log_probs, token_ids, [*token_ids[:depth, 0].tolist(), int(token_ids[depth, 1]), 999])
    calibrated, tokens, next_state = calibration.calibrate(log_probs, token_ids)
    tree = build_tree(calibrated, tokens, 0, 16, next_state=next_state)
    plain = build_tree(log_probs, token_ids, 0, 16)
    spine = set(token_ids[:, 0].tolist())

    def below_siblings(tree: DraftTree) -> int:
        return sum(
            any(int(tree.token_ids[node]) not in spine for node in tree.path(node)[1:-1]) for node in range(len(tree))
        )

    assert below_siblings(tree) < below_siblings(plain) / 2


def test_long_memory_fades() -> None:
    calibration = Calibration()
    log_probs, token_ids = make_candidates(5)
    for _ in range(6000):
        calibration.learn(log_probs, token_ids, [999])
    low = calibration.factors[place(1, True, 0, float(log_probs[0, 0].exp()))]
    for _ in range(6000):
        calibration.learn(log_probs, token_ids, [int(token_ids[0, 0])])
    assert low < 0.05 and calibration.factors[place(1, True, 0, float(log_probs[0, 0].exp()))] > 1.02


def test_save_and_load(tmp_path: Path) -> None:
    calibration = Calibration()
    for one in random_rounds(2, 30):
        calibration.learn(*one)
    calibration.save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json")
    assert (loaded.factors == calibration.factors).all() and not loaded.is_neutral
    one = random_rounds(3, 1)[0]
    loaded.learn(*one)
    calibration.learn(*one)
    assert (loaded.factors == calibration.factors).all()
    table = json.loads((tmp_path / "calibration.json").read_text())
    for changes in ({"depths": [1]}, {"right": [0.0]}, {"stated": None}):
        (tmp_path / "other.json").write_text(json.dumps({k: v for k, v in (table | changes).items() if v is not None}))
        with pytest.raises(ValueError, match="holds no calibration of this version"):
            Calibration.load(tmp_path / "other.json")


def test_powers_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration = Calibration()
    calibration.powers[True].learn([(0, 2)], [[[-0.1, -2.0, -4.0], [0.5, 0.0, 0.0]]], [1])
    calibration.selector_powers[False].learn([(0,)], [[[-0.1, -2.0, -4.0]]], [1])
    calibration.save(path)
    loaded = Calibration.load(path)
    for do_sample in (False, True):
        assert loaded.powers[do_sample].to_dict() == calibration.powers[do_sample].to_dict()
        assert loaded.selector_powers[do_sample].to_dict() == calibration.selector_powers[do_sample].to_dict()
    assert loaded.powers[True].values != loaded.powers[False].values
    assert loaded.selector_powers[False].values != loaded.selector_powers[True].values
    table = json.loads(path.read_text())
    for wrong in ({"greedy": {}}, {"greedy": {"values": [1.0], "curvatures": [1.0]}}, {"warm": {}}, [1]):
        path.write_text(json.dumps(table | {"powers": wrong}))
        with pytest.raises(ValueError, match="powers"):
            Calibration.load(path)
    path.write_text(json.dumps({name: value for name, value in table.items() if name != "powers"}))
    assert Calibration.load(path).powers[True].values == Calibration().powers[True].values


def test_expected_length() -> None:
    tree = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 1], [0.0, math.log(0.5), math.log(0.25), math.log(0.1)])
    assert tree.expected_length == pytest.approx(1.85)
    assert DraftTree.root_only(3).expected_length == 1.0


# --- in decoding ----------------------------------------------------------------------------------------------------


def prompt(batch_size: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(1, 64, (batch_size, 9), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, drafter: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        **{
            "generation_strategy": "ddtree",
            "tree_budget": 24,
            "max_new_tokens": 40,
            "do_sample": False,
            "return_dict_in_generate": True,
            **kwargs,
        },
    )


def record_evidence(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, list[int]]]:
    rounds: list[tuple[Tensor, Tensor, list[int]]] = []
    learn = drafter.calibration.learn

    def recording(log_probs: Tensor, token_ids: Tensor, emitted: list[int]) -> None:
        rounds.append((log_probs.clone(), token_ids.clone(), emitted))
        learn(log_probs, token_ids, emitted)

    monkeypatch.setattr(drafter.calibration, "learn", recording)
    return rounds


@pytest.mark.core
@pytest.mark.parametrize("ends", [None, 20])
@pytest.mark.parametrize("together", [False, True])
def test_what_rounds_tell(together: bool, ends: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token after the first, once, to the row that emitted it; and nothing of padding."""
    model = make_model("llama", "sdpa")
    drafter, input_ids = make_drafter(model), prompt(3)
    eos = None
    if ends is not None:
        plain = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, do_sample=False
        )
        eos = [int(plain[0, 9 + ends]), int(plain[1, 9 + ends // 2])]
    rounds = record_evidence(drafter, monkeypatch)
    output = generate(
        model,
        drafter,
        input_ids,
        output_scores=together,
        eos_token_id=eos,
        pad_token_id=0,
        return_trees=True,
        tree_probabilities="marginal",
    )
    told: list[list[int]] = [[], [], []]
    for *_, emitted in rounds:
        # A row's tokens go on where its last ones ended; prompts differ, so only one row fits.
        rows = [
            row for row in range(3) if output.sequences[row, 10 + len(told[row]) :].tolist()[: len(emitted)] == emitted
        ]
        assert rows
        told[min(rows, key=lambda row: len(told[row]))] += emitted
    lengths = [len([token for token in row[10:].tolist() if token != 0]) for row in output.sequences]
    assert sum(map(len, told)) == sum(lengths)
    assert together or output.ddtree_stats.tokens_per_forward > 1


def shapes_of(output: Any) -> list[list[int]]:
    """The parents in every tree of the call."""
    return [tree.parents.tolist() for trees in output.ddtree_stats.trees for tree in trees]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_learning_never_changes_a_token(family: str) -> None:
    model = make_model(family, "sdpa")
    drafter = make_drafter(model)
    off = make_drafter(model)
    trees = []
    for seed in range(2):
        input_ids = prompt(2, seed)
        plain = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, do_sample=False
        )
        output = generate(model, drafter, input_ids, return_trees=True)
        assert output.sequences.tolist() == plain.tolist()
        without = generate(model, off, input_ids, return_trees=True, calibrate=False)
        assert without.sequences.tolist() == plain.tolist()
        trees.append([shapes_of(run) for run in (output, without)])
    assert off.calibration.is_neutral and not drafter.calibration.is_neutral
    assert any(learned != plain for learned, plain in trees)


def test_chain_stays_the_chain() -> None:
    """What is learned changes how probable the drafter's best guesses are, and not which they are."""
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    generate(model, drafter, prompt(1, 1))
    chains = []
    for calibrate in (True, False):
        output = generate(
            model, drafter, prompt(1, 2), generation_strategy="dflash", return_trees=True, calibrate=calibrate
        )
        chains.append([tree.token_ids.tolist() for (tree,) in output.ddtree_stats.trees])
    assert chains[0] == chains[1]


def test_calls_at_the_same_time() -> None:
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    plain = [
        model.generate(prompt(1, i), attention_mask=torch.ones(1, 9), max_new_tokens=40, do_sample=False)
        for i in range(4)
    ]
    outputs: list[Any] = [None] * 4

    def run(i: int) -> None:
        outputs[i] = generate(model, drafter, prompt(1, i))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [output.sequences.tolist() for output in outputs] == [tokens.tolist() for tokens in plain]
    factors = drafter.calibration.factors
    assert np.isfinite(factors).all() and (factors > 0).all()


def test_goes_with_the_drafter() -> None:
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    generate(model, drafter, prompt())
    for copied in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert (copied.calibration.factors == drafter.calibration.factors).all()
    drafter.calibration = Calibration()
    generate(model, drafter, prompt(), max_new_tokens=4)
    assert not drafter.calibration.is_neutral


def test_outside_of_rounds_nothing_is_learned() -> None:
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    generator = DFlashTreeCandidateGenerator(drafter, model)
    for _ in range(2):
        generator.propose(DraftContext(prompt(), [8]), 8)
    assert drafter.calibration.is_neutral


def test_switch() -> None:
    assert DDTreeConfig().calibrate is True
    with pytest.raises(ValueError, match="`calibrate` must be True or False, but is 1"):
        DDTreeConfig(calibrate=1)
