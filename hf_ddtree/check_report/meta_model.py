"""The target from its configuration alone: a model on the meta device."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..drafter_kinds import is_drafter_alone
from ..interop.models import model_from_config, with_default_attention

AUTO_CLASSES = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),
)


class NotBuilt(Exception):
    """Why a model cannot be built."""


def config_of(model: Any) -> PreTrainedConfig:
    if not isinstance(model, str | os.PathLike | PreTrainedConfig | PreTrainedModel):
        raise TypeError(
            "`model` must be a repository of the Hub, a folder, a configuration or a loaded model, but is a "
            f"`{type(model).__name__}`."
        )
    if isinstance(model, str | os.PathLike):
        raw_config, _ = PreTrainedConfig.get_config_dict(model)
    else:
        raw_config = (model.config if isinstance(model, PreTrainedModel) else model).to_dict()
    if is_drafter_alone(raw_config):
        raise NotBuilt("It is a drafter. Name its target as the model, and it as the drafter.")
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise NotBuilt(f"Transformers does not know the model: {error}") from error


def build_without_weights(model: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, type | None]:
    """A model on the meta device with the attention that Transformers chooses for it, and how to load it."""
    config = with_default_attention(config)
    auto_class = next((auto for mapping, auto in AUTO_CLASSES if type(config) in mapping), None)
    try:
        with torch.device("meta"):
            if isinstance(model, PreTrainedModel):
                twin = model_from_config(model, config)
            elif auto_class is None:
                raise NotBuilt(f"Transformers has no class that generates text from a `{type(config).__name__}`.")
            else:
                twin = auto_class.from_config(config, dtype=config.dtype or config.get_text_config().dtype)
    except NotBuilt:
        raise
    except Exception as error:  # modelling code checks its configuration in many ways
        raise NotBuilt(f"Transformers cannot build the model from its configuration: {error!r}") from error
    # The other implementations ask the values which expert a token goes to.
    twin.set_experts_implementation("batched_mm")
    return twin.eval(), auto_class
