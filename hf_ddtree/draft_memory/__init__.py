"""What drafting without a drafter keeps, within and across calls: successors of short contexts, and past texts."""

from .memory import DraftMemory

__all__ = ["DraftMemory"]
