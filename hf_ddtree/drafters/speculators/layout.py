"""Drafters in the layout of the speculators library (facts from its version 0.9.0)."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from ..checkpoint import Checkpoint

# The types of the library that are not supported, and why.
UNSUPPORTED_TYPES = {
    "dflash2": "its layers and its selector are laid out in another way than in the DFlash 2 checkpoints of z-lab",
    "dspark": "its Markov head decides on tokens that its DFlash layers alone would get wrong",
    "eagle3": "it drafts one token a forward from its own states, and no forward here takes a tree of them",
    "mtp": "it is a multi-token-prediction head",
    "peagle": "it drafts from states of its own that no forward here keeps",
    "xpress": "its layers are not those of DFlash",
}
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


def read_speculators_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of a `DFlashConfig` in the `config.json` of the speculators library.

    Layer `i` of `aux_hidden_state_layer_ids` is what enters the target's decoder layer `i`, that is the output of
    layer `i - 1`. All slots of a block see the same context under a sliding window, and a layer with a window is
    causal within the block unless `sliding_window_non_causal` says otherwise.

    Raises:
        ValueError: If a setting is missing.
    """
    raw_config, name = checkpoint.raw_config, checkpoint.name
    layers = raw_config.get("transformer_layer_config") or {}
    model_type = layers.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"The checkpoint {name!r} has a `transformer_layer_config` of `model_type` {model_type!r}, which this "
            "version of Transformers does not know. Install a newer one."
        )
    parsed = CONFIG_MAPPING[model_type].from_dict(layers)
    if missing := [setting for setting in _LAYER_SETTINGS if not hasattr(parsed, setting)]:
        raise ValueError(
            f"The checkpoint {name!r} has a `transformer_layer_config` without {', '.join(map(repr, missing))}, so "
            "the drafter's layers cannot be built."
        )
    settings = {setting: getattr(parsed, setting) for setting in _LAYER_SETTINGS}
    rope = settings["rope_parameters"] or {}
    settings["rope_parameters"] = rope.get("sliding_attention", rope) or None
    head_dim = getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads

    window = getattr(parsed, "sliding_window", None)
    layer_types = getattr(parsed, "layer_types", None)
    if window is None or layer_types is None:
        layer_types = ["full_attention"] * parsed.num_hidden_layers
    non_causal = raw_config.get("sliding_window_non_causal", False)

    draft_vocab_size = raw_config.get("draft_vocab_size", 32000)
    return settings | {
        "head_dim": head_dim,
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "window_from_root": True,
        "is_causal": False if non_causal else None,
        "block_size": raw_config.get("block_size", 8),
        "target_layer_ids": _target_layer_ids(raw_config.get("aux_hidden_state_layer_ids"), name),
        "mask_token_id": raw_config.get("mask_token_id"),
        "sample_from_anchor": raw_config.get("sample_from_anchor", False),
        "draft_vocab_size": None if draft_vocab_size == parsed.vocab_size else draft_vocab_size,
    }


def _target_layer_ids(aux_layer_ids: list[int] | None, name: str) -> list[int]:
    if not aux_layer_ids:
        raise ValueError(
            f"The checkpoint {name!r} has no `aux_hidden_state_layer_ids`, so the drafter does not know which of the "
            "target's layers to read. Set them in its config.json."
        )
    if min(aux_layer_ids) < 1:
        raise ValueError(
            f"The checkpoint {name!r} has `aux_hidden_state_layer_ids` {aux_layer_ids}, but only the outputs of "
            "decoder layers can be read, whose ids count from 1 here; 0 is the embeddings' output."
        )
    return [layer - 1 for layer in aux_layer_ids]
