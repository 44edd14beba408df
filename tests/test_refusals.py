"""What tree decoding refuses, how the refusal reads, and that standard decoding works right afterwards."""

import contextlib
import copy
import math

import pytest
import torch
import transformers
from helpers.families import VOCAB_SIZE, make_config, make_model
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_same_cache
from helpers.side_by_side import make_oracle, make_prompt
from torch import nn
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

import hf_ddtree
from hf_ddtree import CausalLMTreeCandidateGenerator, DraftTree
from hf_ddtree.attention import dispatch
from hf_ddtree.candidate_generators import CombinedTreeCandidateGenerator, PromptLookupTreeCandidateGenerator
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.requirements import check_target

PLAIN = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(params=["llama", "qwen3_5"])
def model(request):
    return make_model(request.param, "sdpa")


@contextlib.contextmanager
def refused(model, *words, error=ValueError, inputs=None):
    """Expects an error whose message holds all `words`, and standard decoding to give the same afterwards."""
    inputs = make_prompt() if inputs is None else inputs
    before = model.generate(inputs, **PLAIN).tolist()
    with pytest.raises(error) as raised:
        yield
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    assert model.generate(inputs, **PLAIN).tolist() == before


def by_tree(model, inputs=None, **kwargs):
    inputs = make_prompt() if inputs is None else inputs
    defaults = {"generation_strategy": "ddtree", "candidate_generator": make_oracle(inputs), **PLAIN}
    return model.generate(inputs, **defaults | kwargs)


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("name", ["tree", "DDTREE", "", 3, ["ddtree"], True])
def test_unknown_strategy(model, name):
    with refused(model, "`generation_strategy`", repr(name), "'ddtree'", "'dflash'", "Leave it out"):
        by_tree(model, generation_strategy=name)


def test_unknown_strategy_in_a_config(model):
    config = GenerationConfig(max_new_tokens=3, generation_strategy="trees")
    with refused(model, "`generation_strategy`", "'trees'", "'ddtree'"):
        model.generate(make_prompt(), generation_config=config, candidate_generator=make_oracle(make_prompt()))


@pytest.mark.core
@pytest.mark.parametrize("strategy", ["ddtree", "dflash"])
def test_no_drafter(model, strategy):
    with refused(model, "`assistant_model`", "`candidate_generator`", "hf_ddtree.load_drafter"):
        model.generate(make_prompt(), generation_strategy=strategy, **PLAIN)


def test_drafter_and_candidate_generator(model):
    with refused(model, "`assistant_model`", "`candidate_generator`", "Pass one"):
        by_tree(model, assistant_model=make_model("llama", "eager"))


@pytest.mark.core
@pytest.mark.parametrize("drafter", ["z-lab/Qwen3.5-4B-DFlash", "headless"])
def test_assistant_model_of_an_unknown_kind(model, drafter):
    assistant = make_model("llama", "eager").model if drafter == "headless" else drafter
    with refused(model, "`assistant_model`", type(assistant).__name__, "hf_ddtree.load_drafter"):
        by_tree(model, assistant_model=assistant, candidate_generator=None)


@pytest.mark.parametrize("kind", ["dflash", "dflash of some tokens", "causal LM"])
def test_a_drafter_without_weights(model, kind):
    settings = {"draft_vocab_size": 20} if kind == "dflash of some tokens" else {}
    drafter = copy.deepcopy(model) if kind == "causal LM" else make_drafter(model, **settings)
    with refused(model, "`assistant_model`", type(drafter).__name__, "'meta'", "hf_ddtree.load_drafter"):
        by_tree(model, assistant_model=drafter.to("meta"), candidate_generator=None)


@pytest.mark.parametrize("generator", [5, DraftTree.root_only(3)])
def test_candidate_generator_of_an_unknown_kind(model, generator):
    with refused(model, "`candidate_generator`", type(generator).__name__, "TreeCandidateGenerator", error=TypeError):
        by_tree(model, candidate_generator=generator)


@pytest.mark.core
@pytest.mark.parametrize("budget", [0, -4, 8.0, 0.5, True, "8", "auto tune", [8]])
@pytest.mark.parametrize("through", ["keyword", "ddtree"])
def test_budgets(budget, through):
    model = make_model("llama", "sdpa")
    with refused(model, "`tree_budget`", repr(budget), "integer of at least 1"):
        if through == "keyword":
            by_tree(model, tree_budget=budget)
        else:
            hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()), tree_budget=budget)


