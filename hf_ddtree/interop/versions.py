"""What the supported versions of Transformers call differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

# Transformers renamed `past_key_values` to `cache` in models' arguments, `generate()`'s keyword arguments and outputs.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# The index of the first decoder layer where `output_hidden_states` lists layers: newer versions count the embeddings.
HIDDEN_STATES_OFFSET = 1 if CACHE_KEY == "cache" else 0
# Cache layers of layers that keep nothing; older versions have an empty layer of another kind in their place.
EMPTY_CACHE_LAYERS = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments that `generate()` prepared, None if there is none."""
    return model_kwargs.get(CACHE_KEY)


def captured_layers(layer_ids: Sequence[int]) -> list[int]:
    """The value of `output_hidden_states` that makes a forward return the outputs of these decoder layers, from 0."""
    return [layer_id + HIDDEN_STATES_OFFSET for layer_id in layer_ids]


def hidden_states_of(outputs: ModelOutput, layer_id: int) -> Tensor:
    """The output of a decoder layer from a forward with `captured_layers`; the last one may have been normalised."""
    return outputs.hidden_states[layer_id + HIDDEN_STATES_OFFSET]
