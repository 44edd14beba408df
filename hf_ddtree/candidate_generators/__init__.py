"""Who proposes trees."""

from .base import DraftContext, TreeCandidateGenerator
from .dflash import DFlashTreeCandidateGenerator
from .selection import drafter_kind, make_candidate_generator

__all__ = [
    "DFlashTreeCandidateGenerator",
    "DraftContext",
    "TreeCandidateGenerator",
    "drafter_kind",
    "make_candidate_generator",
]
