"""Checkpoints of P-EAGLE drafters, as the speculators library writes them."""

from __future__ import annotations

from functools import partial

from ..checkpoint import Checkpoint
from ..eagle3.checkpoint import check_eagle3_fits, load_eagle3, read_speculators_eagle3
from ..kind import BLOCK_MARGINALS, DrafterKind, Format
from .config import PEagleConfig
from .model import PEagleDraftModel


def is_peagle(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a P-EAGLE drafter."""
    return checkpoint.speculators_type == "peagle" or checkpoint.model_type == PEagleConfig.model_type


def read_peagle_config(checkpoint: Checkpoint) -> PEagleConfig:
    """The configuration of a P-EAGLE drafter.

    It predicts as many tokens as the checkpoint proposes.

    Raises:
        ValueError: If a setting is missing, or a key is not known.
    """
    if checkpoint.model_type == PEagleConfig.model_type:
        return PEagleConfig.from_dict(checkpoint.raw_config)
    settings = read_speculators_eagle3(checkpoint, mask_token_id=None, embed_requires_grad=True)
    proposals = (checkpoint.raw_config.get("speculators_config") or {}).get("proposal_methods") or ()
    lengths = [method["speculative_tokens"] for method in proposals if "speculative_tokens" in method]
    return PEagleConfig(**settings, **({"draft_length": lengths[0]} if lengths else {}))


PEAGLE = DrafterKind(
    name="P-EAGLE",
    tree=BLOCK_MARGINALS,
    formats=(
        Format(
            "speculators",
            "`speculators_model_type` `peagle`",
            "layers of Llama or Qwen3, `mask_token_id`; `d2t` of a reduced vocabulary",
            "test_peagle.py::test_logits_over_rounds",
        ),
    ),
    recognises=lambda checkpoint, _: is_peagle(checkpoint),
    read_config=read_peagle_config,
    check_fits=check_eagle3_fits,
    load=partial(load_eagle3, PEagleDraftModel),
    matches=lambda drafter: isinstance(drafter, PEagleDraftModel),
)
