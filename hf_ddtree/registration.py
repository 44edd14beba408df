"""Teaches `GenerationMixin.generate` the argument `generation_strategy`, reversibly."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .arguments import LOOKUP_ARGUMENTS, check_arguments
from .attention import dispatch
from .candidate_generators import TreeCandidateGenerator
from .configuration import DDTreeConfig
from .drafters import DFlashDraftModel
from .strategy import DDTreeDecoding, ddtree
from .validation import require_positive_int

# What each strategy fixes of `DDTreeConfig`: a chain is a tree of width 1.
STRATEGIES: dict[str, dict[str, Any]] = {"ddtree": {}, "dflash": {"tree_shape": "chain"}}

# Arguments of `generate()` that strategies understand besides the knobs.
OWN_ARGUMENTS = ("candidate_generator", "draft_state")

_lock = threading.Lock()
_original: Callable[..., Any] | None = None
_patched: Callable[..., Any] | None = None


def register() -> None:
    """Adds `generation_strategy` to `generate()` of every model. Done on `import hf_ddtree`; a second call is fine."""
    global _original, _patched
    with _lock:
        if _original is None:
            _original = GenerationMixin.generate
            GenerationMixin.generate = _patched = _with_strategies(_original)


def unregister() -> None:
    """Restores Transformers as it was before `register()`, the functions of models that were decoded by tree included.

    A second call does nothing.

    Raises:
        RuntimeError: If something else has patched `generate()` since, which this would undo as well.
    """
    global _original, _patched
    with _lock:
        if _original is not None:
            if GenerationMixin.generate is not _patched:
                raise RuntimeError(
                    "`GenerationMixin.generate` was patched again after `hf_ddtree.register()`, by "
                    f"`{GenerationMixin.generate.__module__}`. Take that patch back first."
                )
            GenerationMixin.generate = _original
            _original = _patched = None
        dispatch.uninstall()


def _with_strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        del arguments["self"]
        if "generation_strategy" in arguments:
            strategy = arguments["generation_strategy"]  # None switches off what a configuration says
        else:
            strategy = _configured(self, arguments, "generation_strategy")
        decoding = arguments.pop("custom_generate", None)
        if strategy is not None:
            if decoding is not None:
                raise ValueError("Both `generation_strategy` and `custom_generate` are given. Pass one of them.")
            decoding = _decoding(self, strategy, arguments)
        elif isinstance(decoding, DDTreeDecoding):
            _check(self, arguments)
            given = [name for name in (*DDTreeConfig.knobs(), *OWN_ARGUMENTS) if name in arguments]
            if given:
                raise ValueError(
                    f"`{given[0]}` is given to `generate()` next to `custom_generate`. Give it to `hf_ddtree.ddtree`."
                )
            if arguments.get("assistant_model") is not None:
                raise ValueError(
                    "`assistant_model` is given to `generate()`, which does not pass it on to a custom decoding "
                    "method. Give it to `hf_ddtree.ddtree`."
                )
            decoding = decoding.with_arguments(arguments.get("streamer"), arguments.get("synced_gpus"))
        else:
            if decoding is None:
                _check_no_strategy_is_meant(arguments)
            kwargs.pop("generation_strategy", None)
            return original(self, *args, **kwargs)
        _use_tokenizer(self, arguments)
        return original(self, custom_generate=decoding, **arguments)

    return generate


def _check_no_strategy_is_meant(arguments: dict[str, Any]) -> None:
    """Refuses what only a strategy understands, where Transformers would complain of something else."""
    names = {*DDTreeConfig.knobs(), *OWN_ARGUMENTS} - {*LOOKUP_ARGUMENTS}
    own = sorted(name for name in names if arguments.get(name) is not None)
    if isinstance(arguments.get("assistant_model"), (DFlashDraftModel, TreeCandidateGenerator)):
        own.append("assistant_model")
    if own and "generation_strategy" not in arguments:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in own)} {'is' if len(own) == 1 else 'are'} for tree decoding, but no "
            '`generation_strategy` is set. Add `generation_strategy="ddtree"`.'
        )


def _check(model: PreTrainedModel, arguments: dict[str, Any], tree_lookup: bool = False) -> None:
    defaults = GenerationConfig._get_default_generation_params()

    def set_by_call(name: str) -> Any:
        value = _setting(model, arguments, name)
        inherited = getattr(model.generation_config, name, None), defaults.get(name)
        return None if name not in arguments and value in inherited else value

    check_arguments(lambda name: _setting(model, arguments, name), set_by_call, tree_lookup)


def _decoding(model: PreTrainedModel, strategy: Any, arguments: dict[str, Any]) -> DDTreeDecoding:
    """Makes the decoding method of a strategy; takes what is its own out of the arguments of `generate()`."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ValueError(
            f"`generation_strategy` is {strategy!r}, but must be one of {', '.join(map(repr, STRATEGIES))}. Leave it "
            "out for plain decoding."
        )
    knobs = {name: _configured(model, arguments, name) for name in DDTreeConfig.knobs()}
    knobs = {name: value for name, value in knobs.items() if value is not None}
    knobs |= {name: arguments[name] for name in DDTreeConfig.knobs() if name in arguments}
    knobs |= _lookup_knobs(model, arguments, knobs)
    _check(model, arguments, knobs.get("tree_lookup") is True)
    for name in ("generation_strategy", *DDTreeConfig.knobs()):
        arguments.pop(name, None)
    for name, fixed in STRATEGIES[strategy].items():
        if knobs.get(name, fixed) != fixed:
            raise ValueError(
                f"`{name}` is {knobs[name]!r}, but `generation_strategy={strategy!r}` means {fixed!r}. Leave `{name}` "
                'out, or set `generation_strategy="ddtree"`.'
            )
    return ddtree(
        assistant_model=arguments.pop("assistant_model", None),
        candidate_generator=arguments.pop("candidate_generator", None),
        draft_state=arguments.pop("draft_state", None),
        streamer=arguments.get("streamer"),
        synced_gpus=arguments.get("synced_gpus"),
        **(knobs | STRATEGIES[strategy]),
    )


