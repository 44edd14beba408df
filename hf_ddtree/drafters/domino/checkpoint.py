"""Checkpoints of Domino drafters, as SpecForge writes them."""

from __future__ import annotations

from functools import partial

from ..checkpoint import Checkpoint
from ..dflash.checkpoint import check_dflash_fits, load_dflash
from ..kind import ALONG_BRANCH, DrafterKind, Format
from ..zlab.layout import ZLAB_NEEDS, projector_type, read_zlab_settings
from .config import DominoConfig
from .model import DominoDraftModel


def is_domino(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a Domino drafter."""
    if checkpoint.speculators_type is not None:
        return False
    kind = projector_type(checkpoint)
    return (
        checkpoint.model_type == DominoConfig.model_type
        or ("DominoDraftModel" in checkpoint.architectures and kind in ("dflash", "domino"))
        or ("DFlashDraftModel" in checkpoint.architectures and kind == "domino")
    )


def read_domino_config(checkpoint: Checkpoint) -> DominoConfig:
    """The configuration of a Domino drafter.

    With `shift_label` a slot predicts the token after its own. Either way the head reads the branch up to the token in
    front of the predicted one.

    Raises:
        ValueError: If a setting is missing or out of range, or a key is not known.
    """
    if checkpoint.model_type == DominoConfig.model_type:
        return DominoConfig.from_dict(checkpoint.raw_config)
    optional = ("pure_draft_prefix_len", "shift_label")
    settings = read_zlab_settings(checkpoint, "Domino", ("emb_dim", "gru_hidden_dim"), optional)
    settings["sample_from_anchor"] = settings.pop("shift_label", False)
    return DominoConfig.from_dict(settings)


DOMINO = DrafterKind(
    name="Domino",
    tree=ALONG_BRANCH,
    formats=(
        Format(
            "SpecForge",
            "`architectures` with `DominoDraftModel`, or `projector_type` `domino` in `dflash_config`",
            f"`emb_dim`, `gru_hidden_dim`; {ZLAB_NEEDS}",
            "test_domino.py::test_trees_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_domino(checkpoint),
    read_config=read_domino_config,
    check_fits=check_dflash_fits,
    load=partial(load_dflash, DominoDraftModel),
    matches=lambda drafter: isinstance(drafter, DominoDraftModel),
)
