"""What a model's forward takes for the nodes of a tree: tokens, positions, masks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..attention.mask import chunk_windows, to_additive, tree_attention_mask
from ..interop.models import attention_implementation
from ..tree.tree_batch import TreeBatch
from .cache_rows import CommittedRows
from .layers import WINDOWS, layer_types, window_of
from .requirements import check_keeps_positions
from .static_cache import buffer_length

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def model_inputs_of(
    model: PreTrainedModel,
    batch: TreeBatch,
    rows: CommittedRows,
    model_kwargs: dict[str, Any],
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """What the model's forward takes for the nodes.

    Raises:
        ValueError: If the model does not take positions.
    """
    inputs = model_kwargs | {"attention_mask": attention_mask}
    inputs["position_ids"] = rows.root_positions() + batch.depths
    for name in TOKEN_TYPES:  # nodes continue the text, so they have its last token's type
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, -1:].expand(-1, batch.num_nodes)
    model_inputs = model.prepare_inputs_for_generation(batch.token_ids, **inputs)
    check_keeps_positions(model, model_inputs)
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = 0
    return model_inputs


def attention_mask_of(
    model: PreTrainedModel, batch: TreeBatch, cache: Cache, rows: CommittedRows
) -> tuple[Tensor | dict[str, Tensor | None] | None, list[Tensor]]:
    """The mask in the form that the model's forward takes, as Transformers' `create_masks_for_generate` makes it.

    Also those of its parts under which every node sees all cached keys.
    """
    config = model.config.get_text_config()
    cached_mask = rows.mask()
    length = buffer_length(cache)
    open_masks = []

    def mask(kind: str) -> Tensor | None:
        if kind not in WINDOWS:
            return None
        window = window_of(config, kind)
        if window is None:
            visible = tree_attention_mask(batch, rows.num_cached, cached_mask)
        else:
            reach = chunk_windows(batch, rows.root_indices(), window) if kind == "chunked_attention" else window
            if any(cache.is_sliding):
                kept = min(rows.num_cached, window - 1)
                visible = tree_attention_mask(batch, kept, rows.window_mask(cached_mask, kept), reach)
            else:
                # A cache that was made without the model's config keeps all keys of every layer.
                visible = tree_attention_mask(batch, rows.num_cached, cached_mask, reach, rows.before_root())
        if length is not None:
            visible = nn.functional.pad(visible, (0, length - visible.shape[-1]), value=False)
        if attention_implementation(config) == "eager":
            visible = to_additive(visible, model.dtype)
        within = window is None or (kind == "sliding_attention" and rows.num_cached + batch.num_nodes <= window)
        if within and cached_mask is None and length is None:
            open_masks.append(visible)
        return visible

    masks = {kind: mask(kind) for kind in set(layer_types(config))}
    return masks if getattr(config, "layer_types", None) is not None else masks.popitem()[1], open_masks


def attention_windows(model: PreTrainedModel, cache: Cache) -> list[int | None]:
    """For each attention layer how many of the last keys its cache keeps, the newest included; None if all."""
    config = model.config.get_text_config()
    kinds = [kind for kind in layer_types(config) if kind in WINDOWS]
    return [window_of(config, kind) if any(cache.is_sliding) else None for kind in kinds]
