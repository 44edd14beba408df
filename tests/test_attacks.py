"""What once gave wrong tokens or raw errors: models, numbers and neighbours that do the unexpected."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_oracle, make_prompt
from transformers import (
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    StoppingCriteria,
)

import hf_ddtree
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import top_candidates

GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def sharpen(model):
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    return model.eval()


def test_a_model_that_moves_its_positions():
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 32, "model_type": "siglip_vision_model"}
    config = PaliGemmaConfig(
        text_config=SIZES | {"model_type": "gemma"},
        vision_config=vision,
        image_token_id=VOCAB_SIZE - 1,
        projection_dim=32,
        hidden_size=32,
    )
    model = sharpen(PaliGemmaForConditionalGeneration(config))
    arguments = {"input_ids": make_prompt(), "token_type_ids": torch.zeros_like(make_prompt())}
    plain = model.generate(**arguments, **GREEDY)
    tree = model.generate(
        **arguments, **GREEDY, generation_strategy="ddtree", candidate_generator=make_oracle(plain), return_trees=True
    )
    assert tree.tolist() == plain.tolist()


@pytest.mark.parametrize("kind", ["gpt_neo", "window of 1"])
def test_attention_by_the_index_of_a_key(kind):
    if kind == "gpt_neo":
        config = GPTNeoConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
        )
        model, message = GPTNeoForCausalLM(config), "by their index"
    else:
        model, message = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1)), "`sliding_window=1`"
    with pytest.raises(ValueError, match=message):
        model.eval().generate(
            make_prompt(), **GREEDY, generation_strategy="ddtree", candidate_generator=make_oracle(make_prompt())
        )


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_branch_of_nan(family, batch):
    """A token whose embedding is NaN, which standard decoding never emits, among those drafted."""
    model = copy.deepcopy(make_model(family, "sdpa"))
    prompt = torch.cat([make_prompt(seed) for seed in range(batch)])
    plain = model.generate(prompt, **GREEDY)
    unused = next(token for token in range(1, VOCAB_SIZE) if token not in plain)
    model.get_input_embeddings().weight.data[unused] = math.nan

    class Spoiled(hf_ddtree.TreeCandidateGenerator):
        """Drafts the right token and, beside it, the one that spoils everything; now and then the right one alone."""

        def propose(self, context, budget):
            trees = []
            for row, (position, root) in enumerate(zip(context.root_positions, context.input_ids[:, -1].tolist())):
                if position + 1 >= plain.shape[1]:
                    trees.append(hf_ddtree.DraftTree.root_only(root))
                    continue
                tokens = [root, int(plain[row, position + 1])] + [unused] * (position % 3 > 0)
                trees.append(hf_ddtree.DraftTree.from_parents(tokens, [-1, 0, 0][: len(tokens)]))
            return trees

    tree = model.generate(
        prompt, **GREEDY, generation_strategy="ddtree", candidate_generator=Spoiled(), return_dict_in_generate=True
    )
    assert tree.sequences.tolist() == plain.tolist()
    assert 2 in tree.ddtree_stats.accepted_lengths and 1 in tree.ddtree_stats.accepted_lengths
    again = model.generate(prompt, **GREEDY, return_dict_in_generate=True)
    for layer, expected in zip(tree[CACHE_KEY].layers, again[CACHE_KEY].layers):
        if hasattr(expected, "recurrent_states"):
            torch.testing.assert_close(layer.recurrent_states[0], expected.recurrent_states[0], rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_a_branch_of_nan_while_a_row_is_behind(family, cache_implementation):
    """Its root gets NaN from it, times a weight of zero, and must not stay where the other row has a token."""
    model = copy.deepcopy(make_model(family, "sdpa"))
    prompt = torch.cat([make_prompt(seed) for seed in range(2)])
    plain = model.generate(prompt, **GREEDY)
    unused = next(token for token in range(1, VOCAB_SIZE) if token not in plain)
    model.get_input_embeddings().weight.data[unused] = math.nan

    class Spoiled(hf_ddtree.TreeCandidateGenerator):
        """Drafts the right tokens for the first row alone, and in every second round what spoils everything."""

        num_rounds = 0

        def propose(self, context, budget):
            self.num_rounds += 1
            first, second = context.roots
            position = context.root_positions[0]
            if self.num_rounds % 2:
                right = plain[0, position + 1 : position + 3].tolist()
                return [hf_ddtree.DraftTree.chain([first, *right]), hf_ddtree.DraftTree.root_only(second)]
            return [hf_ddtree.DraftTree.root_only(first), hf_ddtree.DraftTree.chain([second, unused])]

    tree = model.generate(
        prompt,
        **GREEDY,
        generation_strategy="ddtree",
        candidate_generator=Spoiled(),
        cache_implementation=cache_implementation,
        return_dict_in_generate=True,
    )
    assert tree.sequences.tolist() == plain.tolist()
    assert {1, 3} <= set(tree.ddtree_stats.accepted_lengths)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_distribution(bad):
    logits = torch.randn(3, 10)
    logits[1] = bad
    tree = build_tree(*top_candidates(logits, 4), root_token_id=5, budget=8)
    assert tree.depths.max() == 1 and tree.num_drafted == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_drafter_of_bad_numbers(bad):
    model = make_model("qwen3_5", "sdpa")
    drafter = make_drafter(model)
    drafter.fc.weight.data.fill_(bad)
    plain = model.generate(make_prompt(), **GREEDY)
    tree = model.generate(make_prompt(), **GREEDY, generation_strategy="ddtree", assistant_model=drafter)
    assert tree.tolist() == plain.tolist()


def test_neighbours_that_write_into_what_they_get():
    model = make_model("qwen3_5", "sdpa")
    plain = model.generate(make_prompt(), **GREEDY)
    oracle = make_oracle(plain)

    class Scribbler(hf_ddtree.TreeCandidateGenerator):
        def propose(self, context, budget):
            trees = oracle.propose(context, budget)
            context.input_ids.zero_()
            return trees

    class Streamer:
        def put(self, value):
            if value.ndim == 1:  # the prompt, first of all, is the caller's own tensor in standard decoding as well
                value.zero_()

        def end(self):
            pass

    options = GREEDY | {"generation_strategy": "ddtree", "candidate_generator": Scribbler(), "streamer": Streamer()}
    assert model.generate(make_prompt(), **options).tolist() == plain.tolist()


@pytest.mark.parametrize("tree_lookup", [False, True])
def test_a_generator_that_writes_into_the_tree_of_last_round(tree_lookup):
    """One object, asked for children, depths and mask in every round; and no call of the base's `__init__`."""
    model = make_model("llama", "sdpa")
    plain = model.generate(make_prompt(), **GREEDY)

    class Thrifty(hf_ddtree.TreeCandidateGenerator):
        def __init__(self):
            self.tree = hf_ddtree.DraftTree.from_parents([0, 1, 2, 3], [-1, 0, 0, 2])

        def start(self, cached_ids, num_cached):
            pass

        def propose(self, context, budget):
            place = context.root_positions[0]
            token, following = [*plain[0, place + 1 : place + 3].tolist(), 0, 0][:2]
            other = int(plain[0, place - 1])
            self.tree.token_ids[:] = torch.tensor(
                [int(context.input_ids[0, -1]), other + (other == token), token, following]
            )
            # The right path is the second child's in even rounds, and the first child's a chain in others.
            self.tree.parents[:] = torch.tensor([-1, 0, 0, 2] if place % 2 else [-1, 0, 1, 2])
            return [self.tree]

    tree = model.generate(
        make_prompt(),
        **GREEDY,
        generation_strategy="ddtree",
        candidate_generator=Thrifty(),
        tree_lookup=tree_lookup,
        return_dict_in_generate=True,
        return_trees=True,
    )
    assert tree.sequences.tolist() == plain.tolist()
    assert 3 in tree.ddtree_stats.accepted_lengths


