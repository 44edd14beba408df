"""Drafters that are named by a string, loaded once for a model and shared by all its calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .configuration import LOOKUP, STRATEGIES, DDTreeConfig
from .drafter_kinds import drafter_kind, load_drafter
from .interop.wrappers import unwrapped
from .validation import UnsupportedError, describe_type


@dataclass
class _Drafters:
    """The drafters of a model by name."""

    lock: Any = field(default_factory=threading.Lock)
    loaded: dict[str, PreTrainedModel] = field(default_factory=dict)
    attached: set[str] = field(default_factory=set)


_lock = threading.Lock()
_drafters_of: WeakKeyDictionary[PreTrainedModel, _Drafters] = WeakKeyDictionary()


def attach(
    model: PreTrainedModel, drafter: str | PreTrainedModel, *, generation_strategy: str = "ddtree", **knobs: Any
) -> None:
    """Makes tree decoding with a drafter the default of a model: of its `generate()`, and of programs that call it.

    Sets `generation_strategy`, `drafter` and the knobs in `model.generation_config`. A call may still name others, or
    `generation_strategy="standard"`; as drafter it may name those alone that have been attached, and `"lookup"`.

    Args:
        model: The target.
        drafter: What the knob `drafter` takes, which is loaded now, or a loaded drafter.
        generation_strategy: `"ddtree"`, or `"dflash"` for chains.
        **knobs: Other fields of `DDTreeConfig`, such as `tree_budget`.

    Raises:
        ValueError: If a knob or the strategy has a value that is not allowed, or the drafter cannot be loaded or does
            not fit the model.
        TypeError: If the model has no generation config, or a keyword argument is not a knob.
        OSError: If there is no such folder or repository.
    """
    model, drafter = unwrapped(model, "model"), unwrapped(drafter, "drafter")
    if getattr(model, "generation_config", None) is None:
        raise TypeError(f"`model` must be a model with a `generation_config`, but is {describe_type(model)}.")
    if isinstance(drafter, PreTrainedModel):
        drafter_kind(drafter)
        name = getattr(drafter, "name_or_path", "") or type(drafter).__name__
    else:
        name = drafter
    if generation_strategy not in STRATEGIES:
        raise ValueError(
            f"`generation_strategy` is {generation_strategy!r}, but must be one of {', '.join(map(repr, STRATEGIES))}."
        )
    DDTreeConfig.from_knobs("attach", drafter=name, **knobs)
    if isinstance(drafter, PreTrainedModel):
        _drafters(model).loaded[name] = drafter
    elif name != LOOKUP:
        shared_drafter(name, model)
    _drafters(model).attached.add(name)
    for knob, value in {"generation_strategy": generation_strategy, "drafter": name, **knobs}.items():
        setattr(model.generation_config, knob, value)


def shared_drafter(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """The drafter of that name, loaded by `load_drafter` when it is first asked for.

    Raises:
        ValueError: If it cannot be loaded, or does not fit the model.
        OSError: If there is no such folder or repository.
    """
    drafters = _drafters(model)
    with drafters.lock:
        if name not in drafters.loaded:
            # Whatever a call is in the middle of: its random numbers stay, and the weights serve other calls as well.
            with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode(mode=False):
                try:
                    drafters.loaded[name] = load_drafter(name, target_model=model)
                except UnsupportedError as error:
                    raise ValueError(str(error)) from error
        return drafters.loaded[name]


def attached_names(model: PreTrainedModel) -> set[str]:
    """The names of the drafters that have been attached to a model."""
    return set(_drafters(model).attached)


def _drafters(model: PreTrainedModel) -> _Drafters:
    with _lock:
        return _drafters_of.setdefault(model, _Drafters())
