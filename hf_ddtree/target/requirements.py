"""Which targets can be decoded with trees, and why the others cannot."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
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

from ..interop.versions import (
    CACHE_KEY,
    EMPTY_CACHE_LAYERS,
    is_sharded_by_wrappers,
    is_sharded_over_processes,
    is_split_into_stages,
    tensor_parallel_group,
)
from .layers import (
    LAYER_TYPES,
    STATEFUL_LAYER_TYPES,
    WINDOWS,
    first_changing_position,
    layer_types,
    operators_of,
    window_of,
)
from .weights import execution_device

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")


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


def _has_known_state(config: PretrainedConfig, modules: Sequence[nn.Module]) -> bool:
    """Whether all that the model keeps besides keys and values is the state of layers that the operators know."""
    mixers = [(type(module), functions) for module in modules if (functions := operators_of(module))]
    return (
        len(mixers) == sum(kind in STATEFUL_LAYER_TYPES for kind in layer_types(config))
        and getattr(config, "number_of_conv_states", 1) == 1
        and all(hasattr(sys.modules.get(mixer.__module__), name) for mixer, functions in mixers for name in functions)
    )


def _layers_with_unknown_state(model: PreTrainedModel) -> list[str]:
    """Names of the innermost classes that take a cache and are neither known nor, if there are others, attention."""
    takers = [module for module in model.modules() if _takes_cache(module)]
    outer = {id(taker) for taker in takers if any(_takes_cache(inner) for inner in list(taker.modules())[1:])}
    names = {type(taker).__name__ for taker in takers if id(taker) not in outer and not operators_of(taker)}
    return sorted({name for name in names if not name.endswith("Attention")} or names)


def _attends_elsewhere(module: nn.Module) -> bool:
    """Whether it is an attention layer for another sequence than the text, whose keys are cached like the text's."""
    return type(module).__name__.endswith("CrossAttention") and _takes_cache(module)


def _takes_cache(module: nn.Module) -> bool:
    return not CACHE_ARGUMENTS.isdisjoint(inspect.signature(module.forward).parameters)
