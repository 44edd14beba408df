"""Checkpoints of DFlash 2 drafters, as z-lab publishes them and as the speculators library writes them."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..dflash.config import DFlashConfig
from ..speculators.layout import read_speculators_settings
from ..zlab.layout import nested_settings, read_zlab_settings
from .config import DFlash2Config

# The defaults of the speculators library.
SPECULATORS_DEFAULTS: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "sliding_window_non_causal": True,
}


def is_dflash2(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a DFlash 2 drafter."""
    if checkpoint.speculators_type is not None:
        return checkpoint.speculators_type == "dflash2"
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
    if checkpoint.speculators_type is not None:
        return DFlash2Config(**read_speculators_settings(checkpoint, **SPECULATORS_DEFAULTS))
    required = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return DFlash2Config.from_dict(read_zlab_settings(checkpoint, "DFlash 2", required))
