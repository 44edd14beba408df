"""Trees from a P-EAGLE drafter (arXiv:2602.01469)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..drafters.peagle import PEagleDraftModel
from ..tree.build import build_tree
from ..tree.draft_tree import DraftTree
from ..tree.tree_batch import TreeBatch
from .context import DraftContext
from .eagle3 import Eagle3TreeCandidateGenerator
from .mtp import MTPState


class PEagleTreeCandidateGenerator(Eagle3TreeCandidateGenerator):
    """Predicts all depths in one forward and turns their distributions into a tree, as for DFlash.

    The new committed tokens, the root and a chain of mask tokens below it enter the layers together.

    Args:
        drafter: The drafter.
        target_model: The target.
        config: Shape, width and depth of the trees.
        state: An earlier call's `draft_state`, if the sequences continue.

    Raises:
        ValueError: If the drafter does not fit the target.
        TypeError: If the state is not of this kind.
    """

    drafter: PEagleDraftModel

    def __init__(
        self,
        drafter: PEagleDraftModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: MTPState | None = None,
    ) -> None:
        super().__init__(drafter, target_model, config, state)
        self._set_knobs(config, drafter.config.draft_length, drafter.config.draft_length)
        self._calibration = drafter.calibration if self.config.calibrate else None
        self._drafted: tuple[Tensor, Tensor] | None = None  # the candidates of the last round, (batch, depth, k)

    def finish(self, context: DraftContext) -> None:
        self._learn(context)
        super().finish(context)

    @torch.no_grad()
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self._learn(context)
        self._take_in(context)
        roots = context.roots
        depth = self._num_levels(context.tokens_left)
        if not self.state.streams or depth == 0:
            return [DraftTree.root_only(root) for root in roots]
        # A chain of marginals takes the best token at each depth.
        width = 1 if self._shape == "chain" else self._width(budget)
        self._drafted = self._candidates(self._draft(roots, depth), width)
        with self.building():
            return [self._tree(*of_row, budget) for of_row in zip(*self._drafted, roots)]

    def _draft(self, roots: list[int], depth: int) -> Tensor:
        """Hidden states `(batch, depth, hidden_size)` of the roots and the masks below them."""
        masks = [self.drafter.config.mask_token_id] * (depth - 1)
        chains = [DraftTree.chain([root, *masks]) for root in roots]
        inputs = self.drafter.masked_state().expand(depth, -1)
        return torch.stack(self._run_level(0, chains, [inputs] * len(roots)))

    def _window(self, tree_batch: TreeBatch, num_committed: list[int]) -> int:
        return self.drafter.config.sliding_window

    def _tree(self, log_probs: Tensor, token_ids: Tensor, root: int, budget: int) -> DraftTree:
        if self._calibration is None or self._calibration.is_neutral:
            return build_tree(log_probs, token_ids, root, budget, self._shape)
        log_probs, token_ids, next_state = self._calibration.calibrate(log_probs, token_ids)
        return build_tree(log_probs, token_ids, root, budget, self._shape, next_state=next_state)

    def _learn(self, context: DraftContext) -> None:
        """Lets the calibration compare the last round's candidates with the emitted tokens."""
        if self._calibration is not None and self._drafted is not None and context.emitted:
            for log_probs, token_ids, emitted in zip(*self._drafted, context.emitted):
                if emitted:
                    self._calibration.learn(log_probs, token_ids, emitted[: len(log_probs)])
        self._drafted = None