def test_a_budget_in_a_config(model):
    config = GenerationConfig(max_new_tokens=3, generation_strategy="ddtree", tree_budget=0)
    with refused(model, "`tree_budget`", "0", "integer of at least 1"):
        model.generate(make_prompt(), generation_config=config, candidate_generator=make_oracle(make_prompt()))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"tree_top_k": 0}, ("`tree_top_k`", "0", "at least 1")),
        ({"draft_length": 2.5}, ("`draft_length`", "2.5", "at least 1")),
        ({"tree_shape": "bushy"}, ("`tree_shape`", "'bushy'", "'best_first'")),
        ({"return_trees": "yes"}, ("`return_trees`", "'yes'", "True or False")),
    ],
)
def test_other_knobs(model, knobs, words):
    with refused(model, *words):
        by_tree(model, **knobs)


MISSPELT = {
    "tree_bugdet": "tree_budget",
    "tree_lookups": "tree_lookup",
    "draft_len": "draft_length",
    "candidate_generators": "candidate_generator",
    "draft_states": "draft_state",
}


@pytest.mark.core
@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_knobs(model, name):
    suggestion = f"Did you mean `{MISSPELT[name]}`?"
    with refused(model, f"`{name}` is set", suggestion):
        by_tree(model, **{name: 4})
    with refused(model, f"'{name}'", suggestion, error=TypeError):
        hf_ddtree.ddtree(tree_lookup=True, **{name: 4})
    with refused(model, f"`{name}` is set", suggestion):
        by_tree(model, generation_config=GenerationConfig(max_new_tokens=4, **{name: 4}))


def test_names_that_are_like_no_knob_are_left_to_transformers(model):
    with refused(model, "model_kwargs", "temprature"):
        by_tree(model, temprature=0.5)
    assert by_tree(model, generation_config=GenerationConfig(max_new_tokens=4, note="trees")).shape[1]
    with pytest.raises(TypeError, match="'note'. Its knobs"):
        hf_ddtree.ddtree(tree_lookup=True, note=4)


@pytest.mark.core
def test_a_draft_state_that_nobody_uses(model):
    with refused(model, "`draft_state`", "a `str`", "a lookup has no state", error=TypeError):
        model.generate(make_prompt(), generation_strategy="ddtree", tree_lookup=True, draft_state="foo", **PLAIN)
    with refused(model, "`draft_state`", "this `candidate_generator` has no state", error=TypeError):
        by_tree(model, draft_state="foo")
    assert by_tree(model, draft_state=None).shape[1]
    generator = make_oracle(make_prompt())
    generator.state = object()
    assert by_tree(model, candidate_generator=generator, draft_state=generator.state).shape[1]


# --- training mode --------------------------------------------------------------------------------------------------

NOISE = {
    "a setting": lambda model: setattr(model.model.layers[-1].mlp, "activation_dropout", 0.1),
    "a module": lambda model: model.model.layers[-1].add_module("resid", nn.Dropout(0.1)),
    "a router": lambda model: setattr(model.model.layers[-1].mlp, "router_jitter_noise", 0.02),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", NOISE)
def test_noise_in_training_mode(model, kind):
    model = copy.deepcopy(model)
    NOISE[kind](model)
    expected = model.generate(make_prompt(), **PLAIN)
    with pytest.raises(ValueError, match=r"in training mode and `model.layers.*`model.eval\(\)`"):
        by_tree(model.train())
    assert by_tree(model.eval(), candidate_generator=make_oracle(expected)).tolist() == expected.tolist()


def test_training_mode_without_noise(model):
    """As in reinforcement learning with gradient checkpointing."""
    model = copy.deepcopy(model).train()
    model.model.layers[-1].add_module("resid", nn.Dropout(0.0))
    expected = model.generate(make_prompt(), **PLAIN)
    assert by_tree(model, candidate_generator=make_oracle(expected)).tolist() == expected.tolist()


def test_strategy_and_custom_generate(model):
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()))
    with refused(model, "`generation_strategy`", "`custom_generate`", "Pass one"):
        by_tree(model, custom_generate=decoding)


# --- other ways to decode -------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("do_sample", [False, True])
def test_beams(model, do_sample):
    with refused(model, "`num_beams`", "3", "num_beams=1"):
        by_tree(model, num_beams=3, do_sample=do_sample)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"dola_layers": "high"}, "dola generation"),
        ({"force_words_ids": [[3]]}, "constrained beam search"),
    ],
)
def test_other_generation_modes(arguments, words):
    model = make_model("llama", "sdpa")
    with refused(model, words, "greedy search and sampling", "generate without `generation_strategy`"):
        by_tree(model, **arguments)


