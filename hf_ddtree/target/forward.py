"""One forward of the target model over a tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import ModelOutput

from ..attention import active_pass
from ..attention.mask import chunk_windows, to_additive, tree_attention_mask
from ..attention.tree_pass import TreePass
from ..interop.models import attention_implementation
from ..interop.versions import CACHE_KEY
from ..tree.draft_tree import DraftTree
from ..tree.tree_batch import TreeBatch
from .cache_rows import CommittedRows
from .compiled import CompiledForward
from .features import FeatureRecorder
from .layers import WINDOWS, layer_types, window_of
from .past_recording import set_past_recording, stateful_layers
from .requirements import check_inputs
from .static_cache import buffer_length, padded_size

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class Verification:
    """What the target says about a round's trees, and what the commit of their paths needs.

    Attributes:
        outputs: The target's outputs; `logits` are `(batch, n, vocab)`, what it predicts after each node.
        features: `(batch, n, features)` of the recorder's layers, None if it records none.
        tree_pass: Factors of the layers with a recurrent state; None if the roots are committed already.
    """

    outputs: ModelOutput
    features: Tensor | None
    tree_pass: TreePass | None

    @property
    def has_nan(self) -> bool:
        """Whether some node's logits are NaN. One of them tells: NaN in a hidden state spreads to all logits."""
        return bool(self.outputs.logits[..., 0].isnan().any())


def verify(
    model: PreTrainedModel,
    trees: Sequence[DraftTree],
    rows: CommittedRows,
    model_kwargs: dict[str, Any],
    recorder: FeatureRecorder,
    forward: CompiledForward | None = None,
) -> Verification:
    """Runs the target once over all nodes of one tree a row.

    Afterwards the cache holds every node behind the committed tokens: call `commit` before anything else reads it.

    Args:
        model: The target model, with `dispatch.install` done and inside `recording_past`.
        trees: One tree a row. Their roots are the last emitted tokens, which the cache does not hold yet.
        rows: What the cache holds.
        model_kwargs: As `generate()` keeps them after prefill.
        recorder: Records the features for the drafter.
        forward: What to run instead of the model itself.

    Raises:
        RuntimeError: If a layer with a state did not go through the tree operators.
        ValueError: If the model does not take positions.
    """
    cache: DynamicCache | StaticCache = model_kwargs[CACHE_KEY]
    is_static = buffer_length(cache) is not None
    batch = TreeBatch.from_trees(trees, rows.device, padded_size(max(map(len, trees))) if is_static else 1)
    tree_pass = TreePass(batch, rows.lengths)
    mask = _attention_mask(model, batch, cache, rows)
    # Over a static cache a causal mask is made, for nothing, unless there is a mask already.
    masks = mask.values() if isinstance(mask, dict) else [mask]
    given = next(one for one in masks if one is not None) if is_static else None
    model_inputs = _model_inputs(model, batch, rows, model_kwargs, given)
    model_inputs["attention_mask"] = mask
    outputs, features = _run(model, model_inputs, tree_pass, recorder, forward)
    _require_tree_operators(model, cache, tree_pass)
    return Verification(outputs, features, tree_pass)


def step(
    model: PreTrainedModel,
    roots: Sequence[DraftTree],
    rows: CommittedRows,
    model_kwargs: dict[str, Any],
    recorder: FeatureRecorder,
    forward: CompiledForward | None = None,
) -> Verification:
    """Runs the target on the roots alone, as plain decoding does, and commits them.

    Args:
        model: The target model.
        roots: Trees with nothing drafted, one a row.
        rows: What the cache holds: as many tokens of every row. Brought up to date.
        model_kwargs: As `generate()` keeps them after prefill.
        recorder: Records the features for the drafter.
        forward: What to run instead of the model itself.
    """
    cache: DynamicCache | StaticCache = model_kwargs[CACHE_KEY]
    batch = TreeBatch.from_trees(roots, rows.device)
    cached_mask = rows.mask()
    if cached_mask is not None:
        cached_mask = nn.functional.pad(cached_mask.long(), (0, 1), value=1)
    model_inputs = _model_inputs(model, batch, rows, model_kwargs, cached_mask)
    with set_past_recording(cache, False):
        outputs, features = _run(model, model_inputs, None, recorder, forward)
    rows.advance([1] * len(roots))
    return Verification(outputs, features, None)


def _run(
    model: PreTrainedModel,
    model_inputs: dict[str, Any],
    tree_pass: TreePass | None,
    recorder: FeatureRecorder,
    forward: CompiledForward | None,
) -> tuple[ModelOutput, Tensor | None]:
    """The model's outputs and the features; `tree_pass` gets what its stateful layers leave."""
    ran = None if forward is None else forward(model_inputs, tree_pass, recorder.layer_ids)
    if ran is not None:
        outputs, features = ran
        return outputs, recorder.join(features)
    with recorder.recording(), nullcontext() if tree_pass is None else active_pass.active(tree_pass):
        outputs = model(**model_inputs, return_dict=True)
    return outputs, recorder.take()


def _model_inputs(
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
    for name in TOKEN_TYPES:
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, -1:].expand(-1, batch.num_nodes)
    model_inputs = model.prepare_inputs_for_generation(batch.token_ids, **inputs)
    check_inputs(model, model_inputs)
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = 0
    return model_inputs


def _attention_mask(
    model: PreTrainedModel, batch: TreeBatch, cache: DynamicCache, rows: CommittedRows
) -> Tensor | dict[str, Tensor | None] | None:
    """The mask in the form that the model's forward takes, as Transformers' `create_masks_for_generate` makes it."""
    config = model.config.get_text_config()
    cached_mask = rows.mask()
    length = buffer_length(cache)

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
        return to_additive(visible, model.dtype) if attention_implementation(config) == "eager" else visible

    masks = {kind: mask(kind) for kind in set(layer_types(config))}
    return masks if getattr(config, "layer_types", None) is not None else masks.popitem()[1]


def attention_windows(model: PreTrainedModel, cache: DynamicCache) -> list[int | None]:
    """For each attention layer how many of the last keys its cache keeps, the newest included; None if all."""
    config = model.config.get_text_config()
    kinds = [kind for kind in layer_types(config) if kind in WINDOWS]
    return [window_of(config, kind) if any(cache.is_sliding) else None for kind in kinds]


def _require_tree_operators(model: PreTrainedModel, cache: DynamicCache, tree_pass: TreePass) -> None:
    layers = stateful_layers(cache)
    recurrent = [layer for layer in layers if layer.recurrent_states[0] is not None]
    found = len(tree_pass.path_factors), len(tree_pass.conv_inputs)
    if found != (len(recurrent), len(layers)):
        raise RuntimeError(
            f"{type(model).__name__} has {len(layers)} layers with a convolution, {len(recurrent)} of them with a "
            f"recurrent state, but {found[0]} recurrences and {found[1]} convolutions of them went through the tree "
            "operators. Another kernel has taken their place, and it would give wrong tokens. Load the model without "
            "it (`use_kernels=False`), do not call `hf_ddtree.unregister()` meanwhile, or generate without "
            "`generation_strategy`."
        )
