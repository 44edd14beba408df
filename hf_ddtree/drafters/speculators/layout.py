"""Drafters in the layout of the speculators library (facts from its version 0.9.0)."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..checkpoint import Checkpoint
from ..config_keys import fields_of, refuse_unknown_keys, require_target_width

# The types of the library that are not supported, and why.
UNSUPPORTED_TYPES = {
    "mtp": "its layers draft from the target's checkpoint; `speculators stitch-mtp` writes them there, and "
    "`load_drafter` reads that one",
    "xpress": "its layers are not those of DFlash",
}
# What must be there, as the table of formats says it.
SPECULATORS_NEEDS = (
    "`aux_hidden_state_layer_ids`, `transformer_layer_config`, `mask_token_id`; `d2t` of a reduced vocabulary"
)
# The settings of type `"dflash"`, and their defaults.
DFLASH_DEFAULTS: dict[str, Any] = {
    "aux_hidden_state_layer_ids": None,
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": None,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}
# What else there may be in a config of the library.
LAYOUT_KEYS = fields_of(PreTrainedConfig) | {
    *("has_no_defaults_at_init", "speculators_config", "speculators_model_type", "speculators_version"),
    *("target_hidden_size", "tie_word_embeddings", "transformer_layer_config"),
}
# Settings that the library writes for layers of every family.
_OF_EVERY_FAMILY = ("layer_types", "sliding_window", "use_sliding_window")
# Settings of the drafter's own layers.
_LAYER_SETTINGS = (
    "attention_bias",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def refuse_other_types(checkpoint: Checkpoint) -> None:
    """Refuses by name a type of the speculators library that is not supported.

    Raises:
        ValueError: If the checkpoint was written by the library.
    """
    kind = checkpoint.speculators_type
    if kind is not None:
        reason = UNSUPPORTED_TYPES.get(kind, "its type is not known")
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} is in the speculators format with `speculators_model_type` {kind!r}, "
            f"which is not supported: {reason}. Use one of type 'dflash' or a DFlash checkpoint of z-lab for the same "
            "target, or a small causal language model with the target's tokenizer as `assistant_model`."
        )


def read_speculators_settings(checkpoint: Checkpoint, **own: Any) -> dict[str, Any]:
    """The settings of a `DFlashConfig`, or of one that is derived from it, in a config of the speculators library.

    Layer `i` of `aux_hidden_state_layer_ids` is what enters the target's decoder layer `i`, that is the output of
    layer `i - 1`. All slots of a block see the same context under a sliding window, and a layer with a window is
    causal within the block unless `sliding_window_non_causal` says otherwise.

    Args:
        checkpoint: The checkpoint.
        **own: The defaults of this type's own settings, and those of DFlash's settings where they differ.

    Raises:
        ValueError: If a setting is missing, or a key is not known.
    """
    layers = read_layer_config(checkpoint)
    defaults = DFLASH_DEFAULTS | own
    refuse_unknown_keys(checkpoint, checkpoint.raw_config, LAYOUT_KEYS.union(defaults))
    given = {key: checkpoint.raw_config.get(key, default) for key, default in defaults.items()}
    require_target_width(checkpoint, layers.hidden_size, checkpoint.raw_config.get("target_hidden_size"))
    window, layer_types = getattr(layers, "sliding_window", None), getattr(layers, "layer_types", None)
    if window is None or layer_types is None:
        layer_types = ["full_attention"] * layers.num_hidden_layers
    return {
        **{setting: getattr(layers, setting) for setting in _LAYER_SETTINGS},
        "rope_parameters": rope_parameters_of(layers),
        "head_dim": getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "window_from_root": True,
        "is_causal": False if given.pop("sliding_window_non_causal") else None,
        "target_layer_ids": read_target_layer_ids(checkpoint, "aux_hidden_state_layer_ids"),
        **{key: value for key, value in given.items() if key != "aux_hidden_state_layer_ids"},
        "draft_vocab_size": reduced_vocab_size(given["draft_vocab_size"], layers),
    }


def read_layer_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The config of the drafter's own layers, `transformer_layer_config`, as its own class.

    Raises:
        ValueError: If the class is not known, or a setting is missing or not known.
    """
    layers = checkpoint.raw_config.get("transformer_layer_config") or {}
    model_type = layers.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has a `transformer_layer_config` of `model_type` {model_type!r}, "
            "which this version of Transformers does not know. Install a newer one."
        )
    config_class = CONFIG_MAPPING[model_type]
    known = fields_of(config_class).union(_OF_EVERY_FAMILY)
    refuse_unknown_keys(checkpoint, layers, known, "`transformer_layer_config`")
    parsed = config_class.from_dict(layers)
    if missing := [setting for setting in _LAYER_SETTINGS if not hasattr(parsed, setting)]:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has a `transformer_layer_config` without "
            f"{', '.join(map(repr, missing))}, so the drafter's layers cannot be built."
        )
    return parsed


def rope_parameters_of(layers: PreTrainedConfig) -> dict[str, Any] | None:
    """The rotary embedding's parameters; one for all layers, as the library has it."""
    rope = layers.rope_parameters or {}
    return rope.get("sliding_attention", rope) or None


def reduced_vocab_size(draft_vocab_size: int, layers: PreTrainedConfig) -> int | None:
    """Tokens of a vocabulary that is a part of the target's; None if it is the target's."""
    return None if draft_vocab_size == layers.vocab_size else draft_vocab_size


def read_target_layer_ids(checkpoint: Checkpoint, key: str) -> list[int]:
    """The target's layers to read, from 0, of a setting that counts them from 1.

    Raises:
        ValueError: If it is missing, or names the embeddings' output.
    """
    layer_ids = checkpoint.raw_config.get(key)
    if not layer_ids:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has no `{key}`, so the drafter does not know which of the target's "
            "layers to read. Set them in its config.json."
        )
    if min(layer_ids) < 1:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has `{key}` {layer_ids}, but only the outputs of decoder layers can "
            "be read, whose ids count from 1 here; 0 is the embeddings' output."
        )
    return [layer - 1 for layer in layer_ids]
