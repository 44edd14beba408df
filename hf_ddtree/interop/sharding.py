"""Models that several processes run together."""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from .private import private


def is_sharded_over_processes(model: PreTrainedModel) -> bool:
    """Whether several processes must run the model's forwards together; where `generate()` sets `synced_gpus`."""
    is_sharded = isinstance(model, FSDPModule | FullyShardedDataParallel)
    return (is_sharded or getattr(model, "_is_fsdp_managed_module", False)) and _num_processes() > 1


def is_sharded_by_wrappers(model: PreTrainedModel) -> bool:
    """Whether DeepSpeed ZeRO-3 or the first version of FSDP shards the model over several processes."""
    if _num_processes() == 1:
        return False
    return is_deepspeed_zero3_enabled() or any(isinstance(part, FullyShardedDataParallel) for part in model.modules())


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The group of processes over which Transformers shards the model's layers, None if it does not.

    Raises:
        MissingPrivateName: If it does, and does not tell the group.
    """
    if (model.tp_size or 1) == 1:
        return None
    mesh = private(model, "_device_mesh", "Decoding a model under tensor parallelism")
    return mesh.get_group("tp" if mesh.ndim > 1 else None)


def is_split_into_stages(model: PreTrainedModel) -> bool:
    """Whether each process holds only some of the layers."""
    return (getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1) > 1


def _num_processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
