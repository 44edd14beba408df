"""The Domino drafter."""

from .config import DominoConfig
from .model import DominoDraftModel

__all__ = ["DominoConfig", "DominoDraftModel"]
