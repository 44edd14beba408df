"""How tree decoding gets into `generate()`, and that it leaves everything else as it was."""

import copy
import functools
import pickle
import sys
import threading

import pytest
import torch
from helpers.families import FAMILIES, make_model
from helpers.side_by_side import NEW_TOKENS, PROMPT_LENGTH, make_oracle, make_prompt
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
)

import hf_ddtree
from hf_ddtree import strategy
from hf_ddtree.attention.dispatch import OPERATORS
from hf_ddtree.interop.versions import CACHE_KEY

PLAIN = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_5", "sdpa")


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(make_prompt(), **PLAIN)


@pytest.fixture
def clean():
    """Leaves Transformers with the strategies registered, whatever a test does."""
    yield
    hf_ddtree.register()


def generate_by_tree(model, plain, **kwargs):
    arguments = {"inputs": make_prompt(), **PLAIN, "candidate_generator": make_oracle(plain)} | kwargs
    return model.generate(**{"generation_strategy": "ddtree", "return_dict_in_generate": True} | arguments)


# --- where the strategy comes from ----------------------------------------------------------------------------------


@pytest.mark.core
def test_from_keyword(model, plain):
    output = generate_by_tree(model, plain, tree_budget=5)
    assert output.sequences.tolist() == plain.tolist()
    assert max(output.ddtree_stats.tree_sizes) == 5


@pytest.mark.core
@pytest.mark.parametrize("where", ["passed", "positional", "model's"])
def test_from_generation_config(model, plain, where, tmp_path, monkeypatch):
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        generation_strategy="ddtree",
        tree_budget=6,
        draft_length=3,
        tree_shape="spine_first",
        return_trees=True,
        return_dict_in_generate=True,
    )
    config.save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    oracle = make_oracle(plain)
    if where == "passed":
        output = model.generate(make_prompt(), generation_config=config, candidate_generator=oracle)
    elif where == "positional":
        output = model.generate(make_prompt(), config, candidate_generator=oracle)
    else:
        monkeypatch.setattr(model, "generation_config", config)
        output = model.generate(make_prompt(), candidate_generator=oracle)
    assert output.sequences.tolist() == plain.tolist()
    assert max(output.ddtree_stats.tree_sizes) == 6
    assert output.ddtree_stats.trees is not None


@pytest.mark.core
def test_keywords_win_over_the_call_s_config_and_that_over_the_model_s(model, plain, monkeypatch):
    seen = []
    original = strategy.ddtree
    monkeypatch.setattr(strategy, "ddtree", lambda **kwargs: seen.append(kwargs) or original(**kwargs))
    model_config = GenerationConfig(generation_strategy="ddtree", tree_budget=3, tree_top_k=2, draft_length=4)
    monkeypatch.setattr(model, "generation_config", model_config)
    call_config = GenerationConfig(max_new_tokens=4, tree_budget=5, tree_top_k=7)
    model.generate(make_prompt(), generation_config=call_config, candidate_generator=make_oracle(plain), tree_top_k=9)
    assert {name: seen[0][name] for name in ("tree_budget", "tree_top_k", "draft_length")} == {
        "tree_budget": 5,
        "tree_top_k": 9,
        "draft_length": 4,
    }


def test_positional_arguments(model, plain):
    seen = []

    class Recorder(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            return scores

    config = GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0)
    output = model.generate(
        make_prompt(),
        config,
        [Recorder()],
        None,
        None,
        False,
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain),
    )
    assert output.tolist() == plain.tolist()
    assert seen == list(range(PROMPT_LENGTH, PROMPT_LENGTH + NEW_TOKENS))


def test_arguments_given_twice(model):
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(make_prompt(), inputs=make_prompt())


