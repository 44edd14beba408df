"""The DFlash drafter."""

from .config import DFlashConfig
from .context_cache import DFlashContextCache
from .model import DFlashDraftModel

__all__ = ["DFlashConfig", "DFlashContextCache", "DFlashDraftModel"]
