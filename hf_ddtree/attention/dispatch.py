"""Leads the calls that a model's stateful layers make to the tree operators while a tree is being verified.

Every hybrid model in Transformers calls module-level functions for its convolutions and recurrences. Each is wrapped
once by a dispatcher that asks a context variable whether a tree is active: if none is, the original runs. Layers that
scale their queries by their place in the cache are hooked in the same way.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..interop import attention_functions
from ..interop.models import attention_implementation
from .active_pass import current_pass
from .attention_dispatch import is_tree_form, tree_form
from .causal_conv import tree_causal_conv
from .gated_delta_rule import tree_gated_delta_rule
from .kimi_delta import tree_kimi_delta
from .mamba2 import tree_mamba2
from .path_state import PathFactors
from .query_scale import scales_queries
from .tree_pass import TreePass

_lock = threading.Lock()


def _gated_delta_rule(tree_pass: TreePass, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _delta_rule(tree_pass, tree_gated_delta_rule, *args, **kwargs)


def _kimi_delta(tree_pass: TreePass, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _delta_rule(tree_pass, tree_kimi_delta, *args, **kwargs)


def _delta_rule(
    tree_pass: TreePass,
    operator: Callable[..., tuple[Tensor, PathFactors]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    paths = tree_pass.paths(query.device)
    output, factors = operator(query, key, value, g, beta, paths, initial_state, use_qk_l2norm_in_kernel)
    tree_pass.path_factors.append(factors)
    # Which path the target takes is not known yet, so the state goes back as it came.
    return output, initial_state


def _mamba2_chunk_scan(
    tree_pass: TreePass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_states: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Takes no notice of `dt_limit`: models keep to it in the prompt alone, not when they decode token by token."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    paths = tree_pass.paths(hidden_states.device)
    output, factors = tree_mamba2(hidden_states, dt, A, B, C, paths, initial_states, D)
    tree_pass.path_factors.append(factors)
    return output, initial_states


def _mamba2_step(
    tree_pass: TreePass,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What models call for a single token, a tree of nothing but its root; step, `A` and `D` come once per channel."""
    D, dt_bias = (None if values is None else values[:, 0] for values in (D, dt_bias))
    inputs = hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]
    output, _state = _mamba2_chunk_scan(tree_pass, *inputs, state, D, dt_bias, dt_softplus)
    return output[:, 0] if z is None else output[:, 0] * torch.nn.functional.silu(z)


def _causal_conv(
    tree_pass: TreePass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    num_cached = hidden_states.shape[-1] - tree_pass.tree_batch.num_nodes
    windows = tree_pass.windows(weight.shape[-1], num_cached, hidden_states.device)
    tree_pass.conv_inputs.append(hidden_states)
    return tree_causal_conv(hidden_states, weight, windows, bias, tree_pass.activation(activation))


def _causal_conv_step(
    tree_pass: TreePass, hidden_states: Tensor, conv_state: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """What some models call for a single token whatever the cache is told: it would shift the cached inputs."""
    return _causal_conv(tree_pass, torch.cat((conv_state, hidden_states), dim=-1), *args, **kwargs)


def _correct_queries(attention: Any, module: nn.Module, args: Any, queries: Tensor) -> Tensor | None:
    tree_pass = current_pass()
    if tree_pass is None:
        return None
    correction = tree_pass.scale_correction(attention.attn_scale, attention.floor_scale)
    return None if correction is None else (queries * correction.to(queries.device)).to(queries.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta,
    "recurrent_kimi_delta_attention": _kimi_delta,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _mamba2_step,
    "causal_conv1d_fn": _causal_conv,
    "causal_conv1d_update": _causal_conv_step,
}


# The functions that the module of each kind of layer must have. A kind is known by how its classes' names end.
DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")


KIMI_DELTA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn")


MAMBA2 = ("mamba2_chunk_scan", "mamba2_selective_state_update", "causal_conv1d_fn")


MIXERS: dict[str, tuple[str, ...]] = {
    "GatedDeltaNet": DELTA_RULE,
    "DeltaAttention": KIMI_DELTA,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
    "ShortConv": ("causal_conv1d_fn",),
}


_originals: dict[tuple[ModuleType, str], Callable[..., Any]] = {}


_registered: dict[str, Callable[..., Any]] = {}


_hooked: WeakSet[nn.Module] = WeakSet()


def install(model: nn.Module) -> None:
    """Wraps the functions that the model's layers call and hooks the layers; what is so already stays as it is."""
    modules = list(model.modules())
    names = {type(module).__module__ for module in modules}
    modeling_modules = [sys.modules[name] for name in names if name in sys.modules]
    with _lock:
        _install_attention(model, modeling_modules)
        for modeling_module in modeling_modules:
            for name, operator in OPERATORS.items():
                original = getattr(modeling_module, name, None)
                if original is not None and (modeling_module, name) not in _originals:
                    _originals[modeling_module, name] = original
                    setattr(modeling_module, name, _dispatcher(original, operator))
        attention: Any
        for attention in modules:
            if scales_queries(attention) and not _own_hooks(attention.q_proj):
                attention.q_proj.register_forward_hook(functools.partial(_correct_queries, attention))
                _hooked.add(attention.q_proj)


def uninstall() -> None:
    """Puts back every function that `install` wrapped, and removes its hooks."""
    with _lock:
        for projection in _hooked:
            for key in _own_hooks(projection):
                del projection._forward_hooks[key]
        _hooked.clear()
        for (modeling_module, name), original in _originals.items():
            setattr(modeling_module, name, original)
        _originals.clear()
        for implementation, function in _registered.items():
            if is_tree_form(attention_functions.registered(implementation)):
                attention_functions.register(implementation, function)
        _registered.clear()


def _install_attention(model: Any, modeling_modules: list[ModuleType]) -> None:
    """Wraps the attention functions of the model that are known; others go on as they are."""
    implementation = attention_implementation(model.config.get_text_config())
    function = attention_functions.registered(implementation)
    if function is not None and not is_tree_form(function) and attention_functions.is_softmax_attention(function):
        _registered[implementation] = function
        attention_functions.register(implementation, tree_form(function))
    for module in modeling_modules:
        eager = getattr(module, attention_functions.EAGER, None)
        if eager is not None and not is_tree_form(eager) and attention_functions.is_softmax_attention(eager):
            _originals[module, attention_functions.EAGER] = eager
            setattr(module, attention_functions.EAGER, tree_form(eager))


def _own_hooks(module: nn.Module) -> list[int]:
    """The keys of the module's hooks that are of this file; a copy of a hooked module has them too."""
    return [key for key, hook in module._forward_hooks.items() if getattr(hook, "func", None) is _correct_queries]


def _dispatcher(original: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        tree_pass = current_pass()
        if tree_pass is None:
            return original(*args, **kwargs)
        return operator(tree_pass, *args, **kwargs)

    return dispatcher
