"""What can be said of a target and a drafter before any weights are read."""

from .checking import check
from .report import CheckReport, LayerKind
from .tree_memory import TreeMemory

__all__ = ["CheckReport", "LayerKind", "TreeMemory", "check"]
