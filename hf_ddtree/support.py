"""Which targets and calls can be decoded by tree, and why the others can't."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import logits_process

from .attention.dispatch import MIXERS
from .compat import (
    CACHE_KEY,
    EMPTY_CACHE_LAYERS,
    is_sharded_by_wrappers,
    is_sharded_over_processes,
    is_split_into_stages,
    tensor_parallel_group,
)
from .placement import execution_device

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
# For each kind of attention layer, what its configuration calls the number of keys that it reaches; None for all keys.
WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Layers with a convolution, and with a recurrence or without one.
STATEFUL_LAYER_TYPES = ("linear_attention", "conv")
# The last two keep nothing.
LAYER_TYPES = (*WINDOWS, *STATEFUL_LAYER_TYPES, "moe", "mlp")
# Kinds of layers that a tree would change, and why.
BY_PLACE = "it picks keys by their places in the cache, and branches that a node must not see have places there too"
MERGING = "it merges keys that stand side by side in the cache, even of different branches"
UNKNOWN_LAYER_TYPES = {
    "indexed_attention": BY_PLACE,
    "deepseek_sparse_attention": BY_PLACE,
    "qwen_sparse_attention": BY_PLACE,
    "minimax_m3_sparse": BY_PLACE,
    "compressed_sparse_attention": MERGING,
    "heavily_compressed_attention": MERGING,
}
CACHE_ARGUMENTS = {"cache", "past_key_values", "cache_params", "state"}
# What Transformers calls two layers in one.
LAYERS_IN_ONE = {"hybrid": ("linear_attention", "full_attention")}
GENERATION_MODES = ("greedy_search", "sample")
GUIDANCE_PROCESSORS = (
    logits_process.ClassifierFreeGuidanceLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
# What asks for another way to draft, and what does not work as it should, whoever sets it; and what to do instead.
OTHER_DRAFTERS = ("use_mtp", "assistant_early_exit")
# What says how others draft. A model's own generation config may hold these, where they change no output.
OTHER_DRAFTERS_KNOBS = {
    "assistant_tokenizer": "Drafters share the target's tokenizer; leave it out.",
    "num_assistant_tokens": "Set `draft_length` and `tree_budget`.",
    "num_assistant_tokens_schedule": "Set `tree_budget`.",
    "assistant_confidence_threshold": "Set `tree_budget`: the nodes go where the drafter is confident.",
    "assistant_lookbehind": "Drafters share the target's tokenizer; leave it out.",
    "target_lookbehind": "Drafters share the target's tokenizer; leave it out.",
    "assistant_ensemble_weight": "Tree decoding changes no probability; leave it out.",
    "speculation_type": "`generation_strategy` says it already; leave it out.",
}
# Caches that Transformers answers in a way of its own before it asks a decoding method.
OTHER_CACHES = {
    "paged": "continuous batching, which does not decode by tree",
    "quantized": "a cache in few bits, from which the entries of rejected branches cannot be taken back",
}
# What says how Transformers looks continuations up, which trees do as well.
LOOKUP_ARGUMENTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
# Rotary embeddings whose frequencies depend on the highest position of a forward.
CHANGING_ROPE_TYPES = ("dynamic", "longrope")
# Models whose attention goes by a key's index in the cache, where a node's siblings have a place as well.
INDEXED_KEYS = ("doge", "git", "gpt_neo")
CACHE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    StaticLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    *EMPTY_CACHE_LAYERS,
)


def check_arguments(
    setting: Callable[[str], Any], set_by_call: Callable[[str], Any], tree_lookup: bool = False
) -> None:
    """Refuses arguments that Transformers would ignore, or refuse for a reason that does not hold here.

    Args:
        setting: The value of an argument of `generate()`, whoever sets it; None if nobody does.
        set_by_call: The same, None if it is but the model's default.
        tree_lookup: Whether continuations are looked up, which the knobs have taken from these arguments.

    Raises:
        ValueError: If there is one. The message says what works instead.
    """
    for name in OTHER_DRAFTERS:
        if setting(name):
            raise ValueError(
                f"Tree decoding does greedy search and sampling, but `{name}` asks for assisted generation by another "
                "drafter. Leave it out and pass a drafter as `assistant_model` or a `TreeCandidateGenerator` as "
                "`candidate_generator`, or generate without `generation_strategy`."
            )
    if not tree_lookup and setting("prompt_lookup_num_tokens") is not None:
        raise ValueError(
            "`prompt_lookup_num_tokens` is set, which Transformers would answer with its own assisted generation. "
            "Leave it out and give `tree_lookup=True` and `draft_length` to `hf_ddtree.ddtree`, or generate without "
            "`generation_strategy`."
        )
    if not tree_lookup and set_by_call("max_matching_ngram_size") is not None:
        raise ValueError(
            "`max_matching_ngram_size` is set, but nothing is looked up. Set `tree_lookup=True` as well, or leave it "
            "out."
        )
    for name, instead in OTHER_DRAFTERS_KNOBS.items():
        if set_by_call(name) is not None:
            raise ValueError(
                f"`{name}` is for the drafters of Transformers' own assisted generation and has no meaning in tree "
                f"decoding. {instead}"
            )
    if setting("is_assistant"):
        raise ValueError(
            "`is_assistant` is True, but a model that drafts for another one must not be decoded by tree. Leave it "
            "out, or generate without `generation_strategy`."
        )
    if (kind := setting("cache_implementation")) in OTHER_CACHES:
        raise ValueError(
            f"`cache_implementation={kind!r}` asks for {OTHER_CACHES[kind]}. Leave `cache_implementation` unset, or "
            "generate without `generation_strategy`."
        )


def check_call(generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> None:
    """Refuses what tree decoding cannot do exactly.

    Raises:
        ValueError: If the call asks for beams, for another way to decode or for guidance.
    """
    if generation_config.num_beams is not None and generation_config.num_beams > 1:
        raise ValueError(
            f"Tree decoding follows one sequence, but `num_beams` is {generation_config.num_beams}. Set "
            "`num_beams=1`, or generate without `generation_strategy`."
        )
    mode = generation_config.get_generation_mode()
    if mode not in GENERATION_MODES:
        raise ValueError(
            f"Tree decoding does greedy search and sampling, but other arguments ask for {mode.replace('_', ' ')}. "
            "Leave them out, or generate without `generation_strategy`."
        )
    if any(isinstance(processor, GUIDANCE_PROCESSORS) for processor in logits_processor):
        raise ValueError(
            "Tree decoding does not work with classifier-free guidance, which runs the model on a second prompt. "
            "Leave `guidance_scale` unset, or generate without `generation_strategy`."
        )


def check_processes(model: PreTrainedModel, generation_config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Refuses a model that is spread over processes in a way that tree decoding does not know.

    Args:
        model: The target.
        generation_config: As `generate()` prepared it.
        synced_gpus: As `generate()` got it.

    Raises:
        ValueError: If DeepSpeed ZeRO-3 or the first FSDP shards the model, if each process has other layers,
            or if the processes could not stay together under this call's arguments.
    """
    name = type(model).__name__
    if is_split_into_stages(model):
        raise ValueError(
            f"{name} is split into pipeline stages (`pp_size`), so no process has all layers. Load it with `tp_size`, "
            "`fsdp_size` or `device_map`, or generate without `generation_strategy`."
        )
    if is_sharded_by_wrappers(model):
        raise ValueError(
            f"{name} is sharded by DeepSpeed ZeRO-3 or FullyShardedDataParallel, which hide the weights that drafters "
            "share. Shard it by `fully_shard` (FSDP2, `DistributedConfig(fsdp_size=...)`), give each process a whole "
            "model, or generate without `generation_strategy`."
        )
    synced = is_sharded_over_processes(model) if synced_gpus is None else synced_gpus
    if synced and generation_config.prefill_chunk_size is not None:
        raise ValueError(
            "`prefill_chunk_size` is set, but all processes run their forwards together (`synced_gpus`), and prompts "
            "of other lengths would need another number of them. Leave `prefill_chunk_size` out."
        )
    if tensor_parallel_group(model) is not None and generation_config.max_time is not None:
        raise ValueError(
            "`max_time` is set, but several processes decode the same sequences (tensor parallelism), and the time "
            "would be over in one of them before the others. Leave `max_time` out and set `max_new_tokens`."
        )


