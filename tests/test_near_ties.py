"""Half precision: the tokens of standard decoding, but where its two best are tied within rounding."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.families import make_model
from helpers.near_ties import assert_equal_up_to_near_ties
from helpers.side_by_side import make_oracle, make_prompt

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.testing import compare

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "olmo_hybrid"])
def test_families(family, dtype):
    reference = make_model(family, "sdpa")
    model = type(reference)(reference.config).eval().to(dtype)
    model.load_state_dict(reference.state_dict())
    outputs = assert_equal_up_to_near_ties(
        model, [make_prompt(seed) for seed in range(3)], lambda plain: {"candidate_generator": make_oracle(plain)}
    )
    assert sum(output.ddtree_stats.tokens_per_forward for output in outputs) / len(outputs) > 1.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_shipped_pair(dtype):
    model, drafter, tokenizer = hf_ddtree.load_demo(dtype=dtype)
    prompts = [tokenizer(entry["prompt"], return_tensors="pt").input_ids for entry in demo_prompts()[:3]]
    outputs = assert_equal_up_to_near_ties(model, prompts, lambda _: {"assistant_model": drafter})
    assert all(output.ddtree_stats.tokens_per_forward > 2 for output in outputs)


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_outputs_without_logits_are_refused(name):
    model = make_model("llama", "sdpa")
    ids, options = torch.arange(2, 8)[None], {"max_new_tokens": 4, "do_sample": False}
    right = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    rows = model.generate(ids.repeat(2, 1), **options, return_dict_in_generate=True, output_logits=True)
    without = model.generate(ids, **options, return_dict_in_generate=True)
    for wrong, error, reason in (
        (without, ValueError, "has no logits to compare. .*output_logits=True"),
        (without.sequences, TypeError, "must be an output of `generate..` with logits, but is a `Tensor`"),
        (rows, ValueError, "has 2 rows"),
    ):
        with pytest.raises(error, match=f"`{name}` {reason}"):
            compare(model, **{"plain": right, "tree": right, name: wrong})


class TestComparison:
    """What is no near tie is told from one."""

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls):
        arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        return make_model("llama", "sdpa").generate(make_prompt(), **arguments)

    def test_equal(self, plain):
        comparison = compare(make_model("llama", "sdpa"), plain, plain)
        assert (comparison.step, comparison.gap, comparison.deviation) == (None, None, 0.0)
        assert 0 < comparison.noise < 1e-4

    def test_another_token(self, plain):
        other = type(plain)(plain)
        other.sequences = plain.sequences.clone()
        runner_up = int(plain.logits[5][0].topk(2).indices[1])
        other.sequences[0, -7] = runner_up
        other.logits = tuple(logits + 0.25 * (step == 5) + (step > 5) for step, logits in enumerate(plain.logits))
        comparison = compare(make_model("llama", "sdpa"), plain, other)
        best, second = plain.logits[5][0].topk(2).values
        assert comparison.step == 5 and comparison.gap == pytest.approx(float(best - second))
        assert comparison.gap > 2 * comparison.noise
        assert comparison.deviation == pytest.approx(0.25, abs=1e-5)

    def test_an_output_that_ends_early(self, plain):
        other = type(plain)(plain)
        other.sequences, other.logits = plain.sequences[:, :-2], plain.logits[:-2]
        comparison = compare(make_model("llama", "sdpa"), plain, other)
        assert comparison.step == 10 and comparison.gap == math.inf
