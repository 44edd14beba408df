"""Layers with a state under settings that few models have, and over many rounds."""

from __future__ import annotations

import pytest
import torch
from helpers.families import FAMILIES, VOCAB_SIZE, first_implementation, make_model
from helpers.same_output import assert_same_cache

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register
from hf_ddtree.testing import OracleTreeCandidateGenerator

pytestmark = pytest.mark.core
# For each variation: the family, and what it changes.
VARIATIONS = {
    "steps are limited": ("bamba", {"time_step_limit": (0.5, 0.7)}),
    "steps have a lower limit": ("nemotron_h", {"time_step_min": 0.7}),
    "norm behind the gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "inputs are scaled": (
        "falcon_h1",
        {"ssm_in_multiplier": 0.5, "ssm_out_multiplier": 0.7, "attention_out_multiplier": 2.0},
    ),
    "biases": ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False, "num_local_experts": 0}),
    "one group": ("bamba", {"mamba_n_groups": 1}),
    "several shared layers": (
        "zamba2",
        {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4},
    ),
    "unbounded gate": ("bailing_hybrid", {"kda_safe_gate": False}),
    "strong gate": ("bailing_hybrid", {"kda_lower_bound": -60.0}),
    "short kernel": ("lfm2", {"conv_L_cache": 2, "conv_bias": True}),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


def plain_and_tree(model, batch_size: int, new_tokens: int, accuracy: float = 0.8):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCAB_SIZE, (batch_size, 9), generator=generator)
    mask = (torch.arange(9) >= torch.arange(batch_size)[:, None] * 4).long()
    arguments = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
    arguments["return_dict_in_generate"] = True
    plain = model.generate(prompts * mask, **arguments)
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE, accuracy=accuracy)
    tree = model.generate(
        prompts * mask, **arguments, generation_strategy="ddtree", candidate_generator=oracle, tree_budget=16
    )
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert tree.ddtree_stats.tokens_per_forward > 1.2
    return plain, tree


@pytest.mark.parametrize("variation", VARIATIONS)
def test_variations(variation):
    family, changes = VARIATIONS[variation]
    if family not in FAMILIES:
        pytest.skip(f"{family} is newer than this Transformers")
    model = make_model(family, first_implementation(family), **changes)
    # The oldest Transformers cannot decode this one in batches.
    fails_in_batches = variation == "norm behind the gate" and CACHE_KEY == "past_key_values"
    for batch_size in (1,) if fails_in_batches else (1, 3):
        plain, tree = plain_and_tree(model, batch_size, 40)
        assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])


@pytest.mark.parametrize("family", ["kimi_linear", "falcon_h1", "lfm2"])
def test_states_of_hundreds_of_rounds_are_those_of_plain_decoding(family):
    plain, tree = plain_and_tree(make_model(family, first_implementation(family)), 1, 600, accuracy=0.6)
    assert len(tree.ddtree_stats.accepted_lengths) > 200
    assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])
