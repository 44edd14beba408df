"""What a model's forward takes for the nodes of a tree: tokens, positions, masks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..attention.mask import chunk_windows, to_additive, tree_attention_mask
from ..interop.generation import prepares_as_usual
from ..interop.models import attention_implementation
from ..tree.tree_batch import TreeBatch
from .cache_rows import CommittedRows
from .layers import WINDOWS, layer_types, window_of
from .requirements import check_keeps_positions
from .static_cache import buffer_length

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class ForwardInputs:
    """What a model's forward takes for the nodes of trees. What is the same in all rounds is found out once.

    Args:
        model: The model.
        cache: Its cache, filled by a prefill.
        rows: What the cache holds of each row.
        model_kwargs: Keyword arguments of the forward as `generate()` keeps them after prefill.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, rows: CommittedRows, model_kwargs: dict[str, Any]
    ) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._rows = rows
        self._model_kwargs = model_kwargs
        self._windows = {kind: window_of(config, kind) for kind in set(layer_types(config))}
        self._by_kind = getattr(config, "layer_types", None) is not None
        self._is_additive = attention_implementation(config) == "eager"
        self._buffer_length = buffer_length(cache)
        self._drops_old_keys = any(cache.is_sliding)
        self._prepared: dict[str, Any] | None = None

    def of(self, tree_batch: TreeBatch, attention_mask: Tensor | None = None) -> dict[str, Any]:
        """All arguments but a tree's mask.

        Args:
            tree_batch: The trees.
            attention_mask: What the model prepares its inputs with.

        Raises:
            ValueError: If the model does not take positions.
        """
        per_node = {"position_ids": self._rows.root_position_ids() + tree_batch.depths}
        for name in TOKEN_TYPES:  # nodes continue the text, so they have its last token's type
            if self._model_kwargs.get(name) is not None:
                per_node[name] = self._model_kwargs[name][:, -1:].expand(-1, tree_batch.num_nodes)
        if self._prepared is not None:
            return self._prepared | per_node | {"input_ids": tree_batch.token_ids, "attention_mask": attention_mask}
        inputs = self._model_kwargs | per_node | {"attention_mask": attention_mask}
        model_inputs = self._model.prepare_inputs_for_generation(tree_batch.token_ids, **inputs)
        check_keeps_positions(self._model, model_inputs)
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 0
        if self._buffer_length is None and prepares_as_usual(self._model):
            self._prepared = dict(model_inputs)
        return model_inputs

    def masks(self, tree_batch: TreeBatch) -> tuple[Tensor | dict[str, Tensor | None] | None, list[Tensor]]:
        """The mask in the form that the model's forward takes, as Transformers' `create_masks_for_generate` makes it.

        Also those of its parts under which every node sees all cached keys.
        """
        cached_mask = self._rows.mask()
        masks: dict[str, Tensor | None] = {}
        open_masks: list[Tensor] = []
        for kind, window in self._windows.items():
            if kind not in WINDOWS:
                masks[kind] = None
                continue
            masks[kind] = mask = self._mask(tree_batch, kind, window, cached_mask)
            within = window is None or (
                kind == "sliding_attention" and self._rows.num_cached + tree_batch.num_nodes <= window
            )
            if within and cached_mask is None and self._buffer_length is None:
                open_masks.append(mask)
        return masks if self._by_kind else masks.popitem()[1], open_masks

    def _mask(self, tree_batch: TreeBatch, kind: str, window: int | None, cached_mask: Tensor | None) -> Tensor:
        rows = self._rows
        if window is None:
            visible = tree_attention_mask(tree_batch, rows.num_cached, cached_mask)
        else:
            reach = chunk_windows(tree_batch, rows.root_indices(), window) if kind == "chunked_attention" else window
            if self._drops_old_keys:
                kept = min(rows.num_cached, window - 1)
                visible = tree_attention_mask(tree_batch, kept, rows.window_mask(cached_mask, kept), reach)
            else:
                # A cache that was made without the model's config keeps all keys of every layer.
                visible = tree_attention_mask(tree_batch, rows.num_cached, cached_mask, reach, rows.before_root())
        if self._buffer_length is not None:
            visible = nn.functional.pad(visible, (0, self._buffer_length - visible.shape[-1]), value=False)
        return to_additive(visible, self._model.dtype) if self._is_additive else visible


def attention_windows(model: PreTrainedModel, cache: Cache) -> list[int | None]:
    """For each attention layer how many of the last keys its cache keeps, the newest included; None if all."""
    config = model.config.get_text_config()
    kinds = [kind for kind in layer_types(config) if kind in WINDOWS]
    return [window_of(config, kind) if any(cache.is_sliding) else None for kind in kinds]
