"""Whole `generate()` calls with a generator that knows standard decoding's continuation and hides it among others."""

from __future__ import annotations

import pytest
import torch
from helpers.families import FAMILIES, VOCAB_SIZE, first_implementation
from helpers.families import make_model as model_of
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.output import DDTreeStats
from hf_ddtree.registration import register
from hf_ddtree.testing import OracleTreeCandidateGenerator

NEW_TOKENS = 200
SETTINGS = {
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "sampled, path-dependent": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy, path-dependent": {"do_sample": False, "repetition_penalty": 1.2, "min_new_tokens": 20, "eos_token_id": 5},
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


def prompt_of(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (1, length), generator=generator)


def generate(model: PreTrainedModel, input_ids: Tensor, **kwargs):
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    torch.manual_seed(1)
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)


def generate_by_tree(model: PreTrainedModel, input_ids: Tensor, truth: Tensor, seed: int = 0, **kwargs):
    oracle = OracleTreeCandidateGenerator(truth[0], VOCAB_SIZE, seed=seed)
    return generate(
        model,
        input_ids,
        generation_strategy="ddtree",
        candidate_generator=oracle,
        tree_budget=16,
        return_trees=True,
        **kwargs,
    )


def assert_branches_won(stats: DDTreeStats) -> None:
    """Many rounds accept more than their root, nearly all of them past a first child, and some for several steps."""
    later_siblings, long_branches = 0, 0
    for [tree], [path] in zip(stats.trees, stats.accepted_paths):
        steps = list(zip(path, path[1:]))
        not_first = sum(tree.children(parent)[0] != child for parent, child in steps)
        later_siblings += not_first
        long_branches += not_first > 1
    rounds = len(stats.accepted_lengths)
    assert sum(length > 1 for length in stats.accepted_lengths) >= rounds / 2
    assert later_siblings >= rounds
    assert long_branches >= rounds / 5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_cache_are_those_of_plain_decoding(family):
    """200 tokens; then standard decoding goes on from the returned cache as if it had been there all along."""
    model = model_of(family, first_implementation(family))
    prompt = prompt_of(7)
    plain = generate(model, prompt, max_new_tokens=NEW_TOKENS + 50).sequences
    assert len(plain[0].unique()) > 10

    by_tree = generate_by_tree(model, prompt, plain)
    assert by_tree.sequences.tolist() == plain[:, : 7 + NEW_TOKENS].tolist()
    assert_branches_won(by_tree.ddtree_stats)
    assert sum(by_tree.ddtree_stats.accepted_lengths) == NEW_TOKENS - 1

    cache = by_tree[CACHE_KEY]
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 7 + NEW_TOKENS - 1
    continued = generate(model, by_tree.sequences, max_new_tokens=50, **{CACHE_KEY: cache})
    assert continued.sequences.tolist() == plain.tolist()


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_short_and_long_prompts(family, length):
    model = model_of(family, first_implementation(family))
    prompt = prompt_of(length, seed=length)
    plain = generate(model, prompt, max_new_tokens=24).sequences
    for seed in range(2):
        by_tree = generate_by_tree(model, prompt, plain, seed=seed, max_new_tokens=24)
        assert by_tree.sequences.tolist() == plain.tolist()


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_samples_what_it_samples_in_plain_decoding(family):
    model = model_of(family, first_implementation(family))
    prompt = prompt_of(5)
    for name, settings in SETTINGS.items():
        plain = generate(model, prompt, max_new_tokens=60, **settings).sequences
        by_tree = generate_by_tree(model, prompt, plain, max_new_tokens=60, **settings)
        assert by_tree.sequences.tolist() == plain.tolist(), name
        assert by_tree.ddtree_stats.tokens_per_forward > 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_padded_at_the_left(family):
    model = model_of(family, first_implementation(family))
    prompt = torch.nn.functional.pad(prompt_of(6), (11, 0))
    mask = torch.nn.functional.pad(torch.ones(1, 6, dtype=torch.long), (11, 0))
    arguments = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(prompt, **arguments)
    oracle = OracleTreeCandidateGenerator(plain[0], VOCAB_SIZE)
    by_tree = model.generate(prompt, generation_strategy="ddtree", candidate_generator=oracle, **arguments)
    assert by_tree.tolist() == plain.tolist()


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_an_oracle_that_is_never_or_always_right(accuracy):
    model = model_of("qwen3_5", "sdpa")
    plain = generate(model, prompt_of(4), max_new_tokens=60).sequences
    oracle = OracleTreeCandidateGenerator(plain[0], VOCAB_SIZE, accuracy=accuracy)
    by_tree = generate(
        model, prompt_of(4), max_new_tokens=60, generation_strategy="ddtree", candidate_generator=oracle
    )
    assert by_tree.sequences.tolist() == plain.tolist()
    assert (by_tree.ddtree_stats.tokens_per_forward > 3) == (accuracy == 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_padded_at_the_left(family):
    """Greedy rows that accept different lengths each round, and settings under which all rows accept as many."""
    model = model_of(family, first_implementation(family))
    padding = torch.tensor([0, 9, 3])
    mask = (torch.arange(12) >= padding[:, None]).long()
    prompts = torch.cat([prompt_of(12, seed) for seed in range(3)]) * mask
    for settings in ({"do_sample": False}, SETTINGS["greedy, path-dependent"], SETTINGS["sampled, path-dependent"]):
        arguments = {"attention_mask": mask, "max_new_tokens": 40, "return_dict_in_generate": True, **settings}
        torch.manual_seed(1)
        plain = model.generate(prompts, **arguments)
        oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE)
        torch.manual_seed(1)
        by_tree = model.generate(prompts, generation_strategy="ddtree", candidate_generator=oracle, **arguments)
        assert by_tree.sequences.tolist() == plain.sequences.tolist(), settings
        assert by_tree.ddtree_stats.tokens_per_forward > 1.2
