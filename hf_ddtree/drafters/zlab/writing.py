"""Writing drafters in the layout that z-lab publishes, with JetSpec's and SpecForge's keys where they apply."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..checkpoint_files import write_checkpoint
from ..dflash import DFlashConfig, DFlashDraftModel
from ..dflash2 import DFlash2Config
from ..domino import DominoConfig
from ..dspark import DSparkConfig

# The drafters that the layout has.
CONFIGS = (DFlashConfig, DFlash2Config, DSparkConfig, DominoConfig)
# What the layout has no key for, and the one value that is meant without one.
WITHOUT_KEY = {"window_from_root": False, "draft_vocab_size": None}
# Settings of the drafter's layers.
LAYERS = (
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("num_target_layers", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings"),
    *("use_sliding_window", "vocab_size"),
)
# Settings in `dflash_config` that say nothing where they have this value.
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


def save_drafter(
    drafter: DFlashDraftModel, folder: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a drafter in the layout of published checkpoints, which `load_drafter` reads: `config.json` and
    `model.safetensors`.

    Args:
        drafter: A DFlash, DFlash 2, DSpark or Domino drafter.
        folder: Where to; made if need be. Files of these names are replaced once both are written.
        dtype: What the weights are rounded to.

    Raises:
        ValueError: If the layout cannot say something of the drafter.
    """
    write_checkpoint(drafter, published_config(drafter.config, dtype), folder, dtype)


def published_config(config: DFlashConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The `config.json` of a published checkpoint: that of a Qwen3 model, with the drafter's own settings in
    `dflash_config`.

    Raises:
        ValueError: If the layout cannot say something of the drafter.
    """
    if type(config) not in CONFIGS:
        raise ValueError(
            f"The drafter has a `{type(config).__name__}`, which z-lab's layout has no keys for. Save it with "
            "`save_pretrained`, which `load_drafter` reads as well."
        )
    for name, meant in WITHOUT_KEY.items():
        if getattr(config, name) != meant:
            raise ValueError(
                f"The drafter has `{name}` {getattr(config, name)}, which z-lab's layout has no key for. Save it with "
                "`save_pretrained`, which `load_drafter` reads as well."
            )
    if config.sample_from_anchor and not isinstance(config, (DSparkConfig, DominoConfig)):
        raise ValueError(
            "The drafter has `sample_from_anchor`, which z-lab's layout has no key for. Save it with "
            "`save_pretrained`, which `load_drafter` reads as well."
        )
    names = ["mask_token_id", "target_layer_ids"]
    names += [name for name, neutral in NEUTRAL.items() if getattr(config, name) != neutral]
    own = {name: getattr(config, name) for name in names}
    architecture = "DFlashDraftModel"
    if isinstance(config, DFlash2Config):
        architecture = "DFlash2DraftModel"
        own |= {name: getattr(config, name) for name in ("conv_kernel_size", "conv_group_size")}
        own |= {name: getattr(config, name) for name in ("selector_rank", "selector_top_k")}
    elif isinstance(config, DSparkConfig):
        architecture = "Qwen3DSparkModel" if config.owns_vocabulary else "DSparkDraftModel"
        own |= {name: getattr(config, name) for name in ("markov_rank", "markov_head_type", "enable_confidence_head")}
        own["confidence_head_with_markov"] = config.confidence_head_with_markov
        own["shift_label"] = config.sample_from_anchor
        if not config.owns_vocabulary:
            own["projector_type"] = "dspark"
    elif isinstance(config, DominoConfig):
        architecture = "DominoDraftModel"
        own |= {name: getattr(config, name) for name in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")}
        own |= {"shift_label": config.sample_from_anchor, "projector_type": "domino"}
    elif config.is_causal:
        own["causal_head"] = True  # JetSpec's name
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in LAYERS},
        # The `dflash` package reads it here alone.
        **({} if config.is_causal is None else {"is_causal": config.is_causal}),
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": str(dtype).removeprefix("torch."),
    }
