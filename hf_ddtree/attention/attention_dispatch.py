"""Leads the calls of a model's attention layers to tree attention while a tree is being verified.

Layers call the function that is registered for their `attn_implementation`, or the eager one of their module. A
dispatcher in front of it asks a context variable whether a tree is active, as for the recurrent layers. A function
that does more than softmax attention is left to itself, as is one whose weights are wanted; then it must take masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..interop import attention_functions
from ..interop.attention_kernels import open_kernel
from ..interop.models import attention_implementation
from .active_pass import current_pass
from .tree_attention import tree_attention

# From how many keys on attention goes in two parts. On a CPU one masked kernel is as fast, but its mask takes memory.
FEWEST_KEYS_IN_PARTS = {"cuda": 0, "cpu": 8192}


def tree_form(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in front of an attention function; `is_tree_form` tells it from others."""
    takes_masks = attention_functions.takes_masks(original)
    heeds_softcap = attention_functions.knows_softcap(original)
    heeds_sinks = attention_functions.knows_sinks(original)

    def stands_in(query: Tensor, key: Tensor, attention_mask: Any, kwargs: dict[str, Any]) -> bool:
        """Whether tree attention gives what the original gives for these arguments."""
        if not isinstance(attention_mask, Tensor) or attention_mask.shape[1:] != (1, query.shape[2], key.shape[2]):
            return False
        if kwargs.get("dropout") or kwargs.get("position_bias") is not None:
            return False
        if kwargs.get("softcap") is not None and not heeds_softcap:
            return False
        if takes_masks and heeds_sinks:  # those of its module, which this must be
            return kwargs.get("s_aux") is not None
        return kwargs.get("s_aux") is None or heeds_sinks

    @functools.wraps(original)
    def dispatcher(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        tree_pass = current_pass()
        if tree_pass is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if args or tree_pass.wants_weights or not stands_in(query, key, attention_mask, kwargs):
            if not takes_masks:
                raise RuntimeError(
                    f"{type(module).__name__} calls its attention with arguments that tree attention does not know, "
                    f"and attn_implementation={attention_implementation(module.config)!r} cannot mask a tree. Load "
                    'the model with attn_implementation="sdpa" or "eager".'
                )
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        tree_pass.num_attended += 1
        if not takes_masks:
            dtype = attention_functions.dtype_in_flash_attention(query, module)
            query, key, value = (states.to(dtype) for states in (query, key, value))
        scaling, softcap, sinks = (kwargs.get(name) for name in ("scaling", "softcap", "s_aux"))
        in_parts = softcap is None and _goes_in_parts(query, key, value)
        mask = tree_pass.masks.of(attention_mask, query.shape[1] // key.shape[1], query.dtype, in_parts)
        output = tree_attention(query, key, value, mask, scaling or query.shape[-1] ** -0.5, softcap, sinks)
        return output.transpose(1, 2).contiguous(), None

    dispatcher.tree_form_of = original  # type: ignore[attr-defined]
    return dispatcher


def is_tree_form(function: Callable[..., Any] | None) -> bool:
    """Whether a function is what `tree_form` makes."""
    return hasattr(function, "tree_form_of")


def _goes_in_parts(query: Tensor, key: Tensor, value: Tensor) -> bool:
    fewest = FEWEST_KEYS_IN_PARTS.get(query.device.type)
    return fewest is not None and key.shape[2] >= fewest and open_kernel(query, key, value) is not None
