"""Which keys of a drafter's `config.json` are known. The others are refused.

A setting that is silently ignored makes a drafter that computes something else than it was trained to, and nothing
would tell why it is seldom right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from .checkpoint import Checkpoint

# Keys that do not change what a drafter computes.
HARMLESS = frozenset(
    (
        # where a config and its weights come from, and how they are loaded
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attn_implementation"),
        *("auto_map", "model_type", "quantization_config", "torch_dtype"),
        # outputs and caches of Transformers' models
        *("is_decoder", "output_attentions", "output_hidden_states", "use_bfloat16", "use_cache"),
        # what it was trained with and for
        *("confidence_head_alpha", "loss_decay_gamma", "max_anchors", "num_anchors", "training_block_size"),
        *("target_model_type", "target_text_model_type"),
        # how other programs run it
        *("runtime_mode", "use_aux_hidden_state"),
        # a target's layers with linear attention, of which a drafter has none, in a config that was copied from it
        *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype"),
    )
)


def fields_of(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """The keys that a config class has fields for, and the older names of some."""
    return frozenset({field.name for field in fields(config_class)} | {"rope_scaling", "rope_theta"})


def refuse_unknown_keys(
    checkpoint: Checkpoint, given: Mapping[str, Any], known: Collection[str], where: str = "config.json"
) -> None:
    """Refuses keys that could change what a drafter computes.

    Args:
        checkpoint: The checkpoint.
        given: A part of its config; None is no setting.
        known: Keys that are read, besides `HARMLESS` ones.
        where: What to call that part in the message.

    Raises:
        ValueError: If there are others.
    """
    if unknown := sorted({key for key, value in given.items() if value is not None}.difference(known, HARMLESS)):
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has {', '.join(map(repr, unknown))} in its {where}, which may change "
            "what the drafter computes and is not known here. Use another drafter, or remove from its config.json "
            "what does not matter."
        )


def refuse_other_values(
    checkpoint: Checkpoint, given: Mapping[str, Any], allowed: Mapping[str, Collection[Any]]
) -> None:
    """Raises `ValueError` if a key has another value than those that mean what is computed."""
    for key, values in allowed.items():
        if key in given and given[key] not in values:
            raise ValueError(
                f"The checkpoint {checkpoint.name!r} has a config.json with {key!r} {given[key]!r}, which is not "
                f"supported; it may be {' or '.join(map(repr, values))}. Use another drafter."
            )


def require_keys(
    checkpoint: Checkpoint, kind: str, given: Collection[str], required: Collection[str], where: str = "config.json"
) -> None:
    """Raises `ValueError` if a setting is missing.

    Args:
        checkpoint: The checkpoint.
        kind: What to call the drafter.
        given: The keys that are there.
        required: Those that must be.
        where: What to call that part of the config.
    """
    if missing := [key for key in required if key not in given]:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} is a {kind} drafter, but its {where} has no {missing}. Download it "
            "again, or set them to what it was trained with."
        )


def require_target_width(checkpoint: Checkpoint, hidden_size: int | None, target_hidden_size: int | None) -> None:
    """Raises `ValueError` if the drafter says that its target is of another width than itself."""
    if target_hidden_size not in (None, hidden_size):
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has `hidden_size` {hidden_size}, but `target_hidden_size` "
            f"{target_hidden_size}. Drafters of another width than their target are not supported."
        )