@pytest.mark.core
def test_classifier_free_guidance(model):
    with refused(model, "classifier-free guidance", "`guidance_scale`"):
        by_tree(model, guidance_scale=1.5)


def test_token_healing(model):
    with refused(model, "`token_healing`", "heal_tokens"):
        by_tree(model, token_healing=True, tokenizer=object())


# --- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_cache_implementations(model, implementation):
    with refused(model, "`cache_implementation`", "offload"):
        by_tree(model, cache_implementation=implementation)


def test_quantized_cache(model):
    """Before Transformers asks for a package, or says that hybrids can't have one."""
    with refused(model, "`cache_implementation='quantized'`", "cannot be taken back", "unset"):
        by_tree(model, cache_implementation="quantized")


def test_caches_passed_in(model):
    with refused(model, "StaticCache", "room for 8 tokens"):
        by_tree(model, **{CACHE_KEY: StaticCache(config=model.config, max_cache_len=8)})
    with refused(model, "`Own`, which changes `crop`, `update` of `DynamicCache`"):
        changed = {"update": DynamicCache.update, "crop": DynamicCache.crop}
        by_tree(model, **{CACHE_KEY: type("Own", (DynamicCache,), changed)(config=model.config)})
    with refused(model, "changes `is_compileable`"):
        by_tree(model, **{CACHE_KEY: type("Own", (DynamicCache,), {"is_compileable": False})(config=model.config)})
    with refused(model, "changes `update`"):
        cache = DynamicCache(config=model.config)
        cache.update = cache.update
        by_tree(model, **{CACHE_KEY: cache})
    with refused(model, "but the cache is a `Own`"):
        by_tree(model, **{CACHE_KEY: type("Own", (StaticCache,), {})(config=model.config, max_cache_len=64)})


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_a_subclass_of_a_dynamic_cache_that_changes_nothing(family):
    model = make_model(family, "sdpa")

    class Named(DynamicCache):
        """With a name, and a method of its own."""

        def __init__(self, name, config):
            super().__init__(config=config)
            self.name = name

        def __repr__(self):
            return self.name

        def num_tokens(self):
            return self.get_seq_length()

    cache, expected_cache = Named("mine", model.config), Named("other", model.config)
    expected = model.generate(make_prompt(), **PLAIN, **{CACHE_KEY: expected_cache})
    output = by_tree(model, candidate_generator=make_oracle(expected), **{CACHE_KEY: cache})
    assert output.tolist() == expected.tolist()
    assert_same_cache(cache, expected_cache)
    assert cache.num_tokens() == expected_cache.get_seq_length()


def test_a_cache_whose_layers_hold_different_sequences():
    """As in models that attend to an image in some layers: those hold no keys of the text."""
    model = make_model("llama", "sdpa")
    cache = model(make_prompt(), **{CACHE_KEY: DynamicCache(config=model.config)})[CACHE_KEY]
    cache.layers[1].crop(-3)
    with refused(model, "layers with 7 and 10 keys", "cross-attention", "Generate without `generation_strategy`"):
        by_tree(model, **{CACHE_KEY: cache})


@pytest.mark.core
def test_no_cache(model):
    with refused(model, "`use_cache`", "False", "Leave `use_cache` at True"):
        by_tree(model, use_cache=False)


# --- models ---------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# For each model with a state that the package does not know: its configuration, and what the refusal says of it.
UNKNOWN_STATES = {
    "Mamba": ({"state_size": 4}, ["keeps a state", "MambaMixer"]),
    "Mamba2": ({"state_size": 8, "num_heads": 4, "n_groups": 1}, ["keeps a state", "Mamba2Mixer"]),
    "Jamba": (
        {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
        ["keeps a state", "in JambaMambaMixer;"],
    ),
    "Rwkv": ({"attention_hidden_size": 32, "context_length": 64}, ["keeps a state", "Rwkv"]),
    "MiniMax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
        ["keeps a state", "MiniMaxLightningAttention"],
    ),
    "RecurrentGemma": (
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8},
        ["keeps a state", "RecurrentGemma"],
    ),
    "Qwen4ExpText": (
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "hc_lowrank": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
        ["layers of a kind", "_attention: it picks keys by their places"],
    ),
}


