"""Recording the outputs of the target's decoder layers, for the drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.active_pass import traced
from .layers import decoder_layers

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
