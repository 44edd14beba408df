"""The attention functions of Transformers that models choose from by `attn_implementation`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import flash_attention, flex_attention, sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What takes a mask of queries by keys, whichever function does the work.
TAKE_MASKS = ("sdpa", "eager")
FLASH = getattr(flash_attention, "flash_attention_forward", None)
FLEX = getattr(flex_attention, "flex_attention_forward", None)
SDPA = getattr(sdpa_attention, "sdpa_attention_forward", None)
SOFTMAX_ATTENTION = tuple(filter(None, (FLASH, FLEX, SDPA)))
EAGER = "eager_attention_forward"
# What the models of these families call when they run eagerly, many others call as well.
FAMILIES_WITH_PLAIN_EAGER = ("llama", "llama4", "gemma2", "gpt_oss")


def registered(implementation: str) -> Callable[..., Any] | None:
    """The function that is registered for an `attn_implementation`, None if there is none, as for `"eager"`."""
    return ALL_ATTENTION_FUNCTIONS.get(implementation)


def register(implementation: str, function: Callable[..., Any]) -> None:
    """Registers a function where the present one is registered: for all modules, or over that by a local choice."""
    if implementation in getattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {}):
        ALL_ATTENTION_FUNCTIONS[implementation] = function
    else:
        ALL_ATTENTION_FUNCTIONS.register(implementation, function)


def is_known(implementation: str) -> bool:
    """Whether the registered function is Transformers' own for SDPA, FlexAttention or some FlashAttention, which that
    of a kernel from the Hub is as well."""
    function = registered(implementation)
    return getattr(function, "tree_form_of", function) in SOFTMAX_ATTENTION


def takes_masks(function: Callable[..., Any]) -> bool:
    """Whether a function takes a mask of queries by keys: all but those of FlashAttention and FlexAttention."""
    return function not in (FLASH, FLEX)


def is_softmax_attention(function: Callable[..., Any]) -> bool:
    """Whether a function, registered or of a modelling module, is known to be softmax attention and no more.

    Then what it gives follows from its arguments. Eager functions are defined anew in each modelling module, so it is
    their code that is compared.
    """
    return function in SOFTMAX_ATTENTION or (inspect.isfunction(function) and _code(function) in _plain_eager_codes())


def knows_softcap(function: Callable[..., Any]) -> bool:
    """Whether such a function heeds `softcap`."""
    return not takes_masks(function) or (function is not SDPA and "softcap" in _names(function))


def knows_sinks(function: Callable[..., Any]) -> bool:
    """Whether such a function heeds sinks: those of the argument `s_aux`, or of its module, which are the same."""
    return not takes_masks(function) or "sinks" in _names(function)


def calls_attention_functions(module: nn.Module) -> bool:
    """Whether a module's forward chooses its function by `attn_implementation`, and biases no positions."""
    names = _names(inspect.unwrap(type(module).forward))
    return "ALL_ATTENTION_FUNCTIONS" in names and "position_bias" not in names


def dtype_in_flash_attention(query: Tensor, module: nn.Module) -> torch.dtype:
    """The dtype that Transformers' flash attention computes in, as it takes no float32."""
    target_dtype = getattr(flash_attention, "get_target_dtype", lambda query, module: None)
    return target_dtype(query, module) or query.dtype


@cache
def _plain_eager_codes() -> frozenset[Any]:
    modules = [
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for family in FAMILIES_WITH_PLAIN_EAGER
    ]
    return frozenset(_code(inspect.unwrap(getattr(module, EAGER))) for module in modules)


def _code(function: Callable[..., Any]) -> tuple[Any, ...]:
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if not isinstance(constant, str))
    return code.co_code, code.co_names, code.co_varnames, constants


def _names(function: Callable[..., Any]) -> set[str]:
    """Names that a function's code speaks of: variables, attributes, keywords of its calls."""
    code = function.__code__
    keywords = {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    return {*code.co_names, *code.co_varnames, *keywords, *(c for c in code.co_consts if isinstance(c, str))}