@pytest.mark.parametrize("name", UNKNOWN_STATES)
def test_models_with_an_unknown_state(name):
    differences, words = UNKNOWN_STATES[name]
    config = getattr(transformers, f"{name}Config")(**SIZES | differences)
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = model_class(config).eval()
    with refused(model, model_class.__name__, *words, "Generate without `generation_strategy`"):
        by_tree(model)


class PositionsOfItsOwn(LlamaForCausalLM):
    """Drops the positions that it is given, as EXAONE 4.5, HyperCLOVA X Vision and Kosmos-2.5 do."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"position_ids": None}


def positionless():
    return PositionsOfItsOwn(make_config("llama"))


def xlm():
    return transformers.XLMWithLMHeadModel(
        transformers.XLMConfig(vocab_size=VOCAB_SIZE, emb_dim=32, n_layers=1, n_heads=2)
    )


def mllama():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **SIZES | {"bos_token_id": 1, "cross_attention_layers": [1], "rope_parameters": rope}
    )
    return transformers.MllamaForCausalLM(config)


def nested():
    with torch.device("meta"):
        return transformers.BltForCausalLM(transformers.BltConfig(vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("is_drafter", [False, True])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (positionless, "not from `position_ids`"),
        (xlm, "not from `position_ids`|takes no cache"),
        (mllama, "keys of another sequence.*MllamaTextCrossAttention"),
        (nested, "without `num_hidden_layers`, a `BltConfig`"),
    ],
)
def test_refused_before_any_forward(make, words, is_drafter):
    model, target = make().eval(), make_model("llama", "sdpa")
    with pytest.raises(ValueError, match=f"`assistant_model` must run on trees.*{words}" if is_drafter else words):
        if is_drafter:
            CausalLMTreeCandidateGenerator(model, target)
        else:
            check_target(model)


def test_encoder_decoder():
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with refused(model, "T5ForConditionalGeneration", "encoder-decoder", "Generate without `generation_strategy`"):
        by_tree(model)


def test_a_model_without_a_cache():
    config = transformers.OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    with refused(model, "OpenAIGPTLMHeadModel", "takes no cache", "Generate without `generation_strategy`"):
        by_tree(model)


def test_chunks_of_one_token():
    config = transformers.Llama4TextConfig(
        **SIZES | {"attention_chunk_size": 1, "num_local_experts": 2, "intermediate_size_mlp": 32}
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    with refused(model, "Llama4ForCausalLM", "`attention_chunk_size=1`", "Generate without `generation_strategy`"):
        by_tree(model)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["paged|eager", "own_attention"])
def test_attention_implementations(model, implementation, monkeypatch):
    with (
        refused(model, type(model).__name__, repr(implementation), '"sdpa"', '"eager"'),
        monkeypatch.context() as patch,
    ):
        patch.setattr(model.config, "_attn_implementation_internal", implementation)
        by_tree(model)


@pytest.mark.core
def test_kernels_that_bypass_the_tree_operators(monkeypatch):
    """A layer whose forward is replaced, as kernels from the Hub do it, and calls functions of its own."""
    model = make_model("qwen3_5", "sdpa")
    layer = model.model.layers[0].linear_attn
    originals = {name: function for name, function in vars(modeling_qwen3_5).items() if name in dispatch.OPERATORS}
    code = type(layer).forward

    def forward(*args, **kwargs):
        with monkeypatch.context() as patch:
            for name, function in originals.items():
                patch.setattr(modeling_qwen3_5, name, getattr(function, "__wrapped__", function))
            return code(layer, *args, **kwargs)

    with refused(model, "Qwen3_5ForCausalLM", "use_kernels=False", "2 of them", "1 recurrences", error=RuntimeError):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", forward, raising=False)
            by_tree(model)


def test_one_bypassed_operator_is_enough(monkeypatch):
    model = make_model("qwen3_5", "sdpa")
    with refused(model, "use_kernels=False", "2 recurrences and 0 convolutions", error=RuntimeError):
        dispatch.uninstall()
        with monkeypatch.context() as patch:
            patch.delitem(dispatch.OPERATORS, "causal_conv1d_fn")
            by_tree(model)
    dispatch.uninstall()


def test_hybrids_under_another_class_name():
    """A layer that only looks like a Gated DeltaNet is one state too many."""
    config = make_config("qwen3_5")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.extra = type("OtherGatedDeltaNet", (nn.Module,), {})()
    with refused(model, "Qwen3_5ForCausalLM", "keeps a state"):
        by_tree(model)


# --- trees of a candidate generator ---------------------------------------------------------------------------------


class Fixed(hf_ddtree.TreeCandidateGenerator):
    """Proposes what a function makes of the root's token."""

    def __init__(self, make_trees):
        super().__init__()
        self.make_trees = make_trees

    def propose(self, context, budget):
        return self.make_trees(int(context.input_ids[0, -1]))


