"""Standard decoding and tree decoding of calls drawn at random: the same tokens, scores and stop position.

The draws are the same in every run; a failing one is printed as the arguments of the call.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_same_cache, assert_same_details
from helpers.side_by_side import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register
from hf_ddtree.testing import OracleTreeCandidateGenerator

# Cases a family, and of the pair that ships.
EXAMPLES = {"llama": 90, "gemma3": 90, "qwen3_5": 110, "demo": 20}

Case = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@cache
def demo() -> tuple[Any, Any, Any]:
    return hf_ddtree.load_demo()


def model_of(family: str) -> PreTrainedModel:
    return demo()[0] if family == "demo" else make_model(family, first_implementation(family))


# --- what is drawn --------------------------------------------------------------------------------------------------

TOKENS = st.integers(1, VOCAB_SIZE - 1)


def some(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the arguments."""
    return st.fixed_dictionaries({}, optional=strategies)


LENGTHS = st.one_of(
    some(max_new_tokens=st.integers(1, 24), min_new_tokens=st.integers(1, 9)),
    some(max_new_tokens=st.integers(10, 24), min_length=st.integers(1, 30)),
    st.fixed_dictionaries({"max_length": st.integers(16, 36)}),
).map(lambda drawn: drawn if "max_length" in drawn else {"max_new_tokens": 16} | drawn)
WARPERS = some(
    temperature=st.sampled_from([0.3, 0.8, 1.5]),
    top_k=st.integers(1, 30),
    top_p=st.sampled_from([0.5, 0.9]),
    min_p=st.sampled_from([0.02, 0.2]),
    typical_p=st.sampled_from([0.6, 0.95]),
)
PROCESSORS = some(
    repetition_penalty=st.sampled_from([0.8, 1.2, 1.6]),
    no_repeat_ngram_size=st.integers(1, 3),
    bad_words_ids=st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3),
    sequence_bias=st.dictionaries(TOKENS, st.sampled_from([-4.0, 2.0]), min_size=1, max_size=3).map(
        lambda drawn: [[[token], bias] for token, bias in drawn.items()]
    ),
    suppress_tokens=st.lists(TOKENS, min_size=1, max_size=5),
)
ENDS = st.one_of(st.none(), TOKENS, st.lists(TOKENS, min_size=2, max_size=8, unique=True))
OUTPUTS = some(output_logits=st.booleans(), output_hidden_states=st.just(True))
KNOBS = some(
    tree_budget=st.sampled_from([1, 2, 7, 16, 30]),
    tree_shape=st.sampled_from(["best_first", "spine_first", "chain"]),
    tree_top_k=st.integers(1, 4),
    draft_length=st.integers(1, 6),
    tree_probabilities=st.sampled_from(["conditional", "marginal"]),
)
DRAFTS = st.one_of(
    st.tuples(st.just("oracle"), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
    st.tuples(st.just("oracle"), st.sampled_from([0.7, 0.9])),
    st.tuples(st.just("drafter"), st.sampled_from(["full_attention", "sliding_attention"])),
)
FORMS = ("tokens", "tokens", "embeddings", "chunks", "cache")


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    """One call: `arguments` for both ways to decode, and the rest by name."""
    samples, batch_size = draw(st.booleans()), draw(st.integers(1, 4))
    arguments = draw(LENGTHS) | draw(PROCESSORS) | draw(OUTPUTS) | {"do_sample": samples}
    arguments["eos_token_id"] = draw(ENDS)
    if samples:
        arguments |= draw(WARPERS)
    # The rows of a sampled batch draw in standard decoding's order where they walk together.
    arguments["output_scores"] = (samples and batch_size > 1) or draw(st.booleans())
    if samples and draw(st.booleans()):
        arguments["num_return_sequences"], arguments["output_scores"] = 2, True
    if family == "demo" and draw(st.booleans()):
        arguments["stop_strings"] = draw(st.lists(st.sampled_from(["\n", "self", ":", "e", "()"]), min_size=1))
    lengths = draw(st.lists(st.integers(1, 14), min_size=batch_size, max_size=batch_size))
    return {
        "arguments": arguments,
        "form": draw(st.sampled_from(FORMS)),
        "lengths": lengths,
        "drafts": draw(DRAFTS),
        "knobs": draw(KNOBS),
        "seed": draw(st.integers(0, 999)),
    }


# --- what is done with it -------------------------------------------------------------------------------------------


def make_inputs(model: PreTrainedModel, form: str, lengths: list[int], seed: int) -> dict[str, Any]:
    """The prompts in the given form. A cache is filled here by standard decoding and copied for each call."""
    length = max(lengths)
    mask = (torch.arange(length) >= length - torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(1, VOCAB_SIZE, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    if form == "embeddings":
        return {"inputs_embeds": model.get_input_embeddings()(tokens).detach(), "attention_mask": mask}
    if form == "chunks":
        return {"input_ids": tokens, "attention_mask": mask, "prefill_chunk_size": 1 + seed % 5}
    if form == "cache":
        arguments = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None, "max_new_tokens": 3}
        first = model.generate(tokens, attention_mask=mask, **arguments)
        mask = torch.nn.functional.pad(mask, (0, 3), value=1)
        return {"input_ids": first.sequences, "attention_mask": mask, CACHE_KEY: first[CACHE_KEY]}
    return {"input_ids": tokens, "attention_mask": mask}


def drafts_of(case: Case, family: str, plain: Tensor) -> dict[str, Any]:
    who, how = case["drafts"]
    if who == "oracle":
        vocab_size = model_of(family).config.vocab_size
        oracle = OracleTreeCandidateGenerator(plain, vocab_size, accuracy=how, seed=case["seed"])
        return {"candidate_generator": oracle}
    if family == "demo":
        return {"assistant_model": demo()[1]}
    return {"assistant_model": make_drafter(model_of(family), how, version=2 if who == "dflash2" else 1)}


def check(family: str, case: Case) -> bool:
    """Compares both ways to decode; returns whether any drafted node was taken."""
    model, seed = model_of(family), case["seed"]
    inputs = make_inputs(model, case["form"], case["lengths"], seed)
    arguments = {**case["arguments"], "pad_token_id": 0, "return_dict_in_generate": True}
    if "stop_strings" in arguments:
        arguments["tokenizer"] = demo()[2]
    if case["form"] == "cache" and "num_return_sequences" in arguments:
        del arguments["num_return_sequences"]  # A cache has as many rows as it has.
    torch.manual_seed(seed)
    plain = model.generate(**copy.deepcopy(inputs), **arguments)
    drafts = drafts_of(case, family, plain.sequences)
    torch.manual_seed(seed)
    arguments |= {"generation_strategy": "ddtree", **drafts, **case["knobs"]}
    tree = model.generate(**copy.deepcopy(inputs), **arguments)
    assert_equal(plain, tree)
    assert_same_details(tree.hidden_states, plain.hidden_states)
    assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])
    return tree.ddtree_stats.tokens_per_forward > 1


# Transformers warns of what these calls ask for, in standard decoding as well.
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.filterwarnings("ignore:Passing `.*` with `inputs_embeds` and without `input_ids`")
@pytest.mark.parametrize("family", EXAMPLES)
def test_any_call_gives_what_plain_decoding_gives(family: str) -> None:
    drafts_were_taken: list[bool] = []

    @settings(
        max_examples=EXAMPLES[family],
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=cases(family))
    def run(case: Case) -> None:
        drafts_were_taken.append(check(family, case))

    run()
    assert len(drafts_were_taken) >= EXAMPLES[family]
    assert sum(drafts_were_taken) > len(drafts_were_taken) / 3


def test_there_are_enough_cases() -> None:
    assert sum(EXAMPLES.values()) >= 300
