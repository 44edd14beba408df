"""Token-tree speculative decoding for Transformers' `generate()`: the same tokens in fewer forwards of the model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import register, unregister

if TYPE_CHECKING:
    from .budget import AutoBudget, BudgetPolicy
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
    from .draft_memory import DraftMemory
    from .drafter_kinds import load_drafter
    from .drafters.calibration import Calibration
    from .output import DDTreeOutput, DDTreeStats
    from .recording import RecordingFolder
    from .shared_drafters import attach
    from .strategy import ddtree
    from .tree.draft_tree import DraftTree

__version__ = "0.1.0"

# Where the public names are; imported when they are first asked for, as PyTorch and Transformers take seconds.
_HOMES = {
    "AutoBudget": "budget",
    "BudgetPolicy": "budget",
    "Calibration": "drafters.calibration",
    "CausalLMTreeCandidateGenerator": "candidate_generators",
    "CheckReport": "check_report",
    "DDTreeConfig": "configuration",
    "DDTreeOutput": "output",
    "DDTreeStats": "output",
    "DFlashTreeCandidateGenerator": "candidate_generators",
    "DraftContext": "candidate_generators",
    "DraftMemory": "draft_memory",
    "DraftTree": "tree.draft_tree",
    "MTPTreeCandidateGenerator": "candidate_generators",
    "RecordingFolder": "recording",
    "TreeCandidateGenerator": "candidate_generators",
    "attach": "shared_drafters",
    "check": "check_report",
    "ddtree": "strategy",
    "load_demo": "demo",
    "load_drafter": "drafter_kinds",
}
# Modules that may be used without a line that imports them.
_PUBLIC_MODULES = (
    "attention",
    "benchmark",
    "budget",
    "candidate_generators",
    "drafters",
    "testing",
    "training",
    "visualize",
)

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
    "DraftMemory",
    "DraftTree",
    "MTPTreeCandidateGenerator",
    "RecordingFolder",
    "TreeCandidateGenerator",
    "attach",
    "check",
    "ddtree",
    "load_demo",
    "load_drafter",
    "register",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
    if name in _PUBLIC_MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})


register()
