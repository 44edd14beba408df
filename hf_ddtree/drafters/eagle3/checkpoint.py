"""Checkpoints of EAGLE-3 drafters, as SafeAILab, SpecForge and the speculators library write them."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from ..checkpoint import Checkpoint
from ..config_keys import fields_of, refuse_other_values, refuse_unknown_keys, require_target_width
from ..fit import check_sizes_fit, check_vocabulary
from ..kind import LEVELWISE, DrafterKind, Format
from ..speculators.layout import (
    LAYOUT_KEYS,
    read_layer_config,
    read_target_layer_ids,
    reduced_vocab_size,
    rope_parameters_of,
)
from .config import Eagle3Config
from .model import Eagle3DraftModel

# The settings of speculators' type `"eagle3"`, and their defaults.
SPECULATORS_DEFAULTS: dict[str, Any] = {
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
}
LAYER_FAMILIES = ("llama", "qwen3")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds an EAGLE-3 drafter, in any layout. SafeAILab's have a vocabulary of their own."""
    if checkpoint.speculators_type is not None:
        return checkpoint.speculators_type == "eagle3"
    return checkpoint.model_type == Eagle3Config.model_type or (
        "draft_vocab_size" in checkpoint.raw_config and bool({*ARCHITECTURES}.intersection(checkpoint.architectures))
    )


def read_eagle3_config(checkpoint: Checkpoint) -> Eagle3Config:
    """The configuration of an EAGLE-3 drafter, whichever layout its checkpoint has.

    Raises:
        ValueError: If a setting is missing, or a key is not known.
    """
    if checkpoint.model_type == Eagle3Config.model_type:
        return Eagle3Config.from_dict(checkpoint.raw_config)
    if checkpoint.speculators_type is not None:
        return Eagle3Config(**read_speculators_eagle3(checkpoint))
    raw_config = checkpoint.raw_config
    nested = raw_config.get("eagle_config") or {}
    own = ("draft_vocab_size", "fc_norm", "norm_output")
    known = fields_of(LlamaConfig) | fields_of(Qwen3Config) | {"eagle_config", "target_hidden_size", *own}
    refuse_unknown_keys(checkpoint, raw_config, known)
    refuse_unknown_keys(checkpoint, nested, ("eagle_aux_hidden_state_layer_ids",), "`eagle_config`")
    full = ["full_attention"] * raw_config.get("num_hidden_layers", 1)
    refuse_other_values(checkpoint, raw_config, {"layer_types": (None, full)})
    require_target_width(checkpoint, raw_config.get("hidden_size"), raw_config.get("target_hidden_size"))
    layers = LlamaConfig.from_dict({**raw_config, "model_type": "llama"})
    return Eagle3Config(
        **_layer_settings(layers),
        **{key: raw_config[key] for key in own[1:] if raw_config.get(key) is not None},
        draft_vocab_size=reduced_vocab_size(raw_config["draft_vocab_size"], layers),
        target_layer_ids=nested.get("eagle_aux_hidden_state_layer_ids"),
    )


def read_speculators_eagle3(checkpoint: Checkpoint, **own: Any) -> dict[str, Any]:
    """The settings of an `Eagle3Config`, or of one that is derived from it, in a config of the speculators library.

    Args:
        checkpoint: The checkpoint.
        **own: The defaults of this type's own settings, and those of EAGLE-3's settings where they differ.

    Raises:
        ValueError: If a setting is missing, or a key is not known.
    """
    layers = read_layer_config(checkpoint)
    if layers.model_type not in LAYER_FAMILIES:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has a `transformer_layer_config` of `model_type` "
            f"{layers.model_type!r}, but only EAGLE-3 layers of {' and '.join(LAYER_FAMILIES)} are supported."
        )
    defaults = SPECULATORS_DEFAULTS | own
    refuse_unknown_keys(checkpoint, checkpoint.raw_config, LAYOUT_KEYS.union(defaults))
    require_target_width(checkpoint, layers.hidden_size, checkpoint.raw_config.get("target_hidden_size"))
    given = {key: checkpoint.raw_config.get(key, default) for key, default in defaults.items()}
    layer_ids = None
    if given.pop("eagle_aux_hidden_state_layer_ids") is not None:
        layer_ids = read_target_layer_ids(checkpoint, "eagle_aux_hidden_state_layer_ids")
    return {
        **_layer_settings(layers),
        "owns_embeddings": given.pop("embed_requires_grad"),
        **given,
        "draft_vocab_size": reduced_vocab_size(given["draft_vocab_size"], layers),
        "target_layer_ids": layer_ids,
    }


def _layer_settings(layers: Any) -> dict[str, Any]:
    same = (
        *("attention_bias", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"),
    )
    window, layer_types = getattr(layers, "sliding_window", None), getattr(layers, "layer_types", None)
    if window is None or layer_types is None:
        layer_types = ["full_attention"] * layers.num_hidden_layers
    return {
        **{name: getattr(layers, name) for name in same},
        "head_dim": getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        "layer_types": layer_types,
        "mlp_bias": getattr(layers, "mlp_bias", False),
        "qk_norm": layers.model_type == "qwen3",
        "rope_parameters": rope_parameters_of(layers),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def check_eagle3_fits(config: Eagle3Config, target_model: PreTrainedModel) -> None:
    """Checks that a drafter with this configuration can draft for a target.

    Raises:
        ValueError: If hidden size, vocabulary or layers disagree, or the target has no output head.
    """
    check_sizes_fit(config, target_model, config.layer_ids(target_model.config.get_text_config().num_hidden_layers))


def load_eagle3(
    model_class: type[Eagle3DraftModel],
    checkpoint: Checkpoint,
    config: Eagle3Config,
    target_model: PreTrainedModel | None,
) -> Eagle3DraftModel:
    """Loads a drafter of EAGLE-3's class, or of one that is derived from it.

    Raises:
        ValueError: If the checkpoint lacks weights, or its reduced vocabulary is not one of distinct target tokens.
    """
    renamed = {"key_mapping": {r"^midlayer\.": "layers.0."}}
    drafter: Eagle3DraftModel = checkpoint.load(
        model_class, target_model, refuse_unknown=True, config=config, **renamed
    )
    check_vocabulary(drafter.target_token_ids, config, checkpoint)
    return drafter


EAGLE3 = DrafterKind(
    name="EAGLE-3",
    tree=LEVELWISE,
    formats=(
        Format(
            "SafeAILab",
            "`architectures` with `LlamaForCausalLM`, and `draft_vocab_size`",
            "layers of Llama with full attention; `d2t`",
            "test_eagle3.py::test_the_two_layouts_are_one_drafter",
        ),
        Format(
            "SpecForge",
            "`architectures` with `LlamaForCausalLMEagle3`",
            "layers of Llama with full attention; `d2t`",
            "test_eagle3.py::test_the_two_layouts_are_one_drafter",
        ),
        Format(
            "speculators",
            "`speculators_model_type` `eagle3`",
            "layers of Llama or Qwen3; `d2t` of a reduced vocabulary",
            "test_eagle3.py::test_trees_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_eagle3(checkpoint),
    read_config=read_eagle3_config,
    check_fits=check_eagle3_fits,
    load=partial(load_eagle3, Eagle3DraftModel),
    matches=lambda drafter: isinstance(drafter, Eagle3DraftModel),
)