def _lookup_knobs(model: PreTrainedModel, arguments: dict[str, Any], knobs: dict[str, Any]) -> dict[str, Any]:
    """What Transformers' own argument for prompt lookup means here; Transformers gets to see None in its place."""
    num_tokens = _setting(model, arguments, "prompt_lookup_num_tokens")
    if num_tokens is None:
        return {}
    if arguments.get("assistant_model") is not None or arguments.get("candidate_generator") is not None:
        raise ValueError(
            f"`prompt_lookup_num_tokens` is {num_tokens!r} and a drafter is given as well. Leave one of them out, or "
            "set `tree_lookup=True` in place of the former: then both draft."
        )
    for name, meant in (("tree_lookup", True), ("draft_length", num_tokens)):
        if knobs.get(name, meant) != meant:
            raise ValueError(
                f"`{name}` is {knobs[name]!r}, but `prompt_lookup_num_tokens={num_tokens!r}` means {meant!r}. Leave "
                "one of them out."
            )
    require_positive_int("prompt_lookup_num_tokens", num_tokens)
    arguments["prompt_lookup_num_tokens"] = None
    return {"tree_lookup": True, "draft_length": num_tokens}


def _use_tokenizer(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Does what needs the tokenizer, as Transformers does not pass it on when the decoding method is not its own."""
    tokenizer = arguments.pop("tokenizer", None)
    if tokenizer is None:
        return
    if _setting(model, arguments, "token_healing"):
        raise ValueError(
            "`token_healing` does not work with tree decoding. Pass `model.heal_tokens(input_ids, tokenizer)` as the "
            "inputs and leave `token_healing` out."
        )
    stop_strings = _setting(model, arguments, "stop_strings")
    if stop_strings is not None:
        criterion = StopStringCriteria(tokenizer, stop_strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])
        arguments["stop_strings"] = None


def _setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """What the call says, or else the configurations; None if none does."""
    value = arguments.get(name)
    return _configured(model, arguments, name) if value is None else value


def _configured(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """What the call's generation config says, or else the model's own; None if neither does."""
    for config in (arguments.get("generation_config"), getattr(model, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None
