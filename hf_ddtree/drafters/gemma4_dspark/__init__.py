"""The DSpark drafter with Gemma 4's layers."""

from .config import Gemma4DSparkConfig
from .model import Gemma4DSparkDraftModel

__all__ = ["Gemma4DSparkConfig", "Gemma4DSparkDraftModel"]
