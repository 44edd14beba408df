"""Causal language models as drafters: which fit a target, and loading them."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..target.requirements import check_target
from ..target.weights import execution_device

# Tables of embeddings are padded to round sizes, each model's to its own, and have rows for added tokens. This
# explains so many rows, and so much of the larger table; a tokenizer of its own differs by more.
MOST_VOCAB_PADDING, MOST_OF_VOCAB = 1024, 1 / 16


def check_causal_lm_fits(drafter: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """Checks that a causal language model can draft trees for a target.

    It must have the target's tokenizer, of which only the sizes of the embedding tables tell: they may differ by what
    padding and added tokens explain, at most 1024 rows and a sixteenth of the larger table.

    Raises:
        ValueError: If the vocabularies are different, or the drafter cannot run on trees, or is in training mode.
    """
    name = type(drafter).__name__
    _check_vocab_size(drafter.config, target_model.config, name)
    if not drafter.can_generate() or drafter.get_output_embeddings() is None:
        raise ValueError(
            f"`assistant_model` is a {name}, which has no output head and predicts no tokens. Load it with "
            "`hf_ddtree.load_drafter` or `AutoModelForCausalLM`."
        )
    try:
        check_target(drafter)
    except ValueError as error:
        raise ValueError(f"`assistant_model` must run on trees as the target does, but cannot: {error}") from error
    if drafter.training:
        raise ValueError(
            f"`assistant_model`, a {name}, is in training mode, where dropout would draw random numbers between those "
            "of sampling. Call `assistant_model.eval()` first."
        )


def is_causal_lm(raw_config: dict[str, Any]) -> bool:
    """Whether the contents of a `config.json` are those of a causal language model that Transformers knows."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return raw_config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and any(
        architecture in known or architecture.endswith("ForConditionalGeneration")
        for architecture in raw_config.get("architectures") or ()
    )


def load_causal_lm(
    path_or_repo_id: str | os.PathLike[str],
    raw_config: dict[str, Any],
    target_model: PreTrainedModel | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Loads a causal language model with `AutoModelForCausalLM`; by default in the target's dtype, and next to it."""
    if target_model is None:
        return AutoModelForCausalLM.from_pretrained(path_or_repo_id, **options)
    check_causal_lm(path_or_repo_id, raw_config, target_model)
    options.setdefault("dtype", target_model.dtype)
    drafter = AutoModelForCausalLM.from_pretrained(path_or_repo_id, **options)
    if "device_map" not in options:
        drafter.to(execution_device(target_model))
    check_causal_lm_fits(drafter.eval(), target_model)
    return drafter


def check_causal_lm(
    path_or_repo_id: str | os.PathLike[str], raw_config: dict[str, Any], target_model: PreTrainedModel
) -> PreTrainedConfig:
    """Checks that a causal language model fits a target, from its configuration alone, and returns that."""
    config = CONFIG_MAPPING[raw_config["model_type"]].from_dict(raw_config)
    _check_vocab_size(config, target_model.config, f"checkpoint {str(path_or_repo_id)!r}")
    with torch.device("meta"):
        check_causal_lm_fits(AutoModelForCausalLM.from_config(config).eval(), target_model)
    return config


def _check_vocab_size(config: PreTrainedConfig, target_config: PreTrainedConfig, name: str) -> None:
    own, others = config.get_text_config().vocab_size, target_config.get_text_config().vocab_size
    if abs(own - others) > min(MOST_VOCAB_PADDING, MOST_OF_VOCAB * max(own, others)):
        raise ValueError(
            f"The drafter does not fit the target: the {name} has `vocab_size` {own}, the target {others}, more apart "
            "than padding explains, so they have different tokenizers. The nodes of a tree are tokens of the target, "
            "and drafting in other tokens (universal assisted decoding) is not supported. Choose a drafter with the "
            "target's tokenizer."
        )
