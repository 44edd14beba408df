"""A strategy that only the model's generation config sets: it gives way to what a call names."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.families import make_model
from helpers.same_output import assert_same_cache
from helpers.side_by_side import NEW_TOKENS, make_oracle, make_prompt
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation import BaseStreamer

import hf_ddtree
from hf_ddtree import strategy
from hf_ddtree.interop.versions import CACHE_KEY

STANDARD = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def warned(monkeypatch):
    """The warnings that a call is decoded by the standard method, without Transformers' memory of earlier ones."""
    texts = []
    monkeypatch.setattr(strategy.logger, "warning_once", lambda text, *_: texts.append(text))
    return texts


@pytest.fixture(params=["llama", "qwen3_5"])
def model(request, monkeypatch):
    model = make_model(request.param, "sdpa")
    config = GenerationConfig(pad_token_id=0, generation_strategy="ddtree", tree_lookup=True, tree_budget=5)
    monkeypatch.setattr(model, "generation_config", config)
    return model


def standard(model, **kwargs):
    return model.generate(make_prompt(), **{"generation_strategy": None, **STANDARD} | kwargs)


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.pieces.append("end")


# --- calls that cannot be decoded by tree ---------------------------------------------------------------------------

UNSUPPORTED = {
    "beams": ({"num_beams": 3}, "`num_beams` is 3"),
    "sampled beams": ({"num_beams": 2, "do_sample": True, "num_return_sequences": 2}, "`num_beams` is 2"),
    "no cache": ({"use_cache": False}, "`use_cache` is False"),
    "guidance": ({"guidance_scale": 1.5}, "classifier-free guidance"),
    "another drafter's knob": ({"num_assistant_tokens": 4}, "`num_assistant_tokens`"),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_calls_that_are_not_supported_are_decoded_by_the_standard_method(model, kind, warned):
    arguments, reason = UNSUPPORTED[kind]
    torch.manual_seed(0)
    expected = standard(model, **arguments)
    torch.manual_seed(0)
    output = model.generate(make_prompt(), **STANDARD | arguments)
    assert output.tolist() == expected.tolist()
    assert len(warned) == 1 and reason in warned[0] and "`generation_strategy`" in warned[0]


@pytest.mark.core
def test_a_streamer_gets_the_prompt_once(model, warned):
    streamers = Recorder(), Recorder()
    standard(model, use_cache=False, streamer=streamers[0])
    model.generate(make_prompt(), **STANDARD, use_cache=False, streamer=streamers[1])
    assert streamers[0].pieces == streamers[1].pieces and warned


def test_beams_have_nothing_to_stream(model, warned):
    """As without the strategy; a streamer that is ignored would leave its consumer waiting for ever."""
    for arguments in ({}, {"generation_strategy": "standard"}):
        with pytest.raises(ValueError, match="`streamer` .*`num_beams`"):
            model.generate(make_prompt(), **STANDARD, num_beams=2, streamer=Recorder(), **arguments)
    assert not warned


def test_a_model_that_is_not_supported(model, warned):
    noisy = copy.deepcopy(model).train()
    noisy.model.layers[-1].mlp.register_forward_hook(lambda module, args, output: dropout(output))
    noisy.model.layers[-1].mlp.dropout = dropout = nn.Dropout(0.5)
    torch.manual_seed(0)
    expected = standard(noisy)
    torch.manual_seed(0)
    assert noisy.generate(make_prompt(), **STANDARD).tolist() == expected.tolist()
    assert "dropout with p=0.5" in warned[0]


def test_a_cache_that_is_not_supported(model, warned):
    class Own(DynamicCache):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    caches = Own(config=model.config), Own(config=model.config)
    expected = standard(model, **{CACHE_KEY: caches[0]})
    output = model.generate(make_prompt(), **STANDARD, **{CACHE_KEY: caches[1]})
    assert output.tolist() == expected.tolist()
    assert_same_cache(caches[0], caches[1])
    assert "changes `update`" in warned[0]


@pytest.mark.core
@pytest.mark.parametrize(
    "named",
    [{"generation_strategy": "ddtree"}, {"tree_budget": 4}, {"tree_lookup": True}, {"candidate_generator": None}],
    ids=lambda named: next(iter(named)),
)
def test_calls_that_name_something_are_refused(model, named, warned):
    if "candidate_generator" in named:
        named = {"candidate_generator": make_oracle(make_prompt())}
    with pytest.raises(ValueError, match="`num_beams` is 2"):
        model.generate(make_prompt(), **STANDARD, num_beams=2, **named)
    config = GenerationConfig(num_beams=2, max_new_tokens=4, tree_budget=3)
    with pytest.raises(ValueError, match="`num_beams` is 2"):
        model.generate(make_prompt(), generation_config=config)
    assert not warned


def test_a_copy_of_the_model_s_config_names_nothing(model, warned):
    """As pipelines and servers pass it."""
    config = copy.deepcopy(model.generation_config)
    config.update(num_beams=2, **STANDARD)
    expected = standard(model, num_beams=2)
    assert model.generate(make_prompt(), generation_config=config).tolist() == expected.tolist()
    assert "`num_beams` is 2" in warned[0]


def test_wrong_values_are_errors_all_the_same(model, warned):
    model.generation_config.tree_budget = 0
    with pytest.raises(ValueError, match="`tree_budget` must be"):
        model.generate(make_prompt(), **STANDARD)
    assert not warned


def test_one_warning_for_each_reason(model, monkeypatch):
    texts = []
    type(strategy.logger).warning_once.cache_clear()
    monkeypatch.setattr(strategy.logger, "warning", lambda text, *_: texts.append(text))
    for num_beams in (5, 6, 5):
        model.generate(make_prompt(), **STANDARD, num_beams=num_beams)
    assert ["`num_beams` is 5" in texts[0], "`num_beams` is 6" in texts[1], len(texts)] == [True, True, 2]


def test_without_a_drafter(model, warned):
    model.generation_config.tree_lookup = False
    assert model.generate(make_prompt(), **STANDARD).tolist() == standard(model).tolist()
    assert "needs a drafter" in warned[0]


# --- switching it off -----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("where", ["keyword", "config"])
def test_standard_switches_it_off(model, where):
    expected = standard(model, return_dict_in_generate=True)
    arguments = {**STANDARD, "return_dict_in_generate": True}
    if where == "keyword":
        output = model.generate(make_prompt(), **arguments, generation_strategy="standard")
    else:
        config = GenerationConfig(**arguments, generation_strategy="standard")
        output = model.generate(make_prompt(), generation_config=config)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert not isinstance(output, hf_ddtree.DDTreeOutput)
    by_tree = model.generate(make_prompt(), **arguments)
    assert isinstance(by_tree, hf_ddtree.DDTreeOutput) and by_tree.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.core
def test_a_custom_generate_that_the_call_names(model):
    assert model.generate(make_prompt(), custom_generate=lambda model, input_ids, **_: 7, **STANDARD) == 7
    decoding = hf_ddtree.ddtree(tree_lookup=True, tree_budget=3)
    output = model.generate(make_prompt(), custom_generate=decoding, **STANDARD, return_dict_in_generate=True)
    assert max(output.ddtree_stats.tree_sizes) <= 3
    config = GenerationConfig(generation_strategy="dflash", **STANDARD)
    with pytest.raises(ValueError, match="Both `generation_strategy` and `custom_generate`"):
        model.generate(make_prompt(), generation_config=config, custom_generate=decoding)


# --- as the assistant of another model ------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("of_target", [False, True])
def test_the_assistant_of_transformers_assisted_decoding(of_target, monkeypatch):
    """The target's generation config reaches the assistant as well, with what stands in it."""
    target, assistant = make_model("llama", "sdpa"), copy.deepcopy(make_model("llama", "eager"))
    config = GenerationConfig(pad_token_id=0, generation_strategy="ddtree", tree_lookup=True)
    monkeypatch.setattr(target if of_target else assistant, "generation_config", config)
    expected = standard(target)
    output = standard(target, assistant_model=assistant)
    assert output.tolist() == expected.tolist()


@pytest.mark.core
def test_an_assistant_that_a_call_asks_to_use_the_strategy(model):
    with pytest.raises(ValueError, match="`is_assistant` is True"):
        model.generate(make_prompt(), **STANDARD, generation_strategy="ddtree", is_assistant=True)


# --- models with adapters of PEFT ----------------------------------------------------------------------------


def test_a_peft_prompt_adapter_is_named_as_the_reason(monkeypatch):
    """PEFT puts its own method in the place of the model's, which drops the positions."""
    model = make_model("llama", "sdpa")
    original = model.prepare_inputs_for_generation

    class Adapter:
        active_peft_config = SimpleNamespace(is_prompt_learning=True, peft_type=SimpleNamespace(value="PROMPT_TUNING"))

        def prepare_inputs_for_generation(self, *args, **kwargs):
            return original(*args, **kwargs) | {"position_ids": None}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", Adapter().prepare_inputs_for_generation)
    with pytest.raises(
        ValueError, match="PEFT adapter of type PROMPT_TUNING, which puts virtual tokens before"
    ) as error:
        model.generate(make_prompt(), **STANDARD, generation_strategy="ddtree", tree_lookup=True)
    assert "The model itself can be decoded by tree" in str(error.value)


@pytest.mark.parametrize("drafter", ["lookup", "DFlash", "causal LM"])
def test_an_adapter_around_the_embeddings(drafter):
    """As PEFT wraps them for a LoRA: the number of tokens is that of the layer inside."""

    class Wrapped(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, token_ids):
            return 1.01 * self.base_layer(token_ids)

    model, demo_drafter, tokenizer = hf_ddtree.load_demo()
    small = copy.deepcopy(model)
    for adapted in (model, small) if drafter == "causal LM" else (model,):
        adapted.set_input_embeddings(Wrapped(adapted.get_input_embeddings()))
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
    expected = model.generate(**inputs, **STANDARD)
    arguments = {"DFlash": {"assistant_model": demo_drafter}, "causal LM": {"assistant_model": small}}
    output = model.generate(
        **inputs,
        **STANDARD,
        generation_strategy="ddtree",
        tree_budget=8,
        return_dict_in_generate=True,
        **arguments.get(drafter, {"tree_lookup": True}),
    )
    assert output.sequences.tolist() == expected.tolist()
    assert max(output.ddtree_stats.tree_sizes) > 0
