"""Drafters in the layout that z-lab publishes, which JetSpec and SpecForge share.

Their `config.json` is that of a Qwen3 model. The drafter's own settings are in `dflash_config`, or beside it in some
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Qwen3Config

from ..checkpoint import Checkpoint
from ..config_keys import fields_of, refuse_other_values, refuse_unknown_keys, require_keys, require_target_width

# The settings of every drafter in this layout.
SETTINGS = (
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "is_causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
# Other names of `is_causal`: JetSpec's, and that of vLLM.
CAUSAL = ("is_causal", "causal_head", "causal")
# Keys of which only these values mean what is computed here.
ONLY = {"attention_mode": ("gqa", "mha"), "dspark_backbone_conv_enabled": (False,), "use_swa": (False,)}
# What must be there in every one, as the table of formats says it.
ZLAB_NEEDS = "`mask_token_id`, and `target_layer_ids` or `num_target_layers`, in `dflash_config` or beside it"
# What else there may be.
_LAYOUT = ("architectures", "dflash_config", "projector_type", "target_hidden_size", "transformers_version")


def nested_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The contents of `dflash_config`; empty if there are none."""
    return checkpoint.raw_config.get("dflash_config") or {}


def projector_type(checkpoint: Checkpoint) -> str:
    """What SpecForge says is on top of the DFlash layers; `"dflash"` for nothing."""
    return nested_settings(checkpoint).get("projector_type") or "dflash"


def read_zlab_settings(
    checkpoint: Checkpoint, kind: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> dict[str, Any]:
    """The settings of a drafter's config, those of `dflash_config` before those beside it.

    Args:
        checkpoint: The checkpoint.
        kind: What to call the drafter in messages.
        required: Settings of this kind, besides `SETTINGS`, that must be there.
        optional: Settings of this kind that may be there.

    Raises:
        ValueError: If a setting is missing, or a key is not known or has a value that is not.
    """
    sources = checkpoint.raw_config, nested_settings(checkpoint)
    given = {key: value for source in sources for key, value in source.items() if value is not None}
    require_keys(checkpoint, kind, given, required)
    layer_settings = fields_of(Qwen3Config)
    own = (*SETTINGS, "num_target_layers", *required, *optional)
    refuse_unknown_keys(checkpoint, given, layer_settings.union(own, CAUSAL, ONLY, _LAYOUT))
    refuse_other_values(checkpoint, given, ONLY)
    require_target_width(checkpoint, given.get("hidden_size"), given.get("target_hidden_size"))
    causal = {key: bool(given[key]) for key in CAUSAL if key in given}
    if len(set(causal.values())) > 1:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} says that its blocks are causal and that they are not: {causal}. "
            "Keep the one in its config.json that it was trained with."
        )
    settings = {
        key: value for key, value in checkpoint.raw_config.items() if key in layer_settings.difference(_LAYOUT)
    }
    settings |= {key: given[key] for key in own if key in given}
    return settings | ({"is_causal": any(causal.values())} if causal else {})
