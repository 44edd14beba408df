"""Token-tree speculative decoding for Transformers' `generate()`: the same tokens in fewer forwards of the model."""

from .budget.auto import AutoBudget
from .budget.policy import BudgetPolicy
from .candidate_generators import (
    CausalLMTreeCandidateGenerator,
    DFlashTreeCandidateGenerator,
    DraftContext,
    MTPTreeCandidateGenerator,
    TreeCandidateGenerator,
)
from .check_report import CheckReport, check
from .configuration import DDTreeConfig
from .demo import load_demo
from .drafter_kinds import load_drafter
from .drafters.calibration import Calibration
from .output import DDTreeOutput, DDTreeStats
from .registration import register, unregister
from .strategy import ddtree
from .tree.draft_tree import DraftTree

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
