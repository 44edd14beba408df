"""DFlash drafters that Transformers has a model class for, seen as this package's drafter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..dflash.config import DFlashConfig
from ..dflash.model import DFlashDraftModel

NATIVE_MODEL_TYPES = ("muse_glimmer_assistant",)


def is_native(assistant_model: Any) -> bool:
    """Whether it is such a drafter."""
    return isinstance(assistant_model, PreTrainedModel) and assistant_model.config.model_type in NATIVE_MODEL_TYPES


def view_native(assistant_model: PreTrainedModel, target_model: PreTrainedModel) -> DFlashDraftModel:
    """A drafter made of the modules of a native one, and so with its weights, which are not copied.

    Its layers are those of DFlash under other names. The native forward takes a single row, and its cache no padding.
    A drafter that reads the target's last layer gets that layer's output. In Transformers' own loop it gets the output
    of the target's final norm.
    """
    with torch.device("meta"):
        view = DFlashDraftModel(read_native_config(assistant_model.config, target_model.config.get_text_config()))
    view.calibration = vars(assistant_model).setdefault("calibration", view.calibration)
    view.fc, view.hidden_norm = assistant_model.encoder.fc, assistant_model.encoder.output_norm_enc
    view.norm, view.rotary_emb = assistant_model.norm, assistant_model.rotary_emb
    for layer, native_layer in zip(view.layers, assistant_model.layers):
        for name, module in native_layer.self_attn.named_children():
            setattr(layer.self_attn, name, module)
        layer.mlp = native_layer.mlp
        layer.input_layernorm = native_layer.input_layernorm
        layer.post_attention_layernorm = native_layer.post_attention_layernorm
    return view


def read_native_config(config: PreTrainedConfig, target_config: PreTrainedConfig) -> DFlashConfig:
    """The `DFlashConfig` of a native drafter for a target.

    A native window counts the tokens within reach on one side, a `DFlashConfig`'s the slot itself as well. Logits are
    scaled and bounded as the target's own are, which changes every probability, but no rank.
    """
    return DFlashConfig(
        vocab_size=target_config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_position_embeddings,
        layer_types=config.layer_types,
        sliding_window=config.sliding_window + 1,
        use_sliding_window=True,
        is_causal=False,
        block_size=config.block_size,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        output_multiplier=getattr(target_config, "output_multiplier", 1.0),
        final_logit_softcapping=getattr(target_config, "final_logit_softcapping", None),
        name_or_path=config.name_or_path,
    )
