"""The P-EAGLE drafter."""

from .config import PEagleConfig
from .model import PEagleDraftModel

__all__ = ["PEagleConfig", "PEagleDraftModel"]
