"""The memory that a tree takes, from a dry run on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..attention import dispatch
from ..attention.packed_mask import PackedMasks
from ..attention.tree_pass import TreePass
from ..interop.allocations import PeakMemory
from ..interop.versions import CACHE_KEY
from ..target.cache_rows import CommittedRows
from ..target.features import FeatureRecorder
from ..target.model import CachedModel, Verification
from ..target.preallocation import preallocate
from ..tree.draft_tree import DraftTree


@dataclass(frozen=True)
class TreeMemory:
    """Bytes that one row's tree needs between its verification and the commit, beside what standard decoding holds.

    And what a round takes at most.

    Counted are tensors as they are allocated, not what a kernel needs on its way.

    Attributes:
        nodes: Nodes, the root included.
        context_length: Tokens in the cache, which the masks are as wide as.
        keys_and_values: What the nodes add to the cache of layers with attention.
        recurrent: What layers with a state keep of the nodes: inputs of convolutions, factors of recurrences.
        logits: In the dtype of the output head.
        features: What is recorded for the drafter; 0 if it is not known.
        masks: The attention masks, one for each kind of layer, what tree attention makes of them without a kernel for
            the context, and the ancestor mask in the forms that layers need.
        context: The cache before the round.
        on_the_way: What a verification and its commit allocate at most at once, the parts above included. Where the
            target has a kernel for its attention it is less, as the scores of a layer are counted.
        target: The target's weights and buffers; None if they are not known, as of a quantized one that is not loaded.
    """

    nodes: int
    context_length: int
    keys_and_values: int
    recurrent: int
    logits: int
    features: int
    masks: int
    context: int
    on_the_way: int
    target: int | None

    @property
    def peak(self) -> int | None:
        """What is allocated at most in a round, without the drafter; None if the target's weights are not known."""
        return None if self.target is None else self.target + self.context + self.on_the_way

    @property
    def total(self) -> int:
        """Sum of what stays of the tree until the commit."""
        return self.keys_and_values + self.recurrent + self.logits + self.features + self.masks

    @property
    def per_node(self) -> int:
        """The total's share of a node."""
        return self.total // self.nodes


@torch.no_grad()
def measure_tree_memory(
    model: PreTrainedModel, nodes: int, context_length: int, layer_ids: Sequence[int], target_bytes: int | None = None
) -> TreeMemory:
    """Verifies a tree on a model without weights and counts what stays allocated until the commit.

    Args:
        model: The target on the meta device.
        nodes: Nodes of the tree, the root included.
        context_length: Tokens in the cache.
        layer_ids: The target's layers whose outputs the drafter reads.
        target_bytes: Of the target's weights, if they are known.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prompt = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    tree = DraftTree(torch.arange(nodes, device="cpu") % 2, (torch.arange(nodes, device="cpu") - 1) // 2)
    masks: list[Tensor] = []
    recorder = FeatureRecorder(model, layer_ids)
    dispatch.install(model)
    try:
        model(prompt, use_cache=True, **{CACHE_KEY: cache})
        _lengthen(cache, context_length)
        before = _cache_bytes(cache)
        positions = torch.arange(context_length + 1, device=model.device)[None]
        rows = CommittedRows(context_length, {"position_ids": positions}, 1, model.device)
        model_kwargs = {CACHE_KEY: cache, "use_cache": True, "position_ids": positions, "attention_mask": None}
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: masks.extend(_tensors(kwargs["attention_mask"])), with_kwargs=True
        )
        try:
            cached_model = CachedModel(model, model_kwargs, rows, recorder)
            with cached_model.recording_past():
                verification = cached_model.verify([tree])
                after = _cache_bytes(cache)
                parts = _parts_of(verification, cache, masks)
                cached_model.commit(verification.tree_pass, [[0]])
                on_the_way = _peak_of_round(cached_model, tree)
        finally:
            hook.remove()
    finally:
        recorder.close()
    return TreeMemory(
        nodes=nodes,
        context_length=context_length,
        keys_and_values=after["attention"] - before["attention"],
        recurrent=after["state"] - before["state"] + parts["factors"],
        logits=parts["logits"],
        features=parts["features"],
        masks=parts["masks"],
        context=before["attention"] + before["state"],
        on_the_way=on_the_way,
        target=target_bytes,
    )


def _peak_of_round(cached_model: CachedModel, tree: DraftTree) -> int:
    """What a verification and its commit allocate at most at once, where the cache has room already."""
    preallocate(cached_model.cache)
    peak = 0
    for _ in range(2):  # the first makes the room
        with PeakMemory() as memory:
            cached_model.commit(cached_model.verify([tree]).tree_pass, [[0]])
        peak = memory.peak
    return peak


def _parts_of(verification: Verification, cache: DynamicCache, masks: Sequence[Tensor]) -> dict[str, int]:
    """Bytes of what a verification leaves beside the cache."""
    in_cache = {_storage(tensor) for layer in cache.layers for tensor in _tensors(vars(layer))}
    tree_pass = verification.tree_pass
    assert tree_pass is not None
    for_commit = {_storage(part) for part in _tensors([tree_pass.path_factors, tree_pass.conv_inputs])}
    kept = [part for part in _tensors(tree_pass) if _storage(part) not in in_cache]
    factors, of_tree = (
        [part for part in kept if (_storage(part) in for_commit) == wanted] for wanted in (True, False)
    )
    return {
        "factors": _num_bytes(factors),
        "logits": _num_bytes([verification.outputs.logits]),
        "features": 0 if verification.features is None else _num_bytes([verification.features]),
        "masks": _num_bytes([*masks, *of_tree]),
    }


def _lengthen(cache: DynamicCache, length: int) -> None:
    """Makes a cache on the meta device as long as after that many tokens."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            kept = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = min(length, layer.sliding_window - 1)
                layer.cumulative_length = length
            layer.keys, layer.values = (
                part.new_empty((*part.shape[:-2], kept, part.shape[-1])) for part in (layer.keys, layer.values)
            )


def _cache_bytes(cache: DynamicCache) -> Counter[str]:
    """Bytes of the cache's keys and values, and of its other states."""
    count: Counter[str] = Counter()
    for layer in cache.layers:
        for name, value in vars(layer).items():
            kind = "attention" if name in ("keys", "values") else "state"
            count[kind] += sum(tensor.nbytes for tensor in _tensors(value))
    return count


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value made of lists, dictionaries and objects of this package."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) or isinstance(value, TreePass | PackedMasks):
        yield from _tensors(vars(value))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the memory that the tensors lie in, which several may share."""
    return sum({_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