def check_target(model: PreTrainedModel) -> None:
    """Refuses a model whose tokens could come out wrong.

    Raises:
        ValueError: If the model is an encoder-decoder, has an attention implementation that takes no tree mask, or
            layers or a state that the package does not know. The message says what to do instead.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder, but tree decoding is for decoder-only models. Generate without "
            "`generation_strategy`."
        )
    if not isinstance(model, GenerationMixin):
        raise ValueError(
            f"{name} generates in a way of its own, not token by token with Transformers' `GenerationMixin`. Generate "
            "without `generation_strategy`."
        )
    if not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            f"{name} has a configuration without `num_hidden_layers`, a `{type(config).__name__}`, so tree decoding "
            "does not know what its layers are. Generate without `generation_strategy`."
        )
    implementation = config._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"{name} runs with attn_implementation={implementation!r}, which cannot mask a tree. Load it with "
            'attn_implementation="sdpa" or "eager".'
        )
    kinds = set(layer_types(config))
    if unknown := sorted(kinds - set(LAYER_TYPES)):
        reasons = "; ".join(f"{kind}: {UNKNOWN_LAYER_TYPES.get(kind, 'its rule is unknown')}" for kind in unknown)
        raise ValueError(
            f"{name} has layers of a kind that tree decoding does not know ({reasons}). It knows "
            f"{', '.join(LAYER_TYPES)}. Generate without `generation_strategy`."
        )
    if {model.config.model_type, config.model_type}.intersection(INDEXED_KEYS):
        raise ValueError(
            f"{name} chooses among keys by their index, the other branches' included, so a tree would change what it "
            "attends to. Generate without `generation_strategy`."
        )
    if narrow := [WINDOWS[kind] for kind in kinds if window_of(config, kind) == 1]:
        raise ValueError(
            f"{name} has `{narrow[0]}=1`, for which Transformers keeps all keys. Tree decoding works from a window of "
            "2 on. Generate without `generation_strategy`."
        )
    has_state = getattr(model, "_is_stateful", False) or any(kind in STATEFUL_LAYER_TYPES for kind in kinds)
    modules = list(model.modules())
    if not model._supports_default_dynamic_cache() or (has_state and not _has_known_state(config, modules)):
        raise ValueError(
            f"{name} keeps a state that tree decoding does not know how to branch and commit, in "
            f"{', '.join(_layers_with_unknown_state(model)) or 'its layers'}; it knows that of Gated DeltaNet, Kimi "
            "delta attention, Mamba-2 and short convolution layers. Generate without `generation_strategy`."
        )
    parameters = inspect.signature(model.forward).parameters
    if CACHE_KEY not in parameters:
        raise ValueError(
            f"{name} takes no cache, which a tree is verified against. Generate without `generation_strategy`."
        )
    if "position_ids" not in parameters or getattr(config, "alibi", False):
        raise ValueError(
            f"{name} takes its positions from the order of the tokens, not from `position_ids`, so the branches of a "
            "tree cannot share a forward. Generate without `generation_strategy`."
        )
    if across := sorted({type(module).__name__ for module in modules if _attends_elsewhere(module)}):
        raise ValueError(
            f"{name} has layers that keep keys of another sequence, such as an image, beside those of the text "
            f"({', '.join(across)}), and tree decoding does not know how to keep those. Generate without "
            "`generation_strategy`."
        )
    token = torch.zeros((1, 1), dtype=torch.int64, device=execution_device(model))
    step = {CACHE_KEY: DynamicCache(), "position_ids": token, "use_cache": True}
    check_inputs(model, model.prepare_inputs_for_generation(token, **step))


def check_inputs(model: PreTrainedModel, model_inputs: dict[str, Any]) -> None:
    """Refuses a model whose forward does not get the positions that it is to be given.

    Args:
        model: The target.
        model_inputs: What `prepare_inputs_for_generation` makes of some tokens and their `position_ids`.

    Raises:
        ValueError: If there are no positions among them.
    """
    if model_inputs.get("position_ids") is None:
        raise ValueError(
            f"{type(model).__name__} makes its positions from the order of the tokens, not from `position_ids`, so "
            "the branches of a tree cannot share a forward. Generate without `generation_strategy`."
        )


def check_positions(model: PreTrainedModel, input_ids: Tensor, max_length: int | None, position_ids: Tensor) -> None:
    """Refuses a call whose rotary embedding could change under way.

    Some rotary embeddings choose their frequencies for a whole forward by its highest position. The deepest node of a
    tree would choose for all others.

    Args:
        model: The target.
        input_ids: `(batch, length)`, the prompts.
        max_length: Most tokens that the sequences may have, None if no length is set.
        position_ids: Positions of the prompts; the last axis is the sequence.

    Raises:
        ValueError: If the model has such an embedding and the sequences may reach the position where it changes.
    """
    limit = first_changing_position(model)
    if limit is None:
        return
    highest = None if max_length is None else int(position_ids.max()) + max_length - input_ids.shape[1]
    if highest is None or highest > limit:
        raise ValueError(
            f"{type(model).__name__} has a rotary embedding that changes with the length of the sequence beyond "
            f"{limit} positions, which tree decoding cannot follow, and this call may reach "
            f"{'any length' if highest is None else highest}. Set `max_new_tokens` so that prompt and output stay "
            f"within {limit} positions, or generate without `generation_strategy`."
        )


def first_changing_position(model: PreTrainedModel) -> int | None:
    """The number of positions up to which the rotary embeddings stay as they are; None if they always do."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    limits = [
        min(config.max_position_embeddings, entry.get("original_max_position_embeddings") or math.inf)
        for entry in nested or [parameters]
        if entry.get("rope_type") in CHANGING_ROPE_TYPES
    ]
    return min(map(int, limits), default=None)


