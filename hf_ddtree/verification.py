"""One forward of the target model over a tree, and committing one path of it to the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer
from transformers.utils import ModelOutput

from .attention import dispatch
from .attention.dispatch import TreePass
from .attention.mask import chunk_windows, to_additive, tree_attention_mask
from .attention.path_state import advance_states
from .attention.tracing import traced
from .attention.tree_batch import TreeBatch
from .compat import CACHE_KEY
from .compiled import CompiledForward
from .draft_tree import DraftTree
from .rows import CommittedRows
from .static_cache import buffer_length, padded_size
from .support import WINDOWS, check_inputs, decoder_layers, layer_types, window_of
from .transfer import on_device

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
    with _past_recording(cache, False):
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
    with recorder.recording(), nullcontext() if tree_pass is None else dispatch.active(tree_pass):
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


def commit(
    cache: DynamicCache, verification: Verification, paths: Sequence[Sequence[int]], rows: CommittedRows
) -> None:
    """Makes the cache what it would be had only each path's nodes been fed, in order.

    Args:
        cache: The cache that `verify` fed the trees to.
        verification: What was fed to it.
        paths: One path a row, from the root on; empty for a row that stays as it is.
        rows: What the cache held before; brought up to date.
    """
    tree_pass = verification.tree_pass
    if tree_pass is None:
        return
    before = rows.lengths
    rows.advance(list(map(len, paths)))
    committed = _CommittedPaths(paths, tree_pass.trees.num_nodes, before, rows.num_cached)
    stateful = _stateful_layers(cache)
    _advance_states(stateful, tree_pass, committed)
    _keep_conv_inputs(stateful, tree_pass, committed)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(layer.sliding_window - 1, rows.num_cached)
            layer.keys = committed.last_entries(layer.keys, kept, dim=-2)
            layer.values = committed.last_entries(layer.values, kept, dim=-2)
            layer.cumulative_length = rows.num_cached
        elif isinstance(layer, DynamicLayer):
            layer.keys = committed.in_place(layer.keys)
            layer.values = committed.in_place(layer.values)
        elif isinstance(layer, StaticLayer):
            for entries in (layer.keys, layer.values):
                committed.in_place(entries)
                if committed.is_empty:  # what was fed may be NaN, which no mask hides
                    entries[..., rows.num_cached :, :] = 0.0
            layer.cumulative_length.fill_(rows.num_cached)


def _stateful_layers(cache: DynamicCache) -> list[LinearAttentionLayer]:
    """The layers that keep the inputs of a convolution and perhaps a recurrent state, some beside keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer) and layer.conv_kernel_size[0]]


def _advance_states(layers: list[LinearAttentionLayer], tree_pass: TreePass, committed: _CommittedPaths) -> None:
    """Commits the recurrent states, layers that are alike together."""
    if committed.is_empty:
        return
    states = [layer.recurrent_states[0] for layer in layers if layer.recurrent_states[0] is not None]
    kinds = [
        (factors.left.device, factors.log_decay.shape, factors.left.shape, factors.right.shape)
        for factors in tree_pass.path_factors
    ]
    for (device, *_), indices in _alike(kinds):
        factors_of_kind = [tree_pass.path_factors[index] for index in indices]
        advance_states([states[index] for index in indices], factors_of_kind, *committed.on(device))


def _keep_conv_inputs(layers: list[LinearAttentionLayer], tree_pass: TreePass, committed: _CommittedPaths) -> None:
    """Commits the last inputs of the convolutions, layers that are alike together."""
    kinds = [
        (layer.conv_kernel_size[0], inputs.shape, inputs.dtype, inputs.device)
        for layer, inputs in zip(layers, tree_pass.conv_inputs)
    ]
    for (kernel_size, *_), indices in _alike(kinds):
        of_kind = torch.cat([tree_pass.conv_inputs[index] for index in indices], dim=1)
        kept = committed.last_entries(of_kind, kernel_size, dim=-1).chunk(len(indices), dim=1)
        for index, inputs in zip(indices, kept):
            if layers[index].record_past:
                layers[index].conv_states[0] = inputs.contiguous()
            else:
                layers[index].conv_states[0].copy_(inputs)


