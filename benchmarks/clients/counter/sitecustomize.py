"""Counts the forwards of causal models with a cache: a byte per forward in the file that CLIENT_FORWARDS names."""

import os
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

_file = os.open(os.environ["CLIENT_FORWARDS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _count(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    # Transformers calls it `cache`, older versions and other programs `past_key_values`.
    has_cache = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
    if has_cache and type(module).__name__.endswith("ForCausalLM"):
        os.write(_file, b".")


register_module_forward_hook(_count, with_kwargs=True)
