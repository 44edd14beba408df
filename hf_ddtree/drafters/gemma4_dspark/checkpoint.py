"""Checkpoints of DSpark drafters with Gemma 4's layers, as DeepSpec writes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import Gemma4TextConfig

from ..checkpoint import Checkpoint
from ..config_keys import fields_of, refuse_other_values, refuse_unknown_keys, require_keys
from ..dflash.checkpoint import check_dflash_fits, load_dflash
from ..kind import ALONG_BRANCH, DrafterKind, Format
from .config import Gemma4DSparkConfig
from .model import Gemma4DSparkDraftModel

ARCHITECTURE = "Gemma4DSparkModel"
# The settings that have the same name here.
REQUIRED = (
    *("attention_bias", "attention_k_eq_v", "block_size", "enable_confidence_head", "hidden_size"),
    *("intermediate_size", "markov_rank", "mask_token_id", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "num_target_layers", "rms_norm_eps", "target_layer_ids", "vocab_size"),
)
OPTIONAL = ("confidence_head_with_markov", "final_logit_softcapping", "markov_head_type")
# Those of Gemma 4's full attention.
OF_LAYERS = ("global_head_dim", "hidden_activation", "num_global_key_value_heads", "num_key_value_heads")
# Keys of which only these values mean what is computed here.
ONLY = {"enable_moe_block": (False,), "hidden_size_per_layer_input": (0,), "use_double_wide_mlp": (False,)}
LAYER_TYPE = "full_attention"


def is_gemma4_dspark(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds such a drafter."""
    return checkpoint.model_type == Gemma4DSparkConfig.model_type or ARCHITECTURE in checkpoint.architectures


def read_gemma4_dspark_config(checkpoint: Checkpoint) -> Gemma4DSparkConfig:
    """The configuration of a DSpark drafter with Gemma 4's layers.

    All of them have Gemma 4's full attention. Embeddings are scaled by the root of their size, as Gemma's are.

    Raises:
        ValueError: If a setting is missing or out of range, or a key is not known or has a value that is not.
    """
    if checkpoint.model_type == Gemma4DSparkConfig.model_type:
        return Gemma4DSparkConfig.from_dict(checkpoint.raw_config)
    given = {key: value for key, value in checkpoint.raw_config.items() if value is not None}
    known = fields_of(Gemma4TextConfig).difference(("per_layer_config",)).union(REQUIRED, OPTIONAL, OF_LAYERS)
    refuse_unknown_keys(checkpoint, given, known)
    layer_types = [LAYER_TYPE] * len(given.get("layer_types", ()))
    refuse_other_values(checkpoint, given, {**ONLY, "layer_types": (layer_types,)})
    if layer_types and len(layer_types) != given.get("num_hidden_layers"):
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has a config.json with `num_hidden_layers` "
            f"{given.get('num_hidden_layers')!r}, but {len(layer_types)} `layer_types`. Use another drafter."
        )
    shares = given.get("attention_k_eq_v")
    key_heads = "num_global_key_value_heads" if shares else "num_key_value_heads"
    rope: dict[str, Any] = given.get("rope_parameters") or {}
    require_keys(checkpoint, "DSpark", given, (*REQUIRED, "global_head_dim", "hidden_activation", key_heads))
    require_keys(checkpoint, "DSpark", rope, (LAYER_TYPE,), "`rope_parameters`")
    return Gemma4DSparkConfig(
        **{key: given[key] for key in (*REQUIRED, *OPTIONAL) if key in given},
        head_dim=given["global_head_dim"],
        hidden_act=given["hidden_activation"],
        num_key_value_heads=given[key_heads],
        layer_types=layer_types,
        rope_parameters=rope[LAYER_TYPE],
        input_embedding_scale=given["hidden_size"] ** 0.5,
        is_causal=False,
        owns_vocabulary=True,
    )


GEMMA4_DSPARK = DrafterKind(
    name="DSpark for Gemma 4",
    tree=ALONG_BRANCH,
    formats=(
        Format(
            "DeepSpec",
            f"`architectures` with `{ARCHITECTURE}`",
            "Gemma 4's settings for full attention, `block_size`, `mask_token_id`, `target_layer_ids`, `markov_rank`, "
            "`enable_confidence_head`",
            "test_gemma4_dspark.py::test_hidden_states_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_gemma4_dspark(checkpoint),
    read_config=read_gemma4_dspark_config,
    check_fits=check_dflash_fits,
    load=partial(load_dflash, Gemma4DSparkDraftModel),
    matches=lambda drafter: isinstance(drafter, Gemma4DSparkDraftModel),
)
