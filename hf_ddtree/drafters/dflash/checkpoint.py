"""Checkpoints of DFlash drafters: the published layouts, loading, and whether a drafter fits a target."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

from ..checkpoint import Checkpoint
from ..fit import check_sizes_fit, check_vocabulary
from ..kind import BLOCK, DrafterKind, Format
from ..speculators.layout import SPECULATORS_NEEDS, read_speculators_settings
from ..zlab.layout import ZLAB_NEEDS, projector_type, read_zlab_settings
from .config import DFlashConfig
from .model import DFlashDraftModel


def is_dflash(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a DFlash drafter of the first version, in any layout."""
    if checkpoint.speculators_type is not None:
        return checkpoint.speculators_type == "dflash"
    is_published = "DFlashDraftModel" in checkpoint.architectures and projector_type(checkpoint) == "dflash"
    return is_published or checkpoint.model_type == DFlashConfig.model_type


def read_dflash_config(checkpoint: Checkpoint) -> DFlashConfig:
    """The configuration of a DFlash drafter, whichever layout its checkpoint has.

    Raises:
        ValueError: If a setting is missing or out of range.
    """
    if checkpoint.model_type == DFlashConfig.model_type:
        return DFlashConfig.from_dict(checkpoint.raw_config)
    if checkpoint.speculators_type is not None:
        return DFlashConfig(**read_speculators_settings(checkpoint))
    return DFlashConfig.from_dict(read_zlab_settings(checkpoint, "DFlash"))


def load_dflash(
    model_class: type[DFlashDraftModel],
    checkpoint: Checkpoint,
    config: DFlashConfig,
    target_model: PreTrainedModel | None,
) -> DFlashDraftModel:
    """Loads a drafter of a class that is derived from DFlash.

    Raises:
        ValueError: If the checkpoint lacks weights, or its reduced vocabulary is not one of distinct target tokens.
    """
    drafter: DFlashDraftModel = checkpoint.load(model_class, target_model, refuse_unknown=True, config=config)
    check_vocabulary(drafter.target_token_ids, config, checkpoint)
    return drafter


def check_drafter_fits(drafter: DFlashDraftModel, target_model: PreTrainedModel) -> None:
    """Checks that a loaded drafter can draft for a target, as `check_dflash_fits` does."""
    check_dflash_fits(drafter.config, target_model)


def check_dflash_fits(config: DFlashConfig, target_model: PreTrainedModel) -> None:
    """Checks that a drafter with this configuration can draft for a target.

    Raises:
        ValueError: If hidden size, vocabulary or layers disagree, or the target has no output head; the message says
            what disagrees.
    """
    check_sizes_fit(config, target_model, config.target_layer_ids or ())
    if config.mask_token_id is None:
        raise ValueError(
            "The drafter's config has no `mask_token_id`, so it cannot say what fills the slots to predict. Set "
            "`drafter.config.mask_token_id` to the token that it was trained with."
        )


DFLASH = DrafterKind(
    name="DFlash",
    tree=BLOCK,
    formats=(
        Format(
            "z-lab",
            "`architectures` with `DFlashDraftModel`",
            ZLAB_NEEDS,
            "test_dflash_parity.py::test_hidden_states_over_rounds",
        ),
        Format(
            "JetSpec",
            "z-lab's, with `causal_head` in `dflash_config`",
            ZLAB_NEEDS,
            "test_dflash_parity.py::test_jetspec",
        ),
        Format(
            "speculators",
            "`speculators_model_type` `dflash`",
            SPECULATORS_NEEDS,
            "test_speculators_parity.py::test_logits_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_dflash(checkpoint),
    read_config=read_dflash_config,
    check_fits=check_dflash_fits,
    load=partial(load_dflash, DFlashDraftModel),
    matches=lambda drafter: isinstance(drafter, DFlashDraftModel),
)
