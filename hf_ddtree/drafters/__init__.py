"""Drafter architectures, a folder per kind, and the checkpoint layouts they come in."""

from importlib import import_module
from typing import Any

from .dflash import DFlashConfig, DFlashContextCache, DFlashDraftModel
from .dflash.checkpoint import check_drafter_fits
from .dflash2 import DFlash2Config, DFlash2DraftModel
from .dspark import DSparkConfig, DSparkDraftModel
from .native.view import is_native, view_native

__all__ = [
    "DFlash2Config",
    "DFlash2DraftModel",
    "DFlashConfig",
    "DFlashContextCache",
    "DFlashDraftModel",
    "DSparkConfig",
    "DSparkDraftModel",
    "check_drafter_fits",
    "is_native",
    "load_drafter",
    "view_native",
]


def __getattr__(name: str) -> Any:
    # The registry imports this package, so what is documented here and lives there is looked up when asked for.
    if name == "load_drafter":
        return import_module("hf_ddtree.drafter_kinds").load_drafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
