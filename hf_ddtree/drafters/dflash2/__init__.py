"""The DFlash 2 drafter."""

from .config import DFlash2Config
from .model import DFlash2DraftModel

__all__ = ["DFlash2Config", "DFlash2DraftModel"]
