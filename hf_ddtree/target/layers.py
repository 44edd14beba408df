"""Facts about a target's layers: their kinds, their attention windows and where they are in the model."""

from __future__ import annotations

import math

from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)

from ..attention.dispatch import MIXERS

# For each kind of attention layer, the setting that holds its window; None for layers that attend to all keys.
WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

# Layers with a convolution, and with a recurrence or without one.
STATEFUL_LAYER_TYPES = ("linear_attention", "conv")

# The last two have neither keys nor a state.
LAYER_TYPES = (*WINDOWS, *STATEFUL_LAYER_TYPES, "moe", "mlp")

# Entries of `layer_types` that stand for two layers in one.
LAYERS_IN_ONE = {"hybrid": ("linear_attention", "full_attention")}

# Rotary embeddings whose frequencies depend on the highest position of a forward.
CHANGING_ROPE_TYPES = ("dynamic", "longrope")


def first_changing_position(model: PreTrainedModel) -> int | None:
    """The number of positions beyond which the rotary embeddings change; None if they never do."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    limits = [
        min(config.max_position_embeddings, entry.get("original_max_position_embeddings") or math.inf)
        for entry in nested or [parameters]
        if entry.get("rope_type") in CHANGING_ROPE_TYPES
    ]
    return min(map(int, limits), default=None)


def layer_types(config: PretrainedConfig) -> list[str]:
    """The kind of each decoder layer: its entry in `layer_types`, or what Transformers infers where there are none.

    Two layers in one count as two.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [layer for kind in kinds for layer in LAYERS_IN_ONE.get(kind, (kind,))]
    inferred = (kind for kind in ("sliding_attention", "chunked_attention") if window_of(config, kind) is not None)
    return [next(inferred, "full_attention")] * config.num_hidden_layers


def num_attention_layers(config: PretrainedConfig) -> int:
    """How many of the decoder layers attend to keys."""
    return sum(kind in WINDOWS for kind in layer_types(config))


def window_of(config: PretrainedConfig, kind: str) -> int | None:
    """How many keys an attention layer of a kind attends to, the query's own included; None if to all."""
    name = WINDOWS.get(kind)
    return None if name is None else getattr(config, name, None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order.

    Raises:
        ValueError: If the model does not have them under `layers` of its decoder, or they do not give one hidden state
            per token.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or getattr(getattr(decoder, "model", None), "layers", None)
    if getattr(model.config.get_text_config(), "altup_num_inputs", 1) > 1:
        raise ValueError(
            f"The layers of a {type(model).__name__} give several hidden states per token (`altup_num_inputs`), and "
            "no drafter says which of them it reads. Use a drafter that needs no features of the target, such as a "
            "causal language model, or `tree_lookup=True`."
        )
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no list `layers` of decoder layers, so the features that the drafter needs "
            "cannot be recorded. Use another drafter."
        )
    return layers


def operators_of(module: nn.Module) -> tuple[str, ...]:
    """The functions of a layer with a known state that the tree operators replace; none for other layers."""
    name = type(module).__name__
    return next((functions for ending, functions in MIXERS.items() if name.endswith(ending)), ())