def raw_tree(tokens, parents, log_probs=None):
    return DraftTree(
        torch.tensor(tokens), torch.tensor(parents), None if log_probs is None else torch.tensor(log_probs)
    )


def vectors(*parts):
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


BAD_TREES = {
    "child before parent": (lambda root: [raw_tree([root, 1, 2], [-1, 2, 0])], ("parents", "in order")),
    "own parent": (lambda root: [raw_tree([root, 1, 2], [-1, 1, 0])], ("parents", "in order")),
    "two roots": (lambda root: [raw_tree([root, 1, 2], [-1, -1, 0])], ("parents", "in order")),
    "no root": (lambda root: [raw_tree([root, 1, 2], [0, 0, 0])], ("parents", "in order")),
    "other root": (lambda root: [raw_tree([(root + 1) % VOCAB_SIZE, 1], [-1, 0])], ("root", "context.input_ids")),
    "rising": (lambda root: [raw_tree([root, 1, 2], [-1, 0, 1], [0.0, -2.0, -1.0])], ("log_probs", "whole paths")),
    "no number": (lambda root: [raw_tree([root, 1], [-1, 0], [0.0, math.nan])], ("log_probs", "no numbers")),
    "too few": (lambda root: [raw_tree([root, 1], [-1, 0], [0.0])], ("log_probs", "one per node")),
    "above certain": (lambda root: [raw_tree([root, 1], [-1, 0], [math.inf, math.inf])], ("log_probs", "0 at the")),
    "list": (lambda root: [DraftTree(*vectors([root, 1], [-1, 0]), [0.0, -1.0])], ("log_probs", "vector of float32")),
    "half": (lambda root: [DraftTree(*vectors([root], [-1]), torch.zeros(1).half())], ("log_probs", "float32")),
    "gradients": (
        lambda root: [DraftTree(*vectors([root], [-1]), torch.zeros(1, requires_grad=True))],
        ("log_probs", "float32"),
    ),
    "matrix": (lambda root: [raw_tree([[root]], [[-1]])], ("token_ids", "no vectors")),
    "lists": (lambda root: [DraftTree([root, 1], [-1, 0])], ("token_ids", "no vectors")),
    "empty": (lambda root: [DraftTree(*vectors([], []))], ("token_ids", "no vectors")),
    "negative": (lambda root: [raw_tree([root, -1], [-1, 0])], ("tokens from -1", "knows 0")),
    "two lengths": (lambda root: [raw_tree([root, 1], [-1])], ("same length",)),
    "no tree": (lambda root: [], ("0 trees", "1 rows")),
    "two trees": (lambda root: [raw_tree([root], [-1])] * 2, ("2 trees", "1 rows")),
}


@pytest.mark.core
@pytest.mark.parametrize("tree_lookup", [False, True])
@pytest.mark.parametrize("kind", BAD_TREES)
def test_bad_trees(model, kind, tree_lookup):
    make_trees, words = BAD_TREES[kind]
    with refused(model, "candidate generator", *words):
        by_tree(model, candidate_generator=Fixed(make_trees), tree_lookup=tree_lookup)


@pytest.mark.core
@pytest.mark.parametrize("parents", [[-1, 2, 0], [-1, 1, 0], [-1, -1, 0], [0, 0, 0]])
def test_bad_trees_do_not_come_from_parents(model, parents):
    with refused(model, "`parents["):
        by_tree(model, candidate_generator=Fixed(lambda root: [DraftTree.from_parents([root, 1, 2], parents)]))


@pytest.mark.core
def test_trees_of_the_root_alone_are_fine(model):
    plain = model.generate(make_prompt(), **PLAIN)
    output = by_tree(model, candidate_generator=Fixed(lambda root: [DraftTree.root_only(root)]))
    assert output.tolist() == plain.tolist()


# --- what would change under way ------------------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0, 4.0, 16.0, 2.0],
    "original_max_position_embeddings": 24,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("rope_parameters", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_rotary_embeddings_that_change_with_the_length(rope_parameters):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rope_parameters=rope_parameters,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(make_prompt(length=9), max_new_tokens=15, **options)
    tree = {"generation_strategy": "ddtree", "candidate_generator": make_oracle(plain)}
    assert model.generate(make_prompt(length=9), max_new_tokens=15, **options, **tree).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="beyond 24 positions.* may reach 25"):
        model.generate(make_prompt(length=9), max_new_tokens=17, **options, **tree)


