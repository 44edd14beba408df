"""The DSpark drafter."""

from .config import DSparkConfig
from .model import DSparkDraftModel

__all__ = ["DSparkConfig", "DSparkDraftModel"]
