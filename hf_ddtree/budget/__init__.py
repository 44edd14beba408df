"""Budget policies: how many nodes to draft and to verify in a round."""

from .auto import AutoBudget
from .policy import BudgetPolicy, FixedBudget, RoundCost

__all__ = ["AutoBudget", "BudgetPolicy", "FixedBudget", "RoundCost"]
