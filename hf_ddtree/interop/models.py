"""The private parts of models and their configurations."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import hub

from .private import MissingPrivateName, private


def attention_implementation(config: PreTrainedConfig) -> str:
    """The attention that a model with this configuration runs with, such as `"sdpa"`.

    Raises:
        MissingPrivateName: If Transformers does not tell.
    """
    return private(config, "_attn_implementation", "Masking a tree")


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether Transformers says that the model keeps a state which cannot be rolled back; True if it does not say."""
    return getattr(model, "_is_stateful", True)


def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether Transformers makes a `DynamicCache` for the model; True if it does not say."""
    return getattr(model, "_supports_default_dynamic_cache", lambda: True)()


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model's forward can leave out the logits of all but the last tokens."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def with_default_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy from which Transformers builds a model with the attention that it chooses itself.

    Raises:
        MissingPrivateName: If Transformers does not tell the attention of a configuration.
    """
    attention_implementation(config)
    config = copy.deepcopy(config)
    config._attn_implementation = None
    return config


def model_from_config(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the same class and dtype with fresh weights, on the current device.

    Raises:
        MissingPrivateName: If Transformers has no such method.
    """
    build = private(type(model), "_from_config", "Checking a model that is loaded already")
    return build(config, dtype=model.dtype)


def execution_devices(module: nn.Module) -> list[Any]:
    """Where hooks of accelerate bring the inputs and weights of a module, None for a hook that brings them nowhere."""
    hook = getattr(module, "_hf_hook", None)
    return [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]


def cached_file_if_any(path: str | os.PathLike[str], file_name: str, **options: Any) -> str | None:
    """The place of a file of a model, fetched from the Hub if need be; None if the model has no such file.

    Args:
        path: A folder or a repository of the Hub.
        file_name: The file, with `/` between folders.
        options: Keywords of `from_pretrained` that say where files are.

    Raises:
        MissingPrivateName: If Transformers cannot be asked for a file that may be missing.
    """
    # `cached_file` takes any keyword and ignores those that it does not know.
    if "_raise_exceptions_for_missing_entries" not in inspect.signature(hub.cached_files).parameters:
        name = "cached_files(_raise_exceptions_for_missing_entries=...)"
        raise MissingPrivateName(name, "Reading multi-token-prediction layers from a checkpoint")
    return hub.cached_file(path, file_name, **options, _raise_exceptions_for_missing_entries=False)
