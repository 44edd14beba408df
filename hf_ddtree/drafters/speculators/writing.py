"""Writing drafters in the layout of the speculators library (facts from its version 0.9.0)."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint_files import write_checkpoint
from ..dflash import DFlashConfig, DFlashDraftModel
from ..dflash2 import DFlash2Config
from ..dspark import DSparkConfig

VERSION = "0.9.0"
# What the layout has no key for, and the one value that is meant without one.
WITHOUT_KEY = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
# Settings of the drafter's layers.
LAYERS = (
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "use_sliding_window", "vocab_size"),
)
# Per type its settings besides those of DFlash.
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "dflash": (),
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "dspark": ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
}


def save_for_speculators(
    drafter: DFlashDraftModel,
    target_model: PreTrainedModel,
    folder: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a drafter as the speculators library does, for it and for vLLM; `load_drafter` reads it as well.

    Args:
        drafter: A DFlash, DFlash 2 or DSpark drafter.
        target_model: The target, which the library calls the verifier: its name and class are written.
        folder: Where to; made if need be.
        dtype: What the weights are rounded to.

    Raises:
        ValueError: If the layout cannot say something of the drafter.
    """
    write_checkpoint(drafter, speculators_config(drafter.config, target_model, dtype), folder, dtype)


def speculators_config(
    config: DFlashConfig, target_model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The `config.json` of such a checkpoint.

    Raises:
        ValueError: If the layout cannot say something of the drafter.
    """
    kind = _type_of(config)
    _refuse_what_has_no_key(config)
    target = target_model.config
    verifier = {"architectures": [type(target_model).__name__], "name_or_path": target.name_or_path or None}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.draft_length}
    return {
        "architectures": [{"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind] + "DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids or ()],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.is_causal is False,
        **{name: getattr(config, name) for name in _OF_TYPE[kind]},
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "qwen3", **{name: getattr(config, name) for name in LAYERS}},
        "dtype": str(dtype).removeprefix("torch."),
    }


def _type_of(config: DFlashConfig) -> str:
    kinds = {DFlashConfig: "dflash", DFlash2Config: "dflash2", DSparkConfig: "dspark"}
    if type(config) not in kinds or (isinstance(config, DSparkConfig) and config.owns_vocabulary):
        raise ValueError(
            f"The speculators library has no type for a drafter with a `{type(config).__name__}`"
            f"{' and a vocabulary of its own' if type(config) in kinds else ''}. Save it with `save_drafter`."
        )
    return kinds[type(config)]


def _refuse_what_has_no_key(config: DFlashConfig) -> None:
    for name, meant in WITHOUT_KEY.items():
        if getattr(config, name) != meant:
            raise ValueError(
                f"The drafter has `{name}` {getattr(config, name)}, which the layout of the speculators library has "
                "no key for. Save it with `save_drafter`."
            )
    if config.is_causal:
        raise ValueError(
            "The drafter has causal blocks in all its layers (`is_causal`), which the layout of the speculators "
            "library has no key for. Save it with `save_drafter`."
        )
    if "sliding_attention" in (config.layer_types or ()) and not config.window_from_root:
        raise ValueError(
            "The drafter's windows reach back from each slot, but the speculators library counts them from the root. "
            "Save it with `save_drafter`, or make one with `window_from_root=True`."
        )
