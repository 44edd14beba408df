"""A drafter and a lookup together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..configuration import DDTreeConfig
from ..tree.draft_tree import DraftTree
from .base import TreeCandidateGenerator
from .context import DraftContext, VerifiedRound
from .dflash import DFlashTreeCandidateGenerator
from .prompt_lookup import PromptLookupTreeCandidateGenerator
from .tree_checks import checked_trees

# Rounds with the drafter before one is left out, and how many of the last ones the averages are of, roughly.
FEWEST_ROUNDS, AVERAGED_ROUNDS = 4, 16
# The least probability of a path of the lookup's that is added to the drafter's tree.
LEAST_MERGED = 0.02
# Accepted tokens per round that are owed to the lookup, below which it pauses.
LEAST_GAIN = 0.02
# Rounds in which the lookup is judged; rounds of its first pause, and how many times as long each later one is.
TRIAL_ROUNDS, FIRST_PAUSE, PAUSE_FACTOR = 16, 32, 4


class CombinedTreeCandidateGenerator(TreeCandidateGenerator):
    """Drafts the most probable nodes of what a drafter and a lookup propose.

    Both build a tree under the whole budget. A path that is in both keeps the higher of its probabilities, and the
    budget goes to the most probable paths of either. Where the lookup finds nothing the tree is the drafter's.

    Where the text repeats itself, the drafter is not asked if the lookup's tree is expected to have as many nodes
    accepted as trees of both have had lately. Where the text does not, and next to nothing is accepted that would not
    have been without it, the lookup pauses with exponential backoff.

    A drafter whose distributions do not depend on the branch gets what the lookup knows of the target
    (`DFlashTreeCandidateGenerator.lookup`).

    Args:
        drafter: The generator whose state and features are used.
        lookup: Another one, which hooks no layers and keeps no state between calls.
        config: Whether the tree is a chain.
        merges: Whether the lookup proposes trees as well.
    """

    def __init__(
        self,
        drafter: TreeCandidateGenerator,
        lookup: PromptLookupTreeCandidateGenerator,
        config: DDTreeConfig | None = None,
        merges: bool = True,
    ) -> None:
        super().__init__()
        self._drafter = drafter
        self._lookup = lookup
        self._merges = merges
        self._lends_tables = isinstance(drafter, DFlashTreeCandidateGenerator) and drafter.wants_lookup
        if self._lends_tables:
            drafter.lookup = lookup
        drafter.reads_along = lookup
        self._is_chain = config is not None and config.tree_shape == "chain"
        self.feature_layers = drafter.feature_layers
        self.reads_whole_prompt = drafter.reads_whole_prompt
        self.end_tokens = drafter.end_tokens | lookup.end_tokens
        self._forget()

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
        self._forget()

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        trees = self._propose(context, budget)
        self.num_forwards = self._drafter.num_forwards
        self.build_seconds = self._drafter.build_seconds + self._lookup.build_seconds
        return [tree.best_chain() for tree in trees] if self._is_chain else trees

    def observe(self, verified: VerifiedRound) -> None:
        self._drafter.observe(verified)
        if self._lends_tables or not self._pause.rounds_left:
            self._lookup.observe(verified)
        self._verified.append(verified)

    def finish(self, context: DraftContext) -> None:
        self._drafter.finish(context)
        self._lookup.finish(context)

    def _forget(self) -> None:
        self._accepted = _Average()  # tokens per row in rounds of both
        self._accuracy = _Average()  # accepted by expected tokens in rounds of the lookup alone
        self._pause = _Pause()
        # What was proposed last: the drafter's trees, None if it was not asked, and whether the lookup's are added to
        # them; and the rounds since.
        self._drafted: list[DraftTree] | None = None
        self._is_merged = False
        self._verified: list[VerifiedRound] = []

    def _propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        if not self._merges:
            return self._drafter.propose(context, budget)
        self._learn(context)
        self._lookup.take_in(context)
        found = None
        if self._lookup.repeats:
            found = self._lookup.build(context, budget)
            if self._suffices(found, context):
                self._drafter.finish(context)
                return found
        self._drafted = self._drafter.propose(context, budget)
        if self._drafter.needs_checks:
            self._drafted = checked_trees(self._drafted, context.roots)
        if found is None:
            if self._pause.passes():
                self._lookup.learn()  # only rounds that follow each other can be learned together
                return self._drafted
            # After the draft, whose transfer from an accelerator brings what the lookup has to learn.
            found = self._lookup.build(context, budget, LEAST_MERGED)
        self._is_merged = True
        return [
            one.merge(other).truncate(budget) if other.num_drafted else one for one, other in zip(self._drafted, found)
        ]

    def _suffices(self, found: list[DraftTree], context: DraftContext) -> bool:
        """Whether the lookup's trees are expected to have as many nodes accepted as those of both."""
        if self._accepted.count < FEWEST_ROUNDS or self._drafter.needs_checks:
            return False
        unfinished = [tree for row, tree in enumerate(found) if not context.emitted or context.emitted[row]]
        expected = sum(tree.expected_length - 1 for tree in unfinished) / max(1, len(unfinished))
        accuracy = self._accuracy.value if self._accuracy.count else 1.0
        return expected * min(1.0, accuracy) >= self._accepted.value

    def _learn(self, context: DraftContext) -> None:
        """Compares what the last round emitted with what each of the two had proposed, and forgets it."""
        drafted, is_merged, verified = self._drafted, self._is_merged, self._verified
        self._drafted, self._is_merged, self._verified = None, False, []
        if len(verified) != 1:
            return
        trees = verified[0].trees
        rows = [row for row, emitted in enumerate(context.emitted) if emitted and trees[row].num_drafted]
        if not rows:
            return
        accepted = sum(len(context.emitted[row]) - 1 for row in rows)
        if drafted is None:
            expected = sum(trees[row].expected_length - 1 for row in rows)
            self._accuracy.add(accepted / max(expected, 1e-6))
        else:
            self._accepted.add(accepted / len(rows))
            if is_merged:
                alone = (drafted[row].truncate(trees[row].num_drafted) for row in rows)
                without = sum(_num_held(tree, context.emitted[row]) for tree, row in zip(alone, rows))
                self._pause.judge((accepted - without) / len(rows))


