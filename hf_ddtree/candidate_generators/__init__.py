"""Who proposes trees."""

from .base import DraftContext, TreeCandidateGenerator
from .combined import CombinedTreeCandidateGenerator
from .dflash import DFlashTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
from .selection import drafter_kind, make_candidate_generator

__all__ = [
    "CombinedTreeCandidateGenerator",
    "DFlashTreeCandidateGenerator",
    "DraftContext",
    "PromptLookupTreeCandidateGenerator",
    "TreeCandidateGenerator",
    "drafter_kind",
    "make_candidate_generator",
]
