"""What differs between the supported Transformers versions, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, cache_utils
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.distributed.utils import _get_torch_distributed_world_size
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import ModelOutput

# Transformers renamed `past_key_values` to `cache` in models' arguments, `generate()`'s keyword arguments and outputs.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# The index of the first decoder layer where `output_hidden_states` lists layers: newer versions count the embeddings.
HIDDEN_STATES_OFFSET = 1 if CACHE_KEY == "cache" else 0
# Cache layers of layers that keep nothing; older versions have an empty layer of another kind in their place.
EMPTY_CACHE_LAYERS = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments that `generate()` prepared, None if there is none."""
    return model_kwargs.get(CACHE_KEY)


def prompt_length(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int | None:
    """Tokens of the whole prompt, those in a former call's cache included; None if `generate()` was not told.

    What follows from the attention mask, which newer versions drop when it masks nothing.
    """
    attention_mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", None) if attention_mask is None else attention_mask.shape[-1]


def is_sharded_over_processes(model: PreTrainedModel) -> bool:
    """Whether several processes must run the model's forwards together; where `generate()` sets `synced_gpus`."""
    return (is_fsdp_managed_module(model) or isinstance(model, FSDPModule)) and _get_torch_distributed_world_size() > 1


def is_sharded_by_wrappers(model: PreTrainedModel) -> bool:
    """Whether DeepSpeed ZeRO-3 or the first version of FSDP shards the model over several processes."""
    if _get_torch_distributed_world_size() == 1:
        return False
    return is_deepspeed_zero3_enabled() or any(isinstance(part, FullyShardedDataParallel) for part in model.modules())


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The group of processes over which Transformers shards the model's layers, None if it does not."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    mesh = model._device_mesh
    return mesh.get_group("tp" if mesh.ndim > 1 else None)


def is_split_into_stages(model: PreTrainedModel) -> bool:
    """Whether each process holds only some of the layers."""
    return (getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1) > 1


def default_compile_config(model: PreTrainedModel) -> CompileConfig:
    """How `generate()` compiles a model's forward if it is not told."""
    return getattr(model, "_default_compile_config", CompileConfig)()


def captured_layers(layer_ids: Sequence[int]) -> list[int]:
    """The value of `output_hidden_states` that makes a forward return the outputs of these decoder layers, from 0."""
    return [layer_id + HIDDEN_STATES_OFFSET for layer_id in layer_ids]


def hidden_states_of(outputs: ModelOutput, layer_id: int) -> Tensor:
    """The output of a decoder layer from a forward with `captured_layers`; the last one may have been normalised."""
    return outputs.hidden_states[layer_id + HIDDEN_STATES_OFFSET]
