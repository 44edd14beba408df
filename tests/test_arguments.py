"""Arguments that change nothing, as in standard decoding, and refused ones that Transformers would ignore."""

from types import SimpleNamespace

import pytest
import torch
from helpers.families import make_model
from helpers.side_by_side import NEW_TOKENS, assert_equal, make_oracle, make_prompt, plain_and_tree
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList

import hf_ddtree
from hf_ddtree.interop import sharding

# What has no effect in standard decoding either: what belongs to beams, encoder-decoders, guidance or other caches.
WITHOUT_EFFECT = {
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 2.0},
    "num_beams": {"num_beams": 1},
    "num_beam_groups": {"num_beam_groups": 1},
    "diversity_penalty": {"diversity_penalty": 0.0},
    "penalty_alpha": {"penalty_alpha": 0.6, "do_sample": True, "top_k": 0},
    "low_memory": {"low_memory": True},
    "guidance_scale": {"guidance_scale": 1.0},
    "negative_prompt_ids": {"negative_prompt_ids": make_prompt(), "negative_prompt_attention_mask": make_prompt() > 0},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "cache_config": {"cache_config": {"nbits": 4}},
    "max_cache_len": {"max_cache_len": 3},
    "compile_config": {"compile_config": CompileConfig()},
    "continuous_batching_config": {"continuous_batching_config": {"block_size": 16}},
    "disable_compile": {"disable_compile": True},
    "synced_gpus": {"synced_gpus": False},
    "trust_remote_code": {"trust_remote_code": True},
    "use_cache": {"use_cache": True},
    "logits_to_keep": {"logits_to_keep": 0},
    "use_mtp": {"use_mtp": False},
    "is_assistant": {"is_assistant": False},
    "logits_processor": {"logits_processor": LogitsProcessorList()},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0)},
}
ASSISTED = ("assisted generation", "`assistant_model`", "`candidate_generator`", "generate without")
KNOB = ("drafters of Transformers' own assisted generation",)
# For each argument that is refused: a value, and what the message says.
REFUSED = {
    "use_mtp": (True, ASSISTED),
    "prompt_lookup_num_tokens": (3, ("`tree_lookup=True`", "Leave")),
    "assistant_early_exit": (1, ASSISTED),
    "is_assistant": (True, ("drafts for another", "generate without")),
    "cache_implementation": ("paged", ("continuous batching", "unset")),
}
REFUSED_IF_SET_BY_THE_CALL = {
    "num_assistant_tokens": (7, (*KNOB, "`draft_length`", "`tree_budget`")),
    "num_assistant_tokens_schedule": ("heuristic", (*KNOB, "`tree_budget`")),
    "assistant_confidence_threshold": (0.3, (*KNOB, "`tree_budget`")),
    "max_matching_ngram_size": (3, ("nothing is looked up", "`tree_lookup=True`")),
    "assistant_lookbehind": (4, (*KNOB, "tokenizer")),
    "target_lookbehind": (4, (*KNOB, "tokenizer")),
    "assistant_ensemble_weight": (0.5, (*KNOB, "no probability")),
    "speculation_type": ("dflash", (*KNOB, "`generation_strategy`")),
}
KEYWORDS = {
    "assistant_tokenizer": (object(), (*KNOB, "tokenizer")),
}


@pytest.mark.core
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_without_effect(name):
    model = make_model("llama", "sdpa")
    plain, tree = plain_and_tree(model, lambda: WITHOUT_EFFECT[name])
    assert_equal(plain, tree)
    if WITHOUT_EFFECT[name].get("do_sample") is None:
        assert plain.sequences.tolist() == model.generate(make_prompt(), max_new_tokens=NEW_TOKENS).tolist()


def by_tree(model, **kwargs):
    arguments = {"generation_strategy": "ddtree", "candidate_generator": make_oracle(make_prompt())}
    return model.generate(make_prompt(), **{"max_new_tokens": 4, "do_sample": False} | arguments | kwargs)


