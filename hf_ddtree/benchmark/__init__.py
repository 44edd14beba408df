"""Measures methods of decoding against each other: the same prompts, alternating, every token compared."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .machine import describe_machine as describe_machine
    from .methods import Method as Method
    from .methods import make_methods as make_methods
    from .prompts import DATASETS as DATASETS
    from .prompts import load_prompts as load_prompts
    from .prompts import prompt_of as prompt_of
    from .report import Report as Report
    from .run import benchmark as benchmark
    from .sample_statistics import distinct_share as distinct_share
    from .sample_statistics import quartiles as quartiles
    from .sample_statistics import sign_test as sign_test

# Imported when first asked for: the command line prints its help from `methods` and `prompts` without PyTorch.
_HOMES = {
    "DATASETS": "prompts",
    "Method": "methods",
    "Report": "report",
    "benchmark": "run",
    "compare": "comparison",
    "describe_machine": "machine",
    "distinct_share": "sample_statistics",
    "load_prompts": "prompts",
    "make_methods": "methods",
    "prompt_of": "prompts",
    "quartiles": "sample_statistics",
    "sign_test": "sample_statistics",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
