"""The EAGLE-3 drafter."""

from .config import Eagle3Config
from .model import Eagle3DraftModel

__all__ = ["Eagle3Config", "Eagle3DraftModel"]
