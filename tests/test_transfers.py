"""What a round makes the host wait for, on a device that counts it; and what is decoded there is the same."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from helpers.every_kind import MAKERS, ONLY_FOR, make
from helpers.fake_accelerator import TO_HOST, FakeAccelerator, moved, on_cpu
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from transformers import LogitsProcessor, LogitsProcessorList

from hf_ddtree.budget.policy import FixedBudget
from hf_ddtree.testing import OracleTreeCandidateGenerator

NEW_TOKENS = 12
PROMPT = torch.tensor([[5, 9, 14, 3, 30, 41, 7], [0, 0, 8, 8, 21, 11, 50], [2, 17, 33, 6, 5, 9, 14]])
MASK = (PROMPT != 0).long()


class Counting(FixedBudget):
    """Notes the waits of each round."""

    def __init__(self, accelerator: FakeAccelerator, num_nodes: int = 8) -> None:
        super().__init__(num_nodes)
        self._accelerator = accelerator
        self._start = 0
        self.rounds = []

    def nodes_to_draft(self, num_cached, num_rows):
        self._start = len(self._accelerator.waits)
        return super().nodes_to_draft(num_cached, num_rows)

    def observe(self, cost):
        self.rounds.append(self._accelerator.waits[self._start :])


@cache
def pair(family, version):
    """The tiny model and a drafter for it, on the CPU and on the device."""
    model = make_model(family, first_implementation(family))
    drafter = make_drafter(model, version=version)
    accelerator = FakeAccelerator()
    return model, drafter, moved(copy.deepcopy(model), accelerator), moved(copy.deepcopy(drafter), accelerator)


def decode(model, drafter, rows, accelerator=None, seed=0, **options):
    """Standard decoding's output without a drafter."""
    prompt, mask = PROMPT[:rows], MASK[:rows]
    if drafter is not None:
        options |= {"assistant_model": drafter, "generation_strategy": "ddtree"}
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    if accelerator is None:
        return model.generate(prompt, attention_mask=mask, **options)
    with accelerator.running():
        on_device = prompt.to(accelerator.device), mask.to(accelerator.device)
        return on_cpu(model.generate(on_device[0], attention_mask=on_device[1], **options))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "version"), [("llama", 1), ("mistral", 2), ("qwen3_5", 2)])
def test_a_round_waits_once_before_the_verification_and_once_after(family, version, rows, do_sample):
    model, _, on_device, drafter = pair(family, version)
    accelerator = FakeAccelerator()
    policy = Counting(accelerator)
    options = {"do_sample": do_sample, "top_k": 20}
    got = decode(on_device, drafter, rows, accelerator, tree_budget=policy, **options)
    assert len(policy.rounds) > 2
    # Without scores of pairs the first round reads the prompt, to know what follows its tokens.
    for waits in policy.rounds[1 if version == 1 else 0 :]:
        assert [wait.kind for wait in waits] == [TO_HOST, TO_HOST], waits
        before, after = ("".join(wait.frames) for wait in waits)
        assert ":propose:" in before and ":_choose_on_device:" in after
    if rows == 1 or not do_sample:
        assert torch.equal(got, decode(model, None, rows, **options))


