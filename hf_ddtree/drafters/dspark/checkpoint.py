"""Checkpoints of DSpark drafters, as DeepSpec, SpecForge and the speculators library write them."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..checkpoint import Checkpoint
from ..dflash.checkpoint import check_dflash_fits, load_dflash
from ..kind import ALONG_BRANCH, DrafterKind, Format
from ..speculators.layout import SPECULATORS_NEEDS, read_speculators_settings
from ..zlab.layout import ZLAB_NEEDS, projector_type, read_zlab_settings
from .config import DSparkConfig
from .model import DSparkDraftModel

# The defaults of the speculators library.
SPECULATORS_DEFAULTS: dict[str, Any] = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}


def is_dspark(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a DSpark drafter, in any layout."""
    if checkpoint.speculators_type is not None:
        return checkpoint.speculators_type == "dspark"
    return (
        checkpoint.model_type == DSparkConfig.model_type
        or "Qwen3DSparkModel" in checkpoint.architectures
        or ("DSparkDraftModel" in checkpoint.architectures and projector_type(checkpoint) in ("dflash", "dspark"))
        or ("DFlashDraftModel" in checkpoint.architectures and projector_type(checkpoint) == "dspark")
    )


def read_dspark_config(checkpoint: Checkpoint) -> DSparkConfig:
    """The configuration of a DSpark drafter, whichever layout its checkpoint has.

    DeepSpec's drafters have embeddings and a head of their own; the others use the target's.

    Raises:
        ValueError: If a setting is missing or out of range, or a key is not known.
    """
    if checkpoint.model_type == DSparkConfig.model_type:
        return DSparkConfig.from_dict(checkpoint.raw_config)
    if checkpoint.speculators_type is not None:
        return DSparkConfig(**read_speculators_settings(checkpoint, **SPECULATORS_DEFAULTS))
    optional = ("confidence_head_with_markov", "markov_head_type", "shift_label")
    settings = read_zlab_settings(checkpoint, "DSpark", ("markov_rank", "enable_confidence_head"), optional)
    settings["sample_from_anchor"] = settings.pop("shift_label", True)
    settings["owns_vocabulary"] = "Qwen3DSparkModel" in checkpoint.architectures
    return DSparkConfig.from_dict(settings)


DSPARK = DrafterKind(
    name="DSpark",
    tree=ALONG_BRANCH,
    formats=(
        Format(
            "DeepSpec",
            "`architectures` with `Qwen3DSparkModel`",
            f"`markov_rank`, `enable_confidence_head`; {ZLAB_NEEDS}",
            "test_dspark.py::test_trees_over_rounds",
        ),
        Format(
            "SpecForge",
            "`architectures` with `DSparkDraftModel`, or `projector_type` `dspark` in `dflash_config`",
            f"`markov_rank`, `enable_confidence_head`; {ZLAB_NEEDS}",
            "test_dspark.py::test_trees_over_rounds",
        ),
        Format(
            "speculators", "`speculators_model_type` `dspark`", SPECULATORS_NEEDS, "test_dspark.py::test_speculators"
        ),
    ),
    recognises=lambda checkpoint, _: is_dspark(checkpoint),
    read_config=read_dspark_config,
    check_fits=check_dflash_fits,
    load=partial(load_dflash, DSparkDraftModel),
    matches=lambda drafter: isinstance(drafter, DSparkDraftModel),
)