def check_cache(cache: Cache | None) -> None:
    """Refuses a cache that cannot take a tree and give back one path of it.

    Raises:
        ValueError: If there is no cache, or it is not a `DynamicCache` or `StaticCache` with layers that the package
            knows, which all hold the same tokens.
    """
    if cache is None:
        raise ValueError("Tree decoding needs a cache, but `use_cache` is False. Leave `use_cache` at True.")
    if type(cache) not in (DynamicCache, StaticCache):
        raise ValueError(
            "Tree decoding works on a `DynamicCache` or a `StaticCache`, but the cache is a "
            f"`{type(cache).__name__}`. Leave `cache_implementation` unset and pass no cache of another kind."
        )
    if getattr(cache, "offloading", False):
        raise ValueError(
            "Tree decoding does not work on an offloaded cache. Leave `cache_implementation` unset and pass no cache "
            "with `offloading=True`."
        )
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            raise ValueError(
                f"The `StaticCache` has a layer that keeps the last {layer.max_cache_len} keys alone, of which a tree "
                'would push some out. Set `cache_implementation="static"` and pass no cache: it is then made without '
                "such layers."
            )
        if type(layer) not in CACHE_LAYERS or getattr(layer, "number_of_states", 1) != 1:
            raise ValueError(
                f"The cache has a layer of kind `{type(layer).__name__}`, whose state tree decoding does not know how "
                "to branch and commit. Generate without `generation_strategy`."
            )
    lengths = {int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, DynamicLayer | StaticLayer)}
    if len(lengths) > 1:
        raise ValueError(
            f"The cache has layers with {' and '.join(map(str, sorted(lengths)))} keys. Some are of another sequence, "
            "as in cross-attention to an image, and tree decoding does not know how to keep those. Generate without "
            "`generation_strategy`."
        )