def refused(words, call):
    with pytest.raises(ValueError) as raised:
        call()
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_IF_SET_BY_THE_CALL, *KEYWORDS])
def test_refused(name, family, monkeypatch):
    """Through whatever the argument comes: the call, its configuration, the model's, or `custom_generate`."""
    model = make_model(family, "sdpa")
    value, words = (REFUSED | REFUSED_IF_SET_BY_THE_CALL | KEYWORDS)[name]
    words = (f"`{name}", *words)
    refused(words, lambda: by_tree(model, **{name: value}))
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()))
    refused(words, lambda: model.generate(make_prompt(), custom_generate=decoding, **{name: value}))
    if name in KEYWORDS:
        return
    config = GenerationConfig(max_new_tokens=4, **{name: value})
    refused(words, lambda: by_tree(model, generation_config=config))
    monkeypatch.setattr(model, "generation_config", config)
    if name in REFUSED:
        refused(words, lambda: by_tree(model))
    else:
        assert by_tree(model).shape == (1, make_prompt().shape[1] + 4)


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_IF_SET_BY_THE_CALL])
def test_refused_without_the_patch(name):
    """What reaches a decoding method that Transformers calls by itself; it refuses or ignores some of it before."""
    model = make_model("llama", "sdpa")
    value, words = (REFUSED | REFUSED_IF_SET_BY_THE_CALL)[name]
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()))
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, **{name: value})
    hf_ddtree.unregister()
    try:
        refused(words, lambda: model.generate(make_prompt(), config, custom_generate=decoding))
    finally:
        hf_ddtree.register()


@pytest.mark.core
def test_a_drafter_given_to_generate_beside_the_method():
    model = make_model("llama", "sdpa")
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()))
    refused(
        ("`assistant_model`", "`hf_ddtree.ddtree`"),
        lambda: model.generate(make_prompt(), custom_generate=decoding, assistant_model=model),
    )


@pytest.mark.core
def test_constraints():
    model = make_model("llama", "sdpa")
    for arguments in ({"constraints": [object()]}, {"num_beams": 2, "force_words_ids": [[3]]}):
        refused(("generate without `generation_strategy`",), lambda arguments=arguments: by_tree(model, **arguments))


@pytest.mark.core
def test_groups_of_beams():
    model = make_model("llama", "sdpa")
    arguments = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    refused(("`num_beams`", "4"), lambda: by_tree(model, **arguments))


def test_models_that_are_spread_over_processes(monkeypatch):
    """What works is tested in `test_distributed.py`."""
    model = make_model("llama", "sdpa")
    monkeypatch.setattr(model, "_is_fsdp_managed_module", True, raising=False)
    for synced_gpus in (None, True):  # alone, a process waits for no one
        assert by_tree(model, synced_gpus=synced_gpus).shape[1] == make_prompt().shape[1] + 4
    refused(("`prefill_chunk_size`", "`synced_gpus`"), lambda: by_tree(model, synced_gpus=True, prefill_chunk_size=4))
    monkeypatch.setattr(sharding, "_num_processes", lambda: 2)
    monkeypatch.setattr(sharding, "is_deepspeed_zero3_enabled", lambda: True)
    refused(("LlamaForCausalLM", "ZeRO-3", "`fully_shard`", "whole model"), lambda: by_tree(model))
    monkeypatch.setattr(model.config, "distributed_config", SimpleNamespace(pp_size=2), raising=False)
    refused(("LlamaForCausalLM", "stages", "`device_map`"), lambda: by_tree(model))


def test_a_prompt_that_is_made_of_the_bos_token():
    model = make_model("llama", "sdpa")
    arguments = {"inputs": None, "bos_token_id": 7}
    plain, tree = plain_and_tree(model, lambda: arguments, input_ids=torch.tensor([[7]]))
    assert_equal(plain, tree)
    assert plain.sequences[0, 0] == 7 and plain.sequences.shape[1] == 1 + NEW_TOKENS


def test_a_compile_config_is_answered_as_in_plain_decoding(monkeypatch):
    """On a dynamic cache nothing is compiled, and Transformers says so."""
    model = make_model("llama", "sdpa")
    warned = []
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", lambda text, *_: warned.append(text))
    for strategy in (None, "ddtree"):
        warned.clear()
        arguments = {"candidate_generator": make_oracle(make_prompt())} if strategy else {}
        model.generate(
            make_prompt(), max_new_tokens=4, compile_config=CompileConfig(), generation_strategy=strategy, **arguments
        )
        assert any("compile_config" in text for text in warned)
