"""Teaches `GenerationMixin.generate` the argument `generation_strategy`, reversibly."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .interop.on_import import when_imported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Where Transformers defines `GenerationMixin`.
GENERATION_MODULE = "transformers.generation.utils"

_lock = threading.Lock()
_is_registered = False
# The class, and its function `generate` before and after it was patched; None if it is not patched.
_patch: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None


def register() -> None:
    """Adds `generation_strategy` to `generate()` of every model. Done on `import hf_ddtree`; a second call is fine.

    Transformers is not imported for this: if it is not there yet, it is patched as soon as it is.
    """
    global _is_registered
    with _lock:
        _is_registered = True
    when_imported(GENERATION_MODULE, _apply_patch)


def unregister() -> None:
    """Restores Transformers as it was before `register()`, the functions of models that were decoded by tree included.

    A second call does nothing.

    Raises:
        RuntimeError: If something else has patched `generate()` since, which this would undo as well.
    """
    global _is_registered, _patch
    with _lock:
        if _patch is not None:
            mixin, original, patched = _patch
            if mixin.generate is not patched:
                raise RuntimeError(
                    "`GenerationMixin.generate` was patched again after `hf_ddtree.register()`, by "
                    f"`{mixin.generate.__module__}`. Take that patch back first."
                )
            from .attention import dispatch

            mixin.generate = original
            dispatch.uninstall()
        _is_registered, _patch = False, None


def _apply_patch(generation_module: ModuleType) -> None:
    global _patch
    with _lock:
        if _is_registered and _patch is None:
            mixin = generation_module.GenerationMixin
            original, patched = mixin.generate, _with_strategies(mixin.generate)
            mixin.generate = patched
            _patch = mixin, original, patched


def _with_strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        from .arguments import GenerateArguments
        from .strategy import DDTreeDecoding, ddtree, warn_of_standard_decoding
        from .validation import UnsupportedError

        named = signature.bind(self, *args, **kwargs).arguments
        named |= named.pop("kwargs", {})
        del named["self"]
        kwargs.pop("generation_strategy", None)
        arguments = GenerateArguments.of_call(self, named)
        strategy, decoding = arguments.strategy, named.pop("custom_generate", None)
        if strategy is not None:
            falls_back = arguments.names_nothing
            try:
                decoding = ddtree(**arguments.take_drafting(strategy))
                arguments.take_tokenizer()
            except UnsupportedError as error:
                if not falls_back:
                    raise
                warn_of_standard_decoding(error)
                return original(self, *args, **kwargs)
            decoding = replace(decoding, falls_back=falls_back)
        elif isinstance(decoding, DDTreeDecoding):
            arguments.check_beside_custom_generate()
            arguments.take_tokenizer()
            decoding = decoding.with_arguments(**arguments.passed_on())
        else:
            if decoding is None:
                arguments.check_no_strategy_is_meant()
            return original(self, *args, **kwargs)
        return original(self, custom_generate=decoding, **named)

    return generate
