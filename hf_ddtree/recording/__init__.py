"""Recording what calls decode, to train a drafter on it."""

from .folder import RecordingFolder

__all__ = ["RecordingFolder"]
