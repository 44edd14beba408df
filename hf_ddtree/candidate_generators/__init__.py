"""Who proposes trees."""

from .base import DraftContext, TreeCandidateGenerator, checked_trees, join_features
from .causal_lm import CausalLMTreeCandidateGenerator
from .combined import CombinedTreeCandidateGenerator
from .dflash import DFlashTreeCandidateGenerator
from .mtp import MTPTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
from .selection import drafter_kind, make_candidate_generator

__all__ = [
    "CausalLMTreeCandidateGenerator",
    "CombinedTreeCandidateGenerator",
    "DFlashTreeCandidateGenerator",
    "DraftContext",
    "MTPTreeCandidateGenerator",
    "PromptLookupTreeCandidateGenerator",
    "TreeCandidateGenerator",
    "checked_trees",
    "drafter_kind",
    "join_features",
    "make_candidate_generator",
]
