"""Who proposes trees."""

from .base import TreeCandidateGenerator
from .causal_lm import CausalLMTreeCandidateGenerator
from .combined import CombinedTreeCandidateGenerator
from .context import DraftContext, join_features
from .dflash import DFlashTreeCandidateGenerator
from .mtp import MTPTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
from .selection import drafter_kind, make_candidate_generator
from .tree_checks import checked_trees

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
