"""Checkpoints of DFlash drafters that Transformers has a model class for."""

from __future__ import annotations

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..checkpoint import Checkpoint
from ..dflash.checkpoint import check_dflash_fits
from ..kind import BLOCK, DrafterKind, Format
from .view import NATIVE_MODEL_TYPES, is_native, read_native_config


def is_native_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds such a drafter."""
    return checkpoint.model_type in NATIVE_MODEL_TYPES


def check_native_fits(config: PreTrainedConfig, target_model: PreTrainedModel) -> None:
    """Checks that a drafter with this configuration can draft for a target, as `check_dflash_fits` does."""
    check_dflash_fits(read_native_config(config, target_model.config.get_text_config()), target_model)


def load_native(
    checkpoint: Checkpoint, config: PreTrainedConfig, target_model: PreTrainedModel | None
) -> PreTrainedModel:
    """Loads a drafter of a class that Transformers has."""
    return checkpoint.load(AutoModel, target_model)


NATIVE = DrafterKind(
    name="DFlash of Transformers",
    tree=BLOCK,
    formats=(
        Format(
            "Muse Glimmer",
            "`model_type` `muse_glimmer_assistant`",
            "what its class needs",
            "test_native_dflash.py::test_hidden_states_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_native_checkpoint(checkpoint),
    read_config=Checkpoint.read_config,
    check_fits=check_native_fits,
    load=load_native,
    matches=is_native,
)
