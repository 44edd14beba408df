"""A drafter and a lookup together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..configuration import DDTreeConfig
from ..tree.draft_tree import DraftTree
from .base import TreeCandidateGenerator
from .context import DraftContext, VerifiedRound
from .dflash import DFlashTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
from .tree_checks import checked_trees


class CombinedTreeCandidateGenerator(TreeCandidateGenerator):
    """Drafts the most probable nodes of what a drafter and a lookup propose.

    Both build a tree under the whole budget. A path that is in both keeps the higher of its probabilities, and the
    budget goes to the most probable paths of either. Where the lookup finds nothing the tree is the drafter's.

    A drafter whose distributions do not depend on the branch gets what the lookup knows of the target
    (`DFlashTreeCandidateGenerator.successors`).

    Args:
        drafter: The generator whose state and features are used.
        lookup: Another one, which hooks no layers and keeps no state between calls.
        config: Whether the tree is a chain.
        merges: Whether the lookup proposes trees as well.
    """

    def __init__(
        self,
        drafter: TreeCandidateGenerator,
        lookup: TreeCandidateGenerator,
        config: DDTreeConfig | None = None,
        merges: bool = True,
    ) -> None:
        super().__init__()
        self._drafter = drafter
        self._lookup = lookup
        self._merges = merges
        if (
            isinstance(drafter, DFlashTreeCandidateGenerator)
            and isinstance(lookup, PromptLookupTreeCandidateGenerator)
            and drafter.wants_successors
        ):
            drafter.successors = lookup
        self._is_chain = config is not None and config.tree_shape == "chain"
        self.feature_layers = drafter.feature_layers
        self.reads_whole_prompt = drafter.reads_whole_prompt
        self.end_tokens = drafter.end_tokens | lookup.end_tokens

    @property
    def state(self) -> Any:
        """The drafter's."""
        return self._drafter.state

    def reduce_features(self, features: Tensor) -> Tensor:
        return self._drafter.reduce_features(features)

    @property
    def needs_checks(self) -> bool:
        """Whether the drafter's trees must be checked, which then are checked before and after the merge."""
        return super().needs_checks or self._drafter.needs_checks

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        self._drafter.start(cached_ids, num_cached)
        self._lookup.start(cached_ids, num_cached)

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        drafted = self._drafter.propose(context, budget)
        found = self._lookup.propose(context, budget) if self._merges else []
        self.num_forwards = self._drafter.num_forwards
        self.build_seconds = self._drafter.build_seconds + self._lookup.build_seconds
        if not self._merges:
            return drafted
        if self._drafter.needs_checks:
            drafted = checked_trees(drafted, context.roots)
        merged = [
            one.merge(other).truncate(budget) if other.num_drafted else one for one, other in zip(drafted, found)
        ]
        return [tree.best_chain() for tree in merged] if self._is_chain else merged

    def observe(self, verified: VerifiedRound) -> None:
        self._drafter.observe(verified)
        self._lookup.observe(verified)

    def finish(self, context: DraftContext) -> None:
        self._drafter.finish(context)
        self._lookup.finish(context)