def _alike(kinds: Sequence[Hashable]) -> Iterable[tuple[Any, list[int]]]:
    """Each kind with the places where it stands."""
    places: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places.items()


class _CommittedPaths:
    """The paths of a round as indices into what a cache layer holds after the verification.

    Args:
        paths: One path a row.
        num_nodes: Number of entries that the verification appended.
        before: Committed entries of each row before the round.
        num_cached: Entries of the longest row after it.
    """

    def __init__(self, paths: Sequence[Sequence[int]], num_nodes: int, before: Sequence[int], num_cached: int) -> None:
        longest = max(1, *map(len, paths))
        # A path that is shorter than the longest repeats its last node; an empty one stands for the root.
        padded = [[*path, *[path[-1] if path else 0] * (longest - len(path))] for path in paths]
        self._path = np.array(padded, dtype=np.int64)
        self._lengths = np.array(list(map(len, paths)), dtype=np.int64)
        self._num_nodes = num_nodes
        self._before = before
        self._num_cached = num_cached
        self._indices: dict[tuple[Any, ...], Tensor] = {}
        self.is_empty = not any(paths)
        # Then what is kept is in its place already: behind each row's entries, if all rows have as many. An empty
        # path moves nothing at all: where a drafted token gave NaN, its root may hold NaN too, which no mask hides.
        is_level = min(before) == max(before)
        is_prefix = all(path == list(range(len(path))) for path in paths)
        self._is_prefix = self.is_empty or (is_level and is_prefix)
        self._is_even = min(map(len, paths)) == longest

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The padded paths `(batch, longest)`, and their lengths `(batch,)` unless all are equally long."""
        path, lengths = torch.from_numpy(self._path), torch.from_numpy(self._lengths)
        return on_device(path, device), None if self._is_even else on_device(lengths, device)

    def last_entries(self, entries: Tensor, count: int, dim: int) -> Tensor:
        """The last `count` entries of each row, aligned at the end, along `dim` of `(batch, ...)`."""
        first = entries.shape[dim] - self._num_nodes
        start = first + self._path.shape[1] - count
        if self._is_prefix and self._is_even and start >= 0:
            return entries.narrow(dim, start, count)

        def index() -> np.ndarray:
            rows = []
            for path, length in zip(self._path, self._lengths):
                before = np.maximum(np.arange(first + length - count, first), 0)
                rows.append(np.concatenate((before, first + path[:length]))[-count:])
            return np.array(rows)

        return _gather(entries, self._cached_index(("last", first, count, entries.device), index), dim)

    def in_place(self, entries: Tensor) -> Tensor:
        """Moves the paths' entries of `(batch, ..., n, dim)` behind each row's committed ones; cuts off the rest."""
        if self._is_prefix:
            return entries[..., : self._num_cached, :]
        first = max(self._before)

        def source() -> np.ndarray:
            return first + self._path

        def target() -> np.ndarray:
            step = np.minimum(np.arange(self._path.shape[1]), (self._lengths - 1).clip(0)[:, None])
            return np.array(self._before)[:, None] + step

        moved = _gather(entries, self._cached_index(("source", entries.device), source), dim=-2)
        if len(self._path) == 1:
            entries[..., first : first + self._path.shape[1], :] = moved
        else:
            where = self._cached_index(("target", entries.device), target)
            entries.scatter_(-2, where[:, None, :, None].expand_as(moved), moved)
        return entries[..., : self._num_cached, :]

    def _cached_index(self, key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> Tensor:
        if key not in self._indices:
            self._indices[key] = on_device(torch.from_numpy(make()), key[-1])
        return self._indices[key]


def _gather(entries: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries `index (batch, count)` of each row along `dim` of `(batch, ...)`."""
    if len(index) == 1:
        return entries.index_select(dim, index[0])
    shape = [1] * entries.ndim
    shape[0], shape[dim] = index.shape
    expanded = list(entries.shape)
    expanded[dim] = index.shape[1]
    return entries.gather(dim, index.view(shape).expand(expanded))


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
        return to_additive(visible, model.dtype) if config._attn_implementation == "eager" else visible

    masks = {kind: mask(kind) for kind in set(layer_types(config))}
    return masks if getattr(config, "layer_types", None) is not None else masks.popitem()[1]