def test_attention_that_counts_keys():
    config = DogeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = DogeForCausalLM(config).eval()
    with pytest.raises(ValueError, match="by their index"):
        model.generate(
            make_prompt(),
            max_new_tokens=4,
            generation_strategy="ddtree",
            candidate_generator=make_oracle(make_prompt()),
        )


# --- what is meant for a strategy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tree_budget", "candidate_generator", "draft_state", "assistant_model"])
def test_without_a_strategy(model, name):
    value = {"tree_budget": 4, "draft_state": object()}.get(name, make_oracle(make_prompt()))
    with pytest.raises(ValueError, match=f'`{name}` is for tree decoding.*Add `generation_strategy="ddtree"`'):
        model.generate(make_prompt(), max_new_tokens=4, **{name: value})


def test_knobs_next_to_custom_generate(model):
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(make_prompt()))
    with pytest.raises(ValueError, match="`tree_budget` is given to `generate.*Give it to `hf_ddtree.ddtree`"):
        model.generate(make_prompt(), max_new_tokens=4, custom_generate=decoding, tree_budget=4)


def test_a_shape_that_the_strategy_excludes(model):
    with pytest.raises(ValueError, match="`tree_shape` is 'spine_first', but `generation_strategy='dflash'`"):
        model.generate(
            make_prompt(),
            max_new_tokens=4,
            generation_strategy="dflash",
            tree_shape="spine_first",
            candidate_generator=make_oracle(make_prompt()),
        )


class Proposing(hf_ddtree.TreeCandidateGenerator):
    """Proposes whatever it is given."""

    def __init__(self, proposal, feature_layers=()):
        super().__init__()
        self.proposal = proposal
        self.feature_layers = feature_layers

    def propose(self, context, budget):
        return self.proposal


@pytest.mark.parametrize(
    "proposal", [None, hf_ddtree.DraftTree.root_only(3), [[3, 4]]], ids=["nothing", "one tree", "lists"]
)
def test_a_proposal_of_the_wrong_type(model, proposal):
    with pytest.raises(TypeError, match="must return a list of `hf_ddtree.DraftTree`, one per row"):
        model.generate(
            make_prompt(), max_new_tokens=4, generation_strategy="ddtree", candidate_generator=Proposing(proposal)
        )


def test_trees_are_checked_unless_the_packages_own_classes_make_them(model):
    class Lookup(PromptLookupTreeCandidateGenerator):
        """Could propose anything."""

    own, users = PromptLookupTreeCandidateGenerator(model), Lookup(model)
    assert not own.needs_checks and users.needs_checks and make_oracle(make_prompt()).needs_checks
    assert not CombinedTreeCandidateGenerator(own, own).needs_checks
    assert CombinedTreeCandidateGenerator(users, own).needs_checks


def test_layers_that_the_target_does_not_have(model):
    with pytest.raises(ValueError, match=r"reads the layers \(0, 99\) of the target"):
        model.generate(
            make_prompt(), max_new_tokens=4, generation_strategy="ddtree", candidate_generator=Proposing([], (0, 99))
        )


def test_a_class_as_candidate_generator(model):
    with pytest.raises(TypeError, match="must be an instance.*the class `Proposing`"):
        model.generate(make_prompt(), max_new_tokens=4, generation_strategy="ddtree", candidate_generator=Proposing)


def test_a_budget_beyond_reason(model):
    with pytest.raises(ValueError, match="`tree_budget` is 1000000, but a tree has at most 4096 nodes"):
        model.generate(
            make_prompt(),
            max_new_tokens=4,
            generation_strategy="ddtree",
            tree_budget=10**6,
            candidate_generator=make_oracle(make_prompt()),
        )


@pytest.mark.core
def test_layers_that_choose_their_attention_in_another_way(monkeypatch):
    """Whose calls tree attention does not see, while the implementation takes no tree mask."""
    model = copy.deepcopy(make_model("llama", "sdpa"))

    class Attention(type(model.model.layers[0].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Attention
    with (
        refused(model, type(model).__name__, "'flash_attention_2'", '"sdpa"', '"eager"'),
        monkeypatch.context() as patch,
    ):
        patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        by_tree(model)
