"""Drafter architectures, the checkpoint formats they come in, and how they are loaded."""

from .dflash import DFlashConfig, DFlashContextCache, DFlashDraftModel
from .dflash2 import DFlash2Config, DFlash2DraftModel
from .loading import check_checkpoint_fits, check_drafter_fits, is_drafter_alone, load_drafter
from .native import is_native, view_native

__all__ = [
    "DFlash2Config",
    "DFlash2DraftModel",
    "DFlashConfig",
    "DFlashContextCache",
    "DFlashDraftModel",
    "check_checkpoint_fits",
    "check_drafter_fits",
    "is_drafter_alone",
    "is_native",
    "load_drafter",
    "view_native",
]
