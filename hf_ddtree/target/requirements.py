"""Which targets can be decoded with trees, and why the others cannot."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
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

from ..interop.attention_functions import TAKE_MASKS, calls_attention_functions, is_known
from ..interop.models import attention_implementation, is_stateful, takes_dynamic_cache
from ..interop.sharding import (
    is_sharded_by_wrappers,
    is_sharded_over_processes,
    is_split_into_stages,
    tensor_parallel_group,
)
from ..interop.versions import CACHE_KEY, EMPTY_CACHE_LAYERS
from ..validation import UnsupportedError
from .layers import (
    LAYER_TYPES,
    STATEFUL_LAYER_TYPES,
    WINDOWS,
    first_changing_position,
    layer_types,
    num_attention_layers,
    operators_of,
    window_of,
)
from .weights import execution_device

BY_PLACE = "it picks keys by their places in the cache, and branches that a node must not see have places there too"
MERGING = "it merges keys that stand side by side in the cache, even of different branches"

# Kinds of layers whose output a tree would change, and why.
REFUSED_LAYER_TYPES = {
    "indexed_attention": BY_PLACE,
    "deepseek_sparse_attention": BY_PLACE,
    "qwen_sparse_attention": BY_PLACE,
    "minimax_m3_sparse": BY_PLACE,
    "compressed_sparse_attention": MERGING,
    "heavily_compressed_attention": MERGING,
}

# What models call their argument for a cache or a state.
CACHE_ARGUMENTS = {"cache", "past_key_values", "cache_params", "state"}

# Models that attend by a key's index in the cache. A node's siblings take up indices as well.
INDEXED_KEYS = ("doge", "git", "gpt_neo")

# Cache layers that can take a tree and give back one path of it.
CACHE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    StaticLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    *EMPTY_CACHE_LAYERS,
)


# Methods of a cache that do not matter once it is made.
HARMLESS_OVERRIDES = {"__init__", "__repr__"}

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

# Parts of the names of settings that make a forward random in training mode.
NOISE_SETTINGS = ("dropout", "layerdrop", "drop_path", "jitter")


def check_processes(model: PreTrainedModel, generation_config: GenerationConfig, synced_gpus: bool | None) -> None:
    """Refuses a model that is distributed over processes in a way that tree decoding does not support.

    Args:
        model: The target.
        generation_config: As `generate()` prepared it.
        synced_gpus: As `generate()` got it.

    Raises:
        UnsupportedError: If DeepSpeed ZeRO-3 or the first version of FSDP shards the model, if it is split into
            pipeline stages, or if the processes could diverge under this call's arguments.
    """
    name = type(model).__name__
    if is_split_into_stages(model):
        raise UnsupportedError(
            f"{name} is split into pipeline stages (`pp_size`), so no process has all layers. Load it with `tp_size`, "
            "`fsdp_size` or `device_map`, or generate without `generation_strategy`."
        )
    if is_sharded_by_wrappers(model):
        raise UnsupportedError(
            f"{name} is sharded by DeepSpeed ZeRO-3 or FullyShardedDataParallel, which hide the weights that drafters "
            "share. Shard it by `fully_shard` (FSDP2, `DistributedConfig(fsdp_size=...)`), give each process a whole "
            "model, or generate without `generation_strategy`."
        )
    synced = is_sharded_over_processes(model) if synced_gpus is None else synced_gpus
    if synced and generation_config.prefill_chunk_size is not None:
        raise UnsupportedError(
            "`prefill_chunk_size` is set, but all processes run their forwards together (`synced_gpus`), and prompts "
            "of other lengths would need another number of them. Leave `prefill_chunk_size` out."
        )
    if tensor_parallel_group(model) is not None and generation_config.max_time is not None:
        raise UnsupportedError(
            "`max_time` is set, but several processes decode the same sequences (tensor parallelism), and the time "
            "would be over in one of them before the others. Leave `max_time` out and set `max_new_tokens`."
        )


def check_target(model: PreTrainedModel) -> None:
    """Refuses a model whose tokens could come out wrong.

    Raises:
        UnsupportedError: If one of `REFUSALS` has a reason. The message says what to do instead.
    """
    for reason in filter(None, (why_not(model) for why_not in REFUSALS)):
        raise UnsupportedError(f"{type(model).__name__} {reason}")


def check_no_noise(model: PreTrainedModel) -> None:
    """Refuses a model in training mode whose forwards are random.

    Modules in training mode without dropout are fine, as in reinforcement learning with gradient checkpointing.

    Raises:
        UnsupportedError: If a module in training mode has dropout, or noise of another kind, with a rate above 0.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        if setting := _noise_of(module):
            raise UnsupportedError(
                f"{type(model).__name__} is in training mode and `{name}` has {setting}, so every forward is random "
                "and verifying a tree is not what decoding token by token gives. Call `model.eval()`, set the rate to "
                "0, or generate without `generation_strategy`."
            )