def test_a_criterion_that_replaces_tokens():
    class Replace(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] % 7 == 0:
                input_ids[:, -1] = 3
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = make_model("qwen3_5", "sdpa")
    plain = model.generate(make_prompt(), **GREEDY, stopping_criteria=[Replace()])
    tree = model.generate(
        make_prompt(),
        **GREEDY,
        stopping_criteria=[Replace()],
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain),
    )
    assert tree.tolist() == plain.tolist()


def test_a_prepared_config_is_taken():
    model = make_model("llama", "sdpa")
    config, _ = model._prepare_generation_config(GenerationConfig(**GREEDY))
    plain = model.generate(make_prompt(), generation_config=config)
    tree = model.generate(
        make_prompt(), generation_config=config, generation_strategy="ddtree", candidate_generator=make_oracle(plain)
    )
    assert tree.tolist() == plain.tolist()


def test_a_state_of_another_drafter_starts_anew():
    model = make_model("qwen3_5", "sdpa")
    options = GREEDY | {"generation_strategy": "ddtree", "return_dict_in_generate": True}
    first = model.generate(make_prompt(), **options, assistant_model=make_drafter(model))
    other = make_drafter(model).double()
    prompt = torch.cat((first.sequences, make_prompt(1)), dim=1)
    seen = {"attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **GREEDY, **seen)
    going_on = seen | {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
    second = model.generate(prompt, **options, **going_on, assistant_model=other)
    assert second.sequences.tolist() == expected.tolist()


def test_an_ordinary_turn_after_inference_mode():
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    options = GREEDY | {"generation_strategy": "ddtree", "return_dict_in_generate": True, "assistant_model": drafter}
    with torch.inference_mode():
        first = model.generate(make_prompt(), **options)
    prompt = torch.cat((first.sequences.clone(), make_prompt(1)), dim=1)
    seen = {"attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **GREEDY, **seen)
    going_on = seen | {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
    assert model.generate(prompt, **options, **going_on).sequences.tolist() == expected.tolist()