def attention_windows(model: PreTrainedModel, cache: DynamicCache) -> list[int | None]:
    """For each attention layer how many of the last keys its cache keeps, the newest included; None if all."""
    config = model.config.get_text_config()
    kinds = [kind for kind in layer_types(config) if kind in WINDOWS]
    return [window_of(config, kind) if any(cache.is_sliding) else None for kind in kinds]


def _require_tree_operators(model: PreTrainedModel, cache: DynamicCache, tree_pass: TreePass) -> None:
    layers = _stateful_layers(cache)
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


@contextmanager
def recording_past(cache: DynamicCache) -> Iterator[None]:
    """Lets the cache's sliding and stateful layers keep all that a round feeds them until the commit.

    Meant for use after prefill: during prefill it would keep the whole prompt. A static cache keeps its shapes.
    """
    for layer in _stateful_layers(cache):
        missing = layer.conv_kernel_size[0] - layer.conv_states[0].shape[-1]
        if missing > 0:
            layer.conv_states[0] = nn.functional.pad(layer.conv_states[0], (missing, 0))
    with _past_recording(cache, type(cache) is DynamicCache):
        yield


@contextmanager
def _past_recording(cache: DynamicCache, record_past: bool) -> Iterator[None]:
    layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    before = [layer.record_past for layer in layers]
    for layer in layers:
        layer.record_past = record_past
    try:
        yield
    finally:
        for layer, was in zip(layers, before):
            layer.record_past = was


_recorder: ContextVar[FeatureRecorder | None] = ContextVar("hf_ddtree_feature_recorder", default=None)


class FeatureRecorder:
    """Records the outputs of some of the target's decoder layers while `recording`, and drops them when taken.

    Other threads may run the same model meanwhile: what their forwards give is not recorded.

    Args:
        model: The target model.
        layer_ids: Which decoder layers, from 0; the features come concatenated in this order.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        depth = len(decoder_layers(model)) if self.layer_ids else 0
        if any(not 0 <= layer_id < depth for layer_id in self.layer_ids):
            raise ValueError(
                f"The drafter reads the layers {self.layer_ids} of the target, which has {depth}: 0 to {depth - 1}."
            )
        self._outputs: dict[int, list[Tensor]] = {layer_id: [] for layer_id in self.layer_ids}
        layers = decoder_layers(model) if self.layer_ids else nn.ModuleList()
        self._hooks = [layers[layer_id].register_forward_hook(self._hook(layer_id)) for layer_id in self._outputs]

    def _hook(self, layer_id: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            if torch.compiler.is_compiling() and traced.features is not None:
                traced.features[layer_id] = hidden_states
            elif _recorder.get() is self:
                self._outputs[layer_id].append(hidden_states)

        return record

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forwards of this context."""
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    def take(self) -> Tensor | None:
        """`(batch, length, len(layer_ids) * hidden_size)` since the last call, None if no layer is recorded."""
        if not self.layer_ids:
            return None
        layers = {
            layer_id: torch.cat(recorded, dim=1) if len(recorded) > 1 else recorded[0]
            for layer_id, recorded in self._outputs.items()
        }
        for recorded in self._outputs.values():
            recorded.clear()
        return self.join([layers[layer_id] for layer_id in self.layer_ids])

    def join(self, features: Sequence[Tensor]) -> Tensor | None:
        """The outputs of the layers as one tensor, which `take` returns."""
        return torch.cat([one.to(features[0].device) for one in features], dim=-1) if features else None

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