def _noise_of(module: nn.Module) -> str | None:
    """The setting of a module that makes its forward random in training mode; None if there is none."""
    if isinstance(module, DROPOUTS):
        return f"dropout with p={module.p}" if module.p > 0 else None
    for name, value in vars(module).items():
        if isinstance(value, float) and value > 0 and any(part in name for part in NOISE_SETTINGS):
            return f"`{name}={value}`"
    return None


def _encoder_decoder(model: PreTrainedModel) -> str | None:
    if not model.config.is_encoder_decoder:
        return None
    return (
        "is an encoder-decoder, but tree decoding is for decoder-only models. Generate without `generation_strategy`."
    )


def _generates_in_its_own_way(model: PreTrainedModel) -> str | None:
    if isinstance(model, GenerationMixin):
        return None
    return (
        "generates in a way of its own, not token by token with Transformers' `GenerationMixin`. Generate without "
        "`generation_strategy`."
    )


def _unknown_number_of_layers(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if hasattr(config, "num_hidden_layers"):
        return None
    return (
        f"has a configuration without `num_hidden_layers`, a `{type(config).__name__}`, so tree decoding does not "
        "know what its layers are. Generate without `generation_strategy`."
    )


def _attention_without_tree_mask(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    implementation = attention_implementation(config)
    if implementation in TAKE_MASKS:
        return None
    if not is_known(implementation):
        reason = "which cannot mask a tree"
    elif num_attention_layers(config) != sum(map(calls_attention_functions, model.get_decoder().modules())):
        reason = "which cannot mask a tree, and its layers do not call it as those of other models do"
    else:
        return None
    return (
        f"runs with attn_implementation={implementation!r}, {reason}. Load it with "
        'attn_implementation="sdpa" or "eager".'
    )


def _unknown_layers(model: PreTrainedModel) -> str | None:
    unknown = sorted(set(layer_types(model.config.get_text_config())) - set(LAYER_TYPES))
    if not unknown:
        return None
    reasons = "; ".join(f"{kind}: {REFUSED_LAYER_TYPES.get(kind, 'its rule is unknown')}" for kind in unknown)
    return (
        f"has layers of a kind that tree decoding does not know ({reasons}). It knows {', '.join(LAYER_TYPES)}. "
        "Generate without `generation_strategy`."
    )


def _attention_by_index(model: PreTrainedModel) -> str | None:
    if not {model.config.model_type, model.config.get_text_config().model_type}.intersection(INDEXED_KEYS):
        return None
    return (
        "chooses among keys by their index, the other branches' included, so a tree would change what it attends to. "
        "Generate without `generation_strategy`."
    )


def _window_of_one(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    narrow = [WINDOWS[kind] for kind in set(layer_types(config)) if window_of(config, kind) == 1]
    if not narrow:
        return None
    return (
        f"has `{narrow[0]}=1`, for which Transformers keeps all keys. Tree decoding works from a window of 2 on. "
        "Generate without `generation_strategy`."
    )


def _unknown_state(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    has_state = is_stateful(model) or any(kind in STATEFUL_LAYER_TYPES for kind in layer_types(config))
    if takes_dynamic_cache(model) and (not has_state or _has_known_state(config, model.modules())):
        return None
    return (
        "keeps a state that tree decoding does not know how to branch and commit, in "
        f"{', '.join(_layers_with_unknown_state(model)) or 'its layers'}; it knows that of Gated DeltaNet, Kimi delta "
        "attention, Mamba-2 and short convolution layers. Generate without `generation_strategy`."
    )


def _no_cache(model: PreTrainedModel) -> str | None:
    if CACHE_KEY in inspect.signature(model.forward).parameters:
        return None
    return "takes no cache, which a tree is verified against. Generate without `generation_strategy`."


def _no_positions(model: PreTrainedModel) -> str | None:
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if takes_positions and not getattr(model.config.get_text_config(), "alibi", False):
        return None
    return (
        "takes its positions from the order of the tokens, not from `position_ids`, so the branches of a tree cannot "
        "share a forward. Generate without `generation_strategy`."
    )


def _attention_to_another_sequence(model: PreTrainedModel) -> str | None:
    across = sorted({type(module).__name__ for module in model.modules() if _attends_elsewhere(module)})
    if not across:
        return None
    return (
        f"has layers that keep keys of another sequence, such as an image, beside those of the text "
        f"({', '.join(across)}), and tree decoding does not know how to keep those. Generate without "
        "`generation_strategy`."
    )


def _positions_of_its_own(model: PreTrainedModel) -> str | None:
    token = torch.zeros((1, 1), dtype=torch.int64, device=execution_device(model))
    step = {CACHE_KEY: DynamicCache(), "position_ids": token, "use_cache": True}
    reason = _drops_positions(model.prepare_inputs_for_generation(token, **step))
    return reason and (_prompt_of_virtual_tokens(model) or reason)


def _prompt_of_virtual_tokens(model: PreTrainedModel) -> str | None:
    """The reason if it is PEFT that drops the positions: it replaces the method of a model with a prompt adapter."""
    adapter: Any = getattr(getattr(model.prepare_inputs_for_generation, "__self__", model), "active_peft_config", None)
    if not getattr(adapter, "is_prompt_learning", False):
        return None
    return (
        f"has a PEFT adapter of type {getattr(adapter.peft_type, 'value', adapter.peft_type)}, which puts virtual "
        "tokens before the prompt and drops `position_ids`, so the branches of a tree cannot share a forward. The "
        "model itself can be decoded by tree, and so can adapters that change weights, such as LoRA. Use one of "
        "these, or generate without `generation_strategy`."
    )


# Each says why a model cannot be decoded by tree, after the name of its class, or returns None. Later ones may rely on
# what earlier ones found.
REFUSALS: tuple[Callable[[PreTrainedModel], str | None], ...] = (
    _encoder_decoder,
    _generates_in_its_own_way,
    _unknown_number_of_layers,
    _attention_without_tree_mask,
    _unknown_layers,
    _attention_by_index,
    _window_of_one,
    _unknown_state,
    _no_cache,
    _no_positions,
    _attention_to_another_sequence,
    _positions_of_its_own,
)


def check_keeps_positions(model: PreTrainedModel, model_inputs: dict[str, Any]) -> None:
    """Refuses a model that drops the positions given to `prepare_inputs_for_generation`.

    Args:
        model: The target.
        model_inputs: The result of `prepare_inputs_for_generation` for some tokens and their `position_ids`.

    Raises:
        UnsupportedError: If it holds no positions.
    """
    if reason := _drops_positions(model_inputs):
        raise UnsupportedError(f"{type(model).__name__} {reason}")


def _drops_positions(model_inputs: dict[str, Any]) -> str | None:
    if model_inputs.get("position_ids") is not None:
        return None
    return (
        "makes its positions from the order of the tokens, not from `position_ids`, so the branches of a tree cannot "
        "share a forward. Generate without `generation_strategy`."
    )


def check_rotary_limit(
    model: PreTrainedModel, input_ids: Tensor, max_length: int | None, position_ids: Tensor
) -> None:
    """Refuses a call in which the rotary embedding could change between forwards.

    Some rotary embeddings choose the frequencies of a whole forward by its highest position. The deepest node of a
    tree would then choose for all others.

    Args:
        model: The target.
        input_ids: `(batch, length)`, the prompts.
        max_length: Limit on the length of the sequences, None if there is none.
        position_ids: Positions of the prompts; the last axis is the sequence.

    Raises:
        UnsupportedError: If the model has such an embedding and the sequences may reach the position where it changes.
    """
    limit = first_changing_position(model)
    if limit is None:
        return
    highest = None if max_length is None else int(position_ids.max()) + max_length - input_ids.shape[1]
    if highest is None or highest > limit:
        raise UnsupportedError(
            f"{type(model).__name__} has a rotary embedding that changes with the length of the sequence beyond "
            f"{limit} positions, which tree decoding cannot follow, and this call may reach "
            f"{'any length' if highest is None else highest}. Set `max_new_tokens` so that prompt and output stay "
            f"within {limit} positions, or generate without `generation_strategy`."
        )


def check_cache(cache: Cache | None) -> None:
    """Refuses a cache that cannot take a tree and give back one path of it.

    Raises:
        UnsupportedError: If there is no cache, or it is not a `DynamicCache` (or a subclass that overrides none of its
            methods) or a `StaticCache`, of known layers that all hold the same tokens.
    """
    if cache is None:
        raise UnsupportedError("Tree decoding needs a cache, but `use_cache` is False. Leave `use_cache` at True.")
    if not isinstance(cache, DynamicCache) and type(cache) is not StaticCache:
        raise UnsupportedError(
            "Tree decoding works on a `DynamicCache` or a `StaticCache`, but the cache is a "
            f"`{type(cache).__name__}`. Leave `cache_implementation` unset and pass no cache of another kind."
        )
    if changed := _changed_methods(cache):
        raise UnsupportedError(
            f"The cache is a `{type(cache).__name__}`, which changes {', '.join(f'`{name}`' for name in changed)} of "
            "`DynamicCache`, and tree decoding does not know what that means for the branches of a tree. Pass a "
            "`DynamicCache`, or a subclass that adds to it and overrides nothing."
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedError(
            "Tree decoding does not work on an offloaded cache. Leave `cache_implementation` unset and pass no cache "
            "with `offloading=True`."
        )
    for layer in cache.layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            raise UnsupportedError(
                f"The `StaticCache` has a layer that keeps the last {layer.max_cache_len} keys alone, of which a tree "
                'would push some out. Set `cache_implementation="static"` and pass no cache: it is then made without '
                "such layers."
            )
        if type(layer) not in CACHE_LAYERS or getattr(layer, "number_of_states", 1) != 1:
            raise UnsupportedError(
                f"The cache has a layer of kind `{type(layer).__name__}`, whose state tree decoding does not know how "
                "to branch and commit. Generate without `generation_strategy`."
            )
    lengths = {int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, DynamicLayer | StaticLayer)}
    if len(lengths) > 1:
        raise UnsupportedError(
            f"The cache has layers with {' and '.join(map(str, sorted(lengths)))} keys. Some are of another sequence, "
            "as in cross-attention to an image, and tree decoding does not know how to keep those. Generate without "
            "`generation_strategy`."
        )


def _changed_methods(cache: Cache) -> list[str]:
    """Methods and properties of `DynamicCache` that a subclass or an instance of it overrides."""
    if not isinstance(cache, DynamicCache):
        return []
    own = {name for kind in type(cache).__mro__ if not issubclass(DynamicCache, kind) for name in vars(kind)}
    overridden = {name: getattr(DynamicCache, name, None) for name in own | set(vars(cache))}
    return sorted(
        name
        for name, original in overridden.items()
        if name not in HARMLESS_OVERRIDES and (callable(original) or isinstance(original, property))
    )


def _has_known_state(config: PretrainedConfig, modules: Iterable[nn.Module]) -> bool:
    """Whether the model has no other state than keys, values and the states of known layers."""
    mixers = [(type(module), functions) for module in modules if (functions := operators_of(module))]
    return (
        len(mixers) == sum(kind in STATEFUL_LAYER_TYPES for kind in layer_types(config))
        and getattr(config, "number_of_conv_states", 1) == 1
        and all(hasattr(sys.modules.get(mixer.__module__), name) for mixer, functions in mixers for name in functions)
    )


def _layers_with_unknown_state(model: PreTrainedModel) -> list[str]:
    """Names of the innermost classes that take a cache and are not known; attention only if there are no others."""
    takers = [module for module in model.modules() if _takes_cache(module)]
    outer = {id(taker) for taker in takers if any(_takes_cache(inner) for inner in list(taker.modules())[1:])}
    names = {type(taker).__name__ for taker in takers if id(taker) not in outer and not operators_of(taker)}
    return sorted({name for name in names if not name.endswith("Attention")} or names)


def _attends_elsewhere(module: nn.Module) -> bool:
    """Whether a module attends to another sequence than the text, whose keys are cached like the text's."""
    return type(module).__name__.endswith("CrossAttention") and _takes_cache(module)


def _takes_cache(module: nn.Module) -> bool:
    return not CACHE_ARGUMENTS.isdisjoint(inspect.signature(module.forward).parameters)
