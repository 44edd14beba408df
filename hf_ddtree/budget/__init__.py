"""How many nodes a round is worth."""

from .auto import AutoBudget
from .policy import BudgetPolicy, FixedBudget, RoundCost

__all__ = ["AutoBudget", "BudgetPolicy", "FixedBudget", "RoundCost"]
