"""Models that another library has wrapped: by PEFT, `torch.compile`, or data parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: Any, argument: str) -> Any:
    """The model inside of the wrappers that a user may have put around it; anything else is returned as it is.

    What PEFT injects into a model's layers, as LoRA does, stays in effect, and a compiled model runs uncompiled.

    Args:
        model: What was given.
        argument: The name of the argument, for messages.

    Raises:
        ValueError: If PEFT changes the inputs instead of the layers, which is lost without its wrapper.
    """
    inner: Any = model
    while isinstance(inner, nn.Module):
        wrapper: Any = inner
        if isinstance(wrapper, DataParallel | DistributedDataParallel):
            inner = wrapper.module
        elif (compiled := dict(wrapper.named_children()).get("_orig_mod")) is not None:
            inner = compiled
        elif hasattr(wrapper, "get_base_model") and hasattr(wrapper, "peft_config"):
            if any(getattr(config, "is_prompt_learning", False) for config in wrapper.peft_config.values()):
                raise ValueError(
                    f"`{argument}` is a `{type(wrapper).__name__}` with learnt prompts, which PEFT puts in front of "
                    f"the inputs of its own forward alone. Pass `{argument}.get_base_model()` to leave them out, or "
                    "use adapters that change the layers, such as LoRA."
                )
            inner = wrapper.get_base_model()
        else:
            break
    return inner