@pytest.mark.core
def test_custom_generate(model, plain):
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(plain), tree_budget=7)
    for _ in range(2):
        output = model.generate(make_prompt(), custom_generate=decoding, **PLAIN, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist()
        assert max(output.ddtree_stats.tree_sizes) == 7


@pytest.mark.core
def test_custom_generate_without_the_patch(model, plain, clean):
    hf_ddtree.unregister()
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(plain))
    output = model.generate(make_prompt(), custom_generate=decoding, **PLAIN, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert isinstance(output, hf_ddtree.DDTreeOutput) and output.ddtree_stats.tokens_per_forward > 1.5


def test_other_custom_generate_callables_are_left_alone(model, plain):
    def custom(model, input_ids, tokenizer=None, own=None, **kwargs):
        return input_ids, own

    assert model.generate(make_prompt(), custom_generate=custom, own=5, max_new_tokens=3)[1] == 5


@pytest.mark.core
def test_dflash_is_a_chain(model, plain, monkeypatch):
    """Of the shape that the generator is asked to build: trees are chains."""
    seen = []
    original = strategy.ddtree
    monkeypatch.setattr(strategy, "ddtree", lambda **kwargs: seen.append(kwargs) or original(**kwargs))
    output = generate_by_tree(model, plain, generation_strategy="dflash")
    assert output.sequences.tolist() == plain.tolist()
    assert seen[0]["tree_shape"] == "chain"


# --- registering ----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_unregister_restores_everything_by_identity(clean):
    hf_ddtree.unregister()
    plain_generate = GenerationMixin.generate
    modules = {sys.modules[type(make_model(family, "eager")).__module__] for family in FAMILIES}
    functions = {(module, name): getattr(module, name, None) for module in modules for name in OPERATORS}
    assert any(function is not None for function in functions.values())

    hf_ddtree.register()
    registered = GenerationMixin.generate
    assert registered is not plain_generate
    hf_ddtree.register()
    assert GenerationMixin.generate is registered
    for family in ("qwen3_5", "qwen3_next"):
        model = make_model(family, "eager")
        generate_by_tree(model, model.generate(make_prompt(), **PLAIN))
    changed = [module for (module, name), function in functions.items() if getattr(module, name, None) is not function]
    assert changed

    for _ in range(2):
        hf_ddtree.unregister()
        assert GenerationMixin.generate is plain_generate
        assert all(getattr(module, name, None) is function for (module, name), function in functions.items())


def test_after_unregistering_the_argument_is_unknown(model, plain, clean):
    hf_ddtree.unregister()
    with pytest.raises(ValueError, match="generation_strategy"):
        model.generate(make_prompt(), generation_strategy="ddtree", **PLAIN)
    assert model.generate(make_prompt(), **PLAIN).tolist() == plain.tolist()
    hf_ddtree.register()
    assert generate_by_tree(model, plain).sequences.tolist() == plain.tolist()


def test_registering_from_many_threads(clean):
    hf_ddtree.unregister()
    plain_generate = GenerationMixin.generate
    barrier = threading.Barrier(8)

    def flip():
        barrier.wait()
        for _ in range(100):
            hf_ddtree.register()
            hf_ddtree.unregister()

    run_in_threads([flip] * 8)
    assert GenerationMixin.generate is plain_generate


@pytest.mark.core
def test_without_the_argument_generate_is_unchanged(model, clean):
    """The same call, down to the arguments that reach Transformers."""
    hf_ddtree.unregister()
    calls = []
    original = GenerationMixin.generate

    @functools.wraps(original)
    def spy(self, *args, **kwargs):
        calls.append((args, kwargs))
        return original(self, *args, **kwargs)

    prompt, config = make_prompt(), GenerationConfig(max_new_tokens=3, pad_token_id=0)
    try:
        GenerationMixin.generate = spy
        hf_ddtree.register()
        model.generate(prompt, config, None, top_k=5, generation_strategy=None)
        hf_ddtree.unregister()
        assert GenerationMixin.generate is spy
    finally:
        GenerationMixin.generate = original
    ((args, kwargs),) = calls
    assert args[0] is prompt and args[1] is config and args[2] is None and len(args) == 3
    assert kwargs == {"top_k": 5}


def test_knobs_without_the_strategy_are_refused_by_transformers(model):
    with pytest.raises(ValueError, match="tree_budget"):
        model.generate(make_prompt(), tree_budget=5, **PLAIN)


@pytest.mark.core
def test_a_class_that_overrides_generate():
    class Louder(LlamaForCausalLM):
        calls = 0

        def generate(self, inputs=None, loudness=1, **kwargs):
            type(self).calls += loudness
            return super().generate(inputs, **kwargs)

    llama = make_model("llama", "sdpa")
    model = Louder(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    plain = model.generate(make_prompt(), loudness=2, **PLAIN)
    assert plain.tolist() == llama.generate(make_prompt(), **PLAIN).tolist()
    assert generate_by_tree(model, plain, loudness=3).sequences.tolist() == plain.tolist()
    assert Louder.calls == 5


# --- threads --------------------------------------------------------------------------------------------------------


def run_in_threads(functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_on_a_shared_model_and_on_two():
    """Plain and tree decoding side by side on one model, and another model beside them."""
    shared, other = make_model("qwen3_5", "sdpa"), make_model("olmo_hybrid", "sdpa")
    jobs = []
    for index, (model, by_tree) in enumerate([(shared, True), (shared, False), (shared, True), (other, True)]):
        prompt = make_prompt(seed=index, length=5 + index)
        expected = model.generate(prompt, **PLAIN)

        def job(model=model, prompt=prompt, expected=expected, by_tree=by_tree, index=index):
            for repeat in range(4):
                kwargs = {}
                if by_tree:
                    oracle = make_oracle(expected, seed=10 * index + repeat)
                    kwargs = {"generation_strategy": "ddtree", "candidate_generator": oracle}
                assert model.generate(prompt, **PLAIN, **kwargs).tolist() == expected.tolist()

        jobs.append(job)
    run_in_threads(jobs)


# --- errors in mid-round --------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Bomb(LogitsProcessor, StoppingCriteria):
    """A processor, criterion or streamer that fails after some tokens."""

    def __init__(self, error, fuse=9):
        self.error, self.fuse = error, fuse

    def burn(self):
        self.fuse -= 1
        if self.fuse < 0:
            raise self.error

    def __call__(self, input_ids, scores):
        self.burn()
        return scores if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self.burn()

    def end(self):
        pass


class FailingGenerator(hf_ddtree.TreeCandidateGenerator):
    """Proposes what an oracle does, with hooks on the target, until it fails."""

    feature_layers = (0, 2)

    def __init__(self, oracle, bomb=None):
        super().__init__()
        self.oracle, self.bomb = oracle, bomb

    def propose(self, context, budget):
        if self.bomb is not None:
            self.bomb.burn()
        return self.oracle.propose(context, budget)


def hooks_of(model):
    return [
        (name, attribute)
        for name, module in model.named_modules()
        for attribute in ("_forward_hooks", "_forward_pre_hooks")
        if getattr(module, attribute)
    ]


@pytest.mark.core
@pytest.mark.parametrize("error", [Boom("in mid-round"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "streamer", "generator", "forward"])
def test_errors_in_mid_round_leave_no_trace(model, plain, where, error, monkeypatch):
    hooks = hooks_of(model)
    cache = DynamicCache(config=model.config)
    bomb = Bomb(error)
    kwargs = {CACHE_KEY: cache}
    if where == "streamer":
        kwargs["streamer"] = bomb
    elif where in ("logits_processor", "stopping_criteria"):
        kwargs[where] = [bomb]
    elif where == "forward":
        bomb.fuse = 2
        original = nn.Linear.forward
        monkeypatch.setattr(
            model.lm_head, "forward", lambda hidden: bomb.burn() or original(model.lm_head, hidden), raising=False
        )
    generator = FailingGenerator(
        make_oracle(plain, accuracy=0.9), Bomb(error, fuse=3) if where == "generator" else None
    )
    with pytest.raises(type(error)):
        generate_by_tree(model, plain, candidate_generator=generator, **kwargs)
    monkeypatch.undo()
    assert cache.get_seq_length() > 0
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert hooks_of(model) == hooks
    assert hf_ddtree.attention.active_pass._active.get() is None
    assert model.generate(make_prompt(), **PLAIN).tolist() == plain.tolist()
    generator.bomb = None
    assert generate_by_tree(model, plain, candidate_generator=generator).sequences.tolist() == plain.tolist()


@pytest.mark.parametrize("where", ["logits_processor", "streamer"])
def test_the_cache_after_an_error_holds_a_prefix_of_what_was_emitted(model, plain, where):
    cache = DynamicCache(config=model.config)
    bomb = Bomb(Boom())
    with pytest.raises(Boom):
        generate_by_tree(model, plain, **{CACHE_KEY: cache, where: bomb if where == "streamer" else [bomb]})
    length = cache.get_seq_length()
    assert PROMPT_LENGTH < length < plain.shape[1]
    logits = model(plain[:, length : length + 1], **{CACHE_KEY: cache}).logits[:, -1]
    torch.testing.assert_close(logits, model(plain[:, : length + 1]).logits[:, -1], rtol=1e-4, atol=1e-4)


# --- the model after use --------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save_pretrained"])
def test_copies_of_a_used_model(plain, how, tmp_path):
    # A model of its own: after `output_hidden_states`, Transformers leaves hooks on a model that cannot be pickled.
    model = make_model.__wrapped__("qwen3_5", "sdpa")
    generate_by_tree(model, plain)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        model.save_pretrained(tmp_path)
        twin = type(model).from_pretrained(tmp_path).eval()
    assert twin.generate(make_prompt(), **PLAIN).tolist() == plain.tolist()
    assert generate_by_tree(twin, plain).sequences.tolist() == plain.tolist()


def test_the_output_can_be_copied(model, plain):
    output = generate_by_tree(model, plain, return_trees=True)
    twin = copy.deepcopy(output)
    assert twin.ddtree_stats.tree_sizes == output.ddtree_stats.tree_sizes
    assert output["sequences"] is output.sequences and "ddtree_stats" in output


def test_none_switches_off_what_the_configuration_says(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "generation_strategy", "ddtree", raising=False)
    monkeypatch.setattr(model.generation_config, "tree_lookup", True, raising=False)
    arguments = {**PLAIN, "return_dict_in_generate": True}
    assert isinstance(model.generate(make_prompt(), **arguments), hf_ddtree.DDTreeOutput)
    assert not isinstance(model.generate(make_prompt(), **arguments, generation_strategy=None), hf_ddtree.DDTreeOutput)


def test_unregister_keeps_a_later_patch(monkeypatch):
    ours = GenerationMixin.generate

    def later(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", later)
    with pytest.raises(RuntimeError, match="patched again after"):
        hf_ddtree.unregister()
    assert GenerationMixin.generate is later