def layer_types(config: PretrainedConfig) -> list[str]:
    """The kind of each decoder layer: its entry in `layer_types`, or what Transformers infers where there are none.

    Two layers in one count as two.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [layer for kind in kinds for layer in LAYERS_IN_ONE.get(kind, (kind,))]
    inferred = (kind for kind in ("sliding_attention", "chunked_attention") if window_of(config, kind) is not None)
    return [next(inferred, "full_attention")] * config.num_hidden_layers


def window_of(config: PretrainedConfig, kind: str) -> int | None:
    """How many keys an attention layer of a kind reaches, the query's own included; None if all."""
    name = WINDOWS.get(kind)
    return None if name is None else getattr(config, name, None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        ValueError: If the model does not have them under `layers` of its decoder.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no list `layers` of decoder layers, so the features that the drafter needs "
            "cannot be recorded. Use another drafter."
        )
    return layers


def _has_known_state(config: PretrainedConfig, modules: Sequence[nn.Module]) -> bool:
    """Whether all that the model keeps besides keys and values is the state of layers that the operators know."""
    mixers = [(type(module), functions) for module in modules if (functions := _functions_of(module))]
    return (
        len(mixers) == sum(kind in STATEFUL_LAYER_TYPES for kind in layer_types(config))
        and getattr(config, "number_of_conv_states", 1) == 1
        and all(hasattr(sys.modules.get(mixer.__module__), name) for mixer, functions in mixers for name in functions)
    )


def _functions_of(module: nn.Module) -> tuple[str, ...]:
    """The functions that the operators stand for in a layer with a known state; none if it is no such layer."""
    name = type(module).__name__
    return next((functions for ending, functions in MIXERS.items() if name.endswith(ending)), ())


def _layers_with_unknown_state(model: PreTrainedModel) -> list[str]:
    """Names of the innermost classes that take a cache and are neither known nor, if there are others, attention."""
    takers = [module for module in model.modules() if _takes_cache(module)]
    outer = {id(taker) for taker in takers if any(_takes_cache(inner) for inner in list(taker.modules())[1:])}
    names = {type(taker).__name__ for taker in takers if id(taker) not in outer and not _functions_of(taker)}
    return sorted({name for name in names if not name.endswith("Attention")} or names)


def _attends_elsewhere(module: nn.Module) -> bool:
    """Whether it is an attention layer for another sequence than the text, whose keys are cached like the text's."""
    return type(module).__name__.endswith("CrossAttention") and _takes_cache(module)


def _takes_cache(module: nn.Module) -> bool:
    return not CACHE_ARGUMENTS.isdisjoint(inspect.signature(module.forward).parameters)
