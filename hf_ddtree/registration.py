"""Teaches `GenerationMixin.generate` the argument `generation_strategy`, reversibly."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .arguments import GenerateArguments
from .attention import dispatch
from .strategy import DDTreeDecoding, ddtree

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
        named = signature.bind(self, *args, **kwargs).arguments
        named |= named.pop("kwargs", {})
        del named["self"]
        arguments = GenerateArguments.of_call(self, named)
        strategy, decoding = arguments.strategy, named.pop("custom_generate", None)
        if strategy is not None:
            decoding = ddtree(**arguments.take_drafting(strategy))
        elif isinstance(decoding, DDTreeDecoding):
            arguments.check_beside_custom_generate()
            decoding = decoding.with_arguments(**arguments.passed_on())
        else:
            if decoding is None:
                arguments.check_no_strategy_is_meant()
            kwargs.pop("generation_strategy", None)
            return original(self, *args, **kwargs)
        arguments.take_tokenizer()
        return original(self, custom_generate=decoding, **named)

    return generate
