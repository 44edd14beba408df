"""Token-tree speculative decoding for Transformers' `generate()`: the same tokens in fewer forwards of the model."""

from .budget import AutoBudget, BudgetPolicy
from .calibration import Calibration
from .candidate_generators import (
    CausalLMTreeCandidateGenerator,
    DFlashTreeCandidateGenerator,
    DraftContext,
    MTPTreeCandidateGenerator,
    TreeCandidateGenerator,
)
from .checking import CheckReport, check
from .configuration import DDTreeConfig
from .demo import load_demo
from .draft_tree import DraftTree
from .drafters import load_drafter
from .output import DDTreeOutput, DDTreeStats
from .registration import register, unregister
from .strategy import ddtree

__version__ = "0.1.0"

__all__ = [
    "AutoBudget",
    "BudgetPolicy",
    "Calibration",
    "CausalLMTreeCandidateGenerator",
    "CheckReport",
    "DDTreeConfig",
    "DDTreeOutput",
    "DDTreeStats",
    "DFlashTreeCandidateGenerator",
    "DraftContext",
    "DraftTree",
    "MTPTreeCandidateGenerator",
    "TreeCandidateGenerator",
    "check",
    "ddtree",
    "load_demo",
    "load_drafter",
    "register",
    "unregister",
]

register()
