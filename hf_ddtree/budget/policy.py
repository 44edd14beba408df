"""The interface of a budget policy, and the fixed budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..tree.draft_tree import DraftTree
from ..tree.shape import MOST_NODES


@dataclass(frozen=True)
class RoundCost:
    """Cost and yield of a round.

    Attributes:
        num_cached: Tokens in the target's cache before the round, of the longest row.
        num_rows: Rows of the batch.
        num_drafted: Drafted nodes of the largest tree that was verified; 0 if none was.
        accepted: For each row, the number of accepted drafted tokens.
        draft_seconds: Time to draft the trees and to choose their size; None if the drafter was not asked.
        verify_seconds: Time from then until the accepted path is committed and all have learned from it.
    """

    num_cached: int
    num_rows: int
    num_drafted: int
    accepted: Sequence[int]
    draft_seconds: float | None
    verify_seconds: float


@dataclass(init=False, repr=False, eq=False)
class BudgetPolicy(ABC):
    """Decides in each round how many nodes to draft, and how many of them to verify. Pass one as `tree_budget`.

    Attributes:
        most_nodes: Drafted nodes that a static cache is allocated for; larger trees are cut to their most probable
            nodes.
    """

    most_nodes: int = 64

    @property
    def drafting_disabled(self) -> bool:
        """Whether the next round is one of a pause in which nothing is drafted, because drafting has not paid."""
        return False

    def to_dict(self) -> Any:
        """What Transformers prints, and writes to a file, for a policy in a `GenerationConfig`."""
        return repr(self)

    @abstractmethod
    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        """Most nodes per row that the generator shall draft; 0 for a step of standard decoding.

        Args:
            num_cached: Tokens in the target's cache, of the longest row.
            num_rows: Rows of the batch.
        """

    def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
        """How many drafted nodes of each tree to verify, the most probable ones; 0 for the root alone.

        By default all of them.

        Args:
            trees: The drafted trees, one per unfinished row.
            num_cached: Tokens in the target's cache, of the longest row.
        """
        return max(tree.num_drafted for tree in trees)

    def observe(self, cost: RoundCost) -> None:  # noqa: B027
        """Learns from a round; by default nothing."""


def checked_nodes(policy: BudgetPolicy, name: str, nodes: Any) -> int:
    """A number of nodes that a policy gives, limited to what a tree can have.

    Args:
        policy: The policy.
        name: The name of its method or attribute.
        nodes: The value of that.

    Raises:
        ValueError: If it is no integer of at least 0.
    """
    if not isinstance(nodes, Integral) or isinstance(nodes, bool) or int(nodes) < 0:
        raise ValueError(
            f"`{name}` of the policy `{type(policy).__name__}` must give an integer of at least 0, a number of nodes, "
            f"but gives {nodes!r}."
        )
    return min(int(nodes), MOST_NODES)


class FixedBudget(BudgetPolicy):
    """The same number of nodes in each round.

    Args:
        num_nodes: Drafted nodes, the root excluded.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = self.most_nodes = num_nodes

    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        return self.num_nodes
