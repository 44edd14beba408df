"""Checkpoints of DFlash 2 drafters, as z-lab publishes them and as the speculators library writes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..checkpoint import Checkpoint
from ..dflash.checkpoint import check_dflash_fits, load_dflash
from ..dflash.config import DFlashConfig
from ..kind import CONDITIONAL, DrafterKind, Format
from ..speculators.layout import SPECULATORS_NEEDS, read_speculators_settings
from ..zlab.layout import ZLAB_NEEDS, nested_settings, read_zlab_settings
from .config import DFlash2Config
from .model import DFlash2DraftModel

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


DFLASH2 = DrafterKind(
    name="DFlash 2",
    tree=CONDITIONAL,
    formats=(
        Format(
            "z-lab",
            "`architectures` with `DFlash2DraftModel`, or `selector_rank`",
            f"`conv_kernel_size`, `conv_group_size`, `selector_rank`, `selector_top_k`; {ZLAB_NEEDS}",
            "test_dflash2_parity.py::test_hidden_states_over_rounds",
        ),
        Format(
            "speculators",
            "`speculators_model_type` `dflash2`",
            SPECULATORS_NEEDS,
            "test_speculators_parity.py::test_dflash2",
        ),
    ),
    recognises=lambda checkpoint, _: is_dflash2(checkpoint),
    read_config=read_dflash2_config,
    check_fits=check_dflash_fits,
    load=partial(load_dflash, DFlash2DraftModel),
    matches=lambda drafter: isinstance(drafter, DFlash2DraftModel),
)
