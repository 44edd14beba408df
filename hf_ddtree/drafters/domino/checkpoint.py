"""Checkpoints of Domino drafters, as SpecForge writes them."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..zlab.layout import projector_type, read_zlab_settings
from .config import DominoConfig


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
