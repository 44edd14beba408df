"""Checkpoints of DFlash 2 drafters in the layout that z-lab publishes."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..dflash.config import DFlashConfig
from ..zlab.layout import nested_settings, read_zlab_settings
from .config import DFlash2Config


def is_dflash2(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a DFlash 2 drafter."""
    if checkpoint.speculators_type is not None:
        return False
    architectures, nested = checkpoint.architectures, nested_settings(checkpoint)
    return (
        checkpoint.model_type == DFlash2Config.model_type
        or "DFlash2DraftModel" in architectures
        or ("DFlashDraftModel" in architectures and "selector_rank" in {*nested, *checkpoint.raw_config})
    )


def read_dflash2_config(checkpoint: Checkpoint) -> DFlashConfig:
    """The configuration of a DFlash 2 drafter.

    Raises:
        ValueError: If a setting is missing or out of range.
    """
    if checkpoint.model_type == DFlash2Config.model_type:
        return DFlash2Config.from_dict(checkpoint.raw_config)
    required = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return DFlash2Config.from_dict(read_zlab_settings(checkpoint, "DFlash 2", required))