def test_the_power_of_a_selector_is_learned_as_on_the_host():
    model = make_model("mistral", first_implementation("mistral"))
    drafter, accelerator = make_drafter(model, version=2), FakeAccelerator()
    on_device = [moved(copy.deepcopy(one), accelerator) for one in (model, drafter)]
    decode(model, drafter, 3, tree_budget=8)
    decode(*on_device, 3, accelerator, tree_budget=8)
    powers = [one.calibration.selector_powers[False].to_dict() for one in (drafter, on_device[1])]
    assert powers[0]["values"] != [1.0]
    for name in ("values", "curvatures"):
        assert powers[0][name] == pytest.approx(powers[1][name], rel=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9, "eos_token_id": list(range(1, VOCAB_SIZE, 3)), "forced_eos_token_id": 4},
        {"bad_words_ids": [[3], [17], [40, 41], [12, 13, 14]], "begin_suppress_tokens": [5, 9]},
        {"exponential_decay_length_penalty": (2, 1.4), "eos_token_id": 7, "do_sample": True, "temperature": 0.7},
        {"repetition_penalty": 1.2, "do_sample": True, "output_scores": True},
    ],
    ids=["repetition", "lengths", "words", "rising end", "with scores"],
)
def test_processors_of_the_tokens_before_add_no_wait(options, rows):
    model, _, on_device, drafter = pair("llama", 1)
    accelerator = FakeAccelerator()
    policy = Counting(accelerator)
    options = {"return_dict_in_generate": True, **options}
    got = decode(on_device, drafter, rows, accelerator, tree_budget=policy, **options)
    assert len(policy.rounds) > 1
    for waits in policy.rounds[1:]:
        # A last token without a tree is a forward of standard decoding, where Transformers looks at the padding.
        of_round = [wait for wait in waits if not any("masking_utils" in frame for frame in wait.frames)]
        assert [wait.kind for wait in of_round] == [TO_HOST, TO_HOST], waits
    if rows == 1 or not options.get("do_sample"):
        expected = decode(model, None, rows, **options)
        assert torch.equal(got.sequences, expected.sequences)
        for score, score_expected in zip(got.scores or (), expected.scores or (), strict=True):
            torch.testing.assert_close(score, score_expected, rtol=1e-4, atol=1e-4)


# GRU cells, of which Domino's head is one, have a kernel of their own for each device.
KINDS = sorted(set(MAKERS) - {"Domino"} | {"causal language model"})
LEVELWISE = {
    *("causal language model", "DSpark", "DSpark for Gemma 4", "EAGLE-3"),
    *("multi-token-prediction layers", "assistant of Gemma 4"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_waits_once_per_draft_or_level_even_beside_a_lookup(kind):
    family = {"multi-token-prediction layers": "qwen3_5"}.get(kind, ONLY_FOR.get(kind, ("llama",))[0])
    model = make_model(family, first_implementation(family))
    drafter = make_model("llama", "eager") if kind == "causal language model" else make(kind, model)
    accelerator = FakeAccelerator()
    on_device, drafter = (moved(copy.deepcopy(one), accelerator) for one in (model, drafter))
    policy, depth = Counting(accelerator), 3
    options = {"tree_lookup": True, "draft_length": depth, "tree_budget": policy}
    got = decode(on_device, drafter, 3, accelerator, **options)
    assert torch.equal(got, decode(model, None, 3))
    assert len(policy.rounds) > 2
    # The first round reads the prompt.
    for waits in policy.rounds[1:]:
        of_round = [wait for wait in waits if not wait.in_model and "masking_utils" not in "".join(wait.frames)]
        assert {wait.kind for wait in of_round} == {TO_HOST}
        assert len(of_round) <= 1 + (depth if kind in LEVELWISE else 1), of_round


class FollowsTheTokenBefore(LogitsProcessor):
    """Needs the tokens so far, and so a walk node by node."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -5.0)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7},
        {"logits_processor": LogitsProcessorList([FollowsTheTokenBefore()])},
    ],
    ids=["greedy", "sampled", "path-dependent"],
)
def test_accepted_paths(rows, together, options):
    """Most nodes that are right are accepted, and rows end one after the other in the middle of a path."""
    if options.get("do_sample") and rows > 1 and not together:
        options = {**options, "top_k": 1}  # rows that walk for themselves draw in an order of their own
    model, _, on_device, _ = pair("llama", 1)
    ends = decode(model, None, rows, **options)[:, -4].tolist()
    options = {**options, "eos_token_id": ends, "return_dict_in_generate": True, "output_scores": together}
    expected = decode(model, None, rows, **options)
    oracle = OracleTreeCandidateGenerator(expected.sequences, VOCAB_SIZE, accuracy=0.9, max_depth=5)
    options |= {"generation_strategy": "ddtree", "candidate_generator": oracle, "tree_budget": 12}
    got = decode(on_device, None, rows, FakeAccelerator(), **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert got.ddtree_stats.tokens_per_forward > 1.2
    for score, score_expected in zip(got.scores or (), expected.scores or (), strict=True):
        torch.testing.assert_close(score, score_expected, rtol=1e-4, atol=1e-4)
