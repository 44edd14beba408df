"""The shipped pair against standard decoding, at length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.drafters import DFlashDraftModel
from hf_ddtree.interop.versions import CACHE_KEY

NUM_PROMPTS = 50
PROMPTS_PER_TEST = 10


@pytest.fixture(scope="module")
def demo() -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    return hf_ddtree.load_demo()


@pytest.mark.parametrize("first", range(0, NUM_PROMPTS, PROMPTS_PER_TEST))
def test_held_out_prompts_are_identical(demo: Any, first: int) -> None:
    model, drafter, tokenizer = demo
    prompts = demo_prompts()[first : first + PROMPTS_PER_TEST]
    assert len(prompts) == PROMPTS_PER_TEST
    for entry in prompts:
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        plain = model.generate(**inputs, max_new_tokens=256, do_sample=False)
        tree = model.generate(
            **inputs, max_new_tokens=256, do_sample=False, assistant_model=drafter, generation_strategy="ddtree"
        )
        assert tree.tolist() == plain.tolist(), entry["module"]


def test_states_do_not_drift_over_2000_tokens(demo: Any) -> None:
    model, drafter, tokenizer = demo
    inputs = tokenizer(demo_prompts()[0]["prompt"], return_tensors="pt")
    options = {"min_new_tokens": 2000, "max_new_tokens": 2000, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    tree = model.generate(**inputs, **options, assistant_model=drafter, generation_strategy="ddtree")
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert len(tree.ddtree_stats.accepted_lengths) < 2000
    compared = 0
    for layer, expected in zip(tree[CACHE_KEY].layers, plain[CACHE_KEY].layers):
        if hasattr(expected, "recurrent_states"):
            state, expected_state = layer.recurrent_states[0], expected.recurrent_states[0]
            assert torch.norm(state - expected_state) < 1e-4 * torch.norm(expected_state)
            compared += 1
    assert compared == model.config.layer_types.count("linear_attention")
