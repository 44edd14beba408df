"""Who proposes trees."""

from .base import DraftContext, TreeCandidateGenerator
from .dflash import DFlashTreeCandidateGenerator

__all__ = ["DFlashTreeCandidateGenerator", "DraftContext", "TreeCandidateGenerator"]
