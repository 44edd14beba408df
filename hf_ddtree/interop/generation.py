"""The private parts of `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import utils
from transformers.utils import ModelOutput

from .private import private, warn_of_missing
from .sharding import is_sharded_by_wrappers, is_sharded_over_processes
from .versions import cache_of


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    through_all_layers: bool = False,
) -> ModelOutput:
    """Fills the cache with the prompt as `generate()` does, in chunks if `prefill_chunk_size` is set.

    Args:
        model: The model.
        input_ids: `(batch, length)` int64.
        generation_config, model_kwargs: As `generate()` prepared them.
        through_all_layers: Whether every layer must get every token. Models whose last layers share keys and values
            pass only the tokens on to them whose logits are kept, if these are given by their number.

    Raises:
        MissingPrivateName: If Transformers has no such method.
    """
    fill = private(model, "_prefill", "Decoding with trees")
    kept = model_kwargs.get("logits_to_keep")
    if not (through_all_layers and isinstance(kept, int) and kept):
        return fill(input_ids, generation_config, model_kwargs)
    model_kwargs["logits_to_keep"] = torch.arange(-kept, 0, device=input_ids.device)
    try:
        return fill(input_ids, generation_config, model_kwargs)
    finally:
        model_kwargs["logits_to_keep"] = kept


def kwargs_after_prefill(outputs: ModelOutput, model_kwargs: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The keyword arguments of the next forward: positions and attention mask reach one token further.

    Raises:
        MissingPrivateName: If Transformers has no such method.
    """
    update = private(model, "_update_model_kwargs_for_generation", "Decoding with trees")
    return update(outputs, model_kwargs, is_encoder_decoder=False)


def prepares_as_usual(model: PreTrainedModel) -> bool:
    """Whether the model makes the arguments of its forward as Transformers does for most: tokens, positions and mask
    of the step, and what else was passed unchanged."""
    function = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return function is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()


def prompt_positions(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """The position ids that `generate()` gives a prompt, `(..., batch, length)` int64.

    Raises:
        MissingPrivateName: If Transformers has no such method.
    """
    prepare = private(model, "_prepare_position_ids_for_generation", "Drafting with a causal language model")
    return prepare(input_ids, model_kwargs)


def prompt_length(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int | None:
    """Tokens of the whole prompt, those in an earlier call's cache included; None if `generate()` was not told.

    What follows from the attention mask. Newer versions drop a mask that masks nothing, and keep its length.
    """
    attention_mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", None) if attention_mask is None else attention_mask.shape[-1]


def padding_token(generation_config: GenerationConfig) -> int:
    """What `generate()` pads rows with that end before others: the first end token if nothing is set, or else 0."""
    tokens = generation_config.pad_token_id, generation_config.eos_token_id
    token: Any = next((token for token in tokens if token is not None), 0)
    return int(torch.as_tensor(token, device="cpu").flatten()[0])


def is_inherited(model_config: GenerationConfig | None, name: str, value: Any) -> bool:
    """Whether a setting of `generate()` is as the model's generation config or Transformers' defaults have it."""
    defaults = getattr(GenerationConfig, "_get_default_generation_params", None)
    if defaults is None:
        consequence = "Arguments of `generate()` that have no meaning here are ignored, not refused"
        warn_of_missing("GenerationConfig._get_default_generation_params", consequence)
        return True
    return value in (getattr(model_config, name, None), defaults().get(name))


def is_callers_cache(cache: Cache) -> bool:
    """Whether the caller of `generate()` gave the cache, so that what is in it later must be what is expected there.

    True as well where it cannot be known, because Transformers does not mark these caches as it used to.
    """
    marks = _uses(getattr(GenerationMixin, "_prepare_cache_for_generation", None), "_is_user_defined")
    return getattr(cache, "_is_user_defined", not marks)


def longest_static_cache(model: PreTrainedModel) -> int:
    """Tokens that the longest static cache has room for that `generate()` has made for the model so far."""
    return getattr(model, "_previous_max_cache_length", 0)


def compiles_forward(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> bool:
    """Whether `generate()` would compile the model's forward after prefill."""
    criteria = getattr(model, "_valid_auto_compile_criteria", None)
    if criteria is not None:
        return criteria(model_kwargs, generation_config)
    cache = cache_of(model_kwargs)
    if cache is not None and cache.is_compileable and type(cache) is not DynamicCache:
        warn_of_missing("GenerationMixin._valid_auto_compile_criteria", "The model runs without `torch.compile`")
    return False


def default_compile_config(model: PreTrainedModel) -> CompileConfig:
    """How `generate()` compiles a model's forward if it is not told."""
    return getattr(model, "_default_compile_config", CompileConfig)()


def standard_decoding(model: PreTrainedModel, generation_config: GenerationConfig) -> Callable[..., Any] | None:
    """The decoding method that `generate()` calls without a strategy, for inputs that it has prepared.

    Returns:
        Greedy search, sampling or beam search; None for modes that Transformers loads from the Hub, or if this version
        has no table of decoding methods.
    """
    methods = getattr(utils, "GENERATION_MODES_MAPPING", {})
    name = methods.get(generation_config.get_generation_mode())
    return getattr(model, name, None) if name in ("_sample", "_beam_search") else None


def is_synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """What `generate()` passes to a decoding method as `synced_gpus`."""
    sharded = is_sharded_over_processes(model) or is_sharded_by_wrappers(model)
    return sharded if synced_gpus is None else synced_gpus


def _uses(function: Any, name: str) -> bool:
    """Whether the code of a function reads or writes an attribute of this name."""
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and name in code.co_names