class _Average:
    """The mean of values, later ones weighing more.

    Attributes:
        value: The mean; 0 before there is a value.
        count: Number of values.
    """

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Takes a value in."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, AVERAGED_ROUNDS)


class _Pause:
    """When the lookup pauses: after a trial without a gain, for longer each time.

    Attributes:
        rounds_left: Of the present pause.
    """

    def __init__(self) -> None:
        self.rounds_left = 0
        self._next_length = FIRST_PAUSE
        self._gains: list[float] = []

    def passes(self) -> bool:
        """Whether this round is one of a pause, which is then a round shorter."""
        is_paused = self.rounds_left > 0
        self.rounds_left -= is_paused
        return is_paused

    def judge(self, gain: float) -> None:
        """Takes in how many more tokens per row a round has accepted than it would have without the lookup."""
        self._gains.append(gain)
        if len(self._gains) < TRIAL_ROUNDS:
            return
        if sum(self._gains) < LEAST_GAIN * TRIAL_ROUNDS:
            self.rounds_left = self._next_length
            self._next_length *= PAUSE_FACTOR
        else:
            self._next_length = FIRST_PAUSE
        self._gains.clear()


def _num_held(tree: DraftTree, tokens: Sequence[int]) -> int:
    """How many tokens that follow the root, one after the other, a tree has drafted."""
    node = 0
    for depth, token in enumerate(tokens):
        child = tree.child_with_token(node, token)
        if child is None:
            return depth
        node = child
    return len(tokens)
