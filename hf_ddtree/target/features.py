"""Recording the outputs of the target's decoder layers, for the drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.active_pass import traced
from .layers import decoder_layers

# Tokens of a prompt whose features are reduced at once.
TOKENS_AT_ONCE = 1024

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
        self._prompt: _PromptFeatures | None = None
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
                is_last = layer_id == max(self.layer_ids)
                if self._prompt is not None and is_last and not torch.compiler.is_compiling():
                    self._prompt.add(self._take_layers())

        return record

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forwards of this context."""
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    @contextmanager
    def recording_prompt(self, reduce: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Records the forwards over a prompt: of each, only what `reduce` makes of the features is kept.

        Args:
            reduce: Makes `(batch, tokens, size)` of `(batch, tokens, features)`, for some tokens at a time.
        """
        self._prompt = _PromptFeatures(self.join, reduce)
        with self.recording():
            yield

    def take_prompt(self) -> Tensor | None:
        """`(batch, tokens, size)`, what the features of the prompt were reduced to; None if no layer is recorded."""
        prompt, self._prompt = self._prompt, None
        if prompt is None or not self.layer_ids:
            return None
        if self._outputs[self.layer_ids[0]]:  # of a forward that was traced
            prompt.add(self._take_layers())
        return torch.cat(prompt.parts, dim=1) if len(prompt.parts) > 1 else prompt.parts[0]

    def take(self) -> Tensor | None:
        """`(batch, length, len(layer_ids) * hidden_size)` since the last call, None if no layer is recorded."""
        return self.join(self._take_layers())

    def _take_layers(self) -> list[Tensor]:
        """The outputs of each layer since the last call."""
        layers = []
        for layer_id in self.layer_ids:
            recorded = self._outputs[layer_id]
            layers.append(torch.cat(recorded, dim=1) if len(recorded) > 1 else recorded[0])
        for recorded in self._outputs.values():
            recorded.clear()
        return layers

    def join(self, features: Sequence[Tensor]) -> Tensor | None:
        """The outputs of the layers as one tensor, which `take` returns."""
        return torch.cat([one.to(features[0].device) for one in features], dim=-1) if features else None

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


class _PromptFeatures:
    """What is kept of the features of a prompt.

    Args:
        join: Makes the features of the outputs of all layers.
        reduce: What is kept of features.

    Attributes:
        parts: Each `(batch, tokens, size)`, one after the other.
    """

    def __init__(self, join: Callable[[Sequence[Tensor]], Tensor | None], reduce: Callable[[Tensor], Tensor]) -> None:
        self._join = join
        self._reduce = reduce
        self.parts: list[Tensor] = []

    def add(self, layers: Sequence[Tensor]) -> None:
        """Takes the outputs of a forward, each `(batch, tokens, hidden_size)`."""
        for first in range(0, layers[0].shape[1], TOKENS_AT_ONCE):
            features = self._join([layer[:, first : first + TOKENS_AT_ONCE] for layer in layers])
            assert features is not None
            self.parts.append(self._reduce(features))
