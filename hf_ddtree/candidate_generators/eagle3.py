"""Trees from an EAGLE-3 drafter (arXiv:2503.01840)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..attention.mask import tree_attention_mask
from ..configuration import DDTreeConfig
from ..devices import on_device
from ..drafters.eagle3 import Eagle3DraftModel
from ..drafters.eagle3.checkpoint import check_eagle3_fits
from ..target.cache_rows import CommittedRows
from ..tree.shape import TreeShape
from ..tree.tree_batch import TreeBatch
from .mtp import MTPState, MTPTreeCandidateGenerator


class Eagle3TreeCandidateGenerator(MTPTreeCandidateGenerator):
    """Expands a tree level by level, fed with the target's features up to the root and its own outputs below it.

    EAGLE's trees keep the most probable nodes of each level, and of those the most probable in the end. Here a node
    that is not among the most probable so far is never expanded, and what is kept is the best-first tree.

    Args:
        drafter: The drafter.
        target_model: The target.
        config: Shape, width and depth of the trees; five levels if `draft_length` does not say otherwise.
        state: An earlier call's `draft_state`, if the sequences continue.

    Raises:
        ValueError: If the drafter does not fit the target.
        TypeError: If the state is not of this kind.
    """

    default_shape: ClassVar[TreeShape] = "best_first"
    drafter: Eagle3DraftModel

    def __init__(
        self,
        drafter: Eagle3DraftModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: MTPState | None = None,
    ) -> None:
        check_eagle3_fits(drafter.config, target_model)
        layer_ids = drafter.config.layer_ids(target_model.config.get_text_config().num_hidden_layers)
        self._target_token_ids = drafter.target_token_ids
        self._set_up(drafter, target_model, config, state, layer_ids, num_layers=1)

    @torch.no_grad()
    def reduce_features(self, features: Tensor) -> Tensor:
        return self.drafter.project(features)

    def _new_cache(self) -> DynamicCache:
        return DynamicCache()

    def _run_layer(
        self,
        layer: int,
        tree_batch: TreeBatch,
        rows: CommittedRows,
        hidden_states: Tensor,
        cache: DynamicCache,
        num_committed: list[int],
    ) -> Tensor:
        masks = {}
        for kind in set(self.drafter.config.layer_types):
            window = self._window(tree_batch, num_committed) if kind == "sliding_attention" else None
            before_root = None if window is None else rows.before_root()
            masks[kind] = tree_attention_mask(tree_batch, rows.num_cached, rows.mask(), window, before_root)
        embeddings = self.drafter.embed(tree_batch.token_ids, self._embeddings)
        return self.drafter(embeddings, hidden_states, rows.root_position_ids() + tree_batch.depths, masks, cache)

    def _window(self, tree_batch: TreeBatch, num_committed: list[int]) -> Tensor | int:
        """The window of each node, which reaches back from the root: all depths of a draft see the same context."""
        below_root = tree_batch.depths - on_device(num_committed, tree_batch.depths.device)[:, None]
        return self.drafter.config.sliding_window + below_root.clamp(min=0)

    def _candidates(self, hidden_states: Tensor, width: int) -> tuple[Tensor, Tensor]:
        log_probs, token_ids = self.best_on_host(self.drafter.compute_logits(hidden_states), width)
        if self._target_token_ids is not None:
            self._target_token_ids = self._target_token_ids.to(token_ids.device)
            token_ids = self._target_token_ids[token_ids]
        return log_probs, token_ids
