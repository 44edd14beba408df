"""Candidate generators: how trees are drafted, a file per way."""

from .base import TreeCandidateGenerator
from .causal_lm import CausalLMTreeCandidateGenerator
from .combined import CombinedTreeCandidateGenerator
from .context import DraftContext, join_features
from .dflash import DFlashTreeCandidateGenerator
from .mtp import MTPTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
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
    "join_features",
]
