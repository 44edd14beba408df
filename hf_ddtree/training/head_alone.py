"""A head on top of a frozen DFlash drafter, so that its trees know their branches."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from ..drafters.dflash import DFlashDraftModel
from ..drafters.dflash2 import DFlash2Config, DFlash2DraftModel
from ..drafters.dspark import DSparkConfig, DSparkDraftModel
from ..validation import require_positive_int

HeadName = Literal["dflash2", "dspark"]
HEADS: tuple[str, ...] = get_args(HeadName)
# The modules that are trained.
_MODULES = {"dflash2": ("candidate_selector",), "dspark": ("markov_head", "confidence_head")}
# Length of the vectors per token.
RANK = 128
# The settings of each head that can be chosen.
SETTINGS: dict[str, tuple[str, ...]] = {"dflash2": ("selector_rank", "selector_top_k"), "dspark": ("markov_rank",)}


def add_head(drafter: DFlashDraftModel, head: HeadName = "dflash2", **settings: Any) -> DFlashDraftModel:
    """A drafter of another kind with the weights of a DFlash drafter, of which only the head takes a gradient.

    Before training it drafts what the DFlash drafter drafts: the head adds 0 to every logit, and the convolutions of
    DFlash 2, of one tap, are the identity.

    Args:
        drafter: A DFlash or JetSpec drafter. Or one that has the head already, which is then trained on.
        head: `"dflash2"`, a selector that scores pairs of neighbours by the slot's hidden state, or `"dspark"`, a
            Markov table of pairs, without a confidence head.
        settings: Of the new head: `selector_rank` and `selector_top_k`, or `markov_rank`.

    Returns:
        The drafter to train, on the device and in the dtype of the one that was given. If that has the head already,
        it is the same object.

    Raises:
        ValueError: If there is no such head, it has no such setting, or it does not go on such a drafter.
    """
    if head not in HEADS:
        raise ValueError(f"`head` must be one of {', '.join(map(repr, HEADS))}, but is {head!r}.")
    model_class = DFlash2DraftModel if head == "dflash2" else DSparkDraftModel
    if isinstance(drafter, model_class):
        if settings:
            raise ValueError(f"The drafter has its head already, so {sorted(settings)} cannot be set. Leave them out.")
        headed: DFlashDraftModel = drafter
    elif type(drafter) is DFlashDraftModel:
        headed = _with_head(drafter, head, settings)
    else:
        raise ValueError(
            f"`head` {head!r} goes on a DFlash drafter, but this is a `{type(drafter).__name__}`. Leave `head` out to "
            "train all of it."
        )
    for name, parameter in headed.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in _MODULES[head])
    return headed


def _check_settings(head: HeadName, settings: dict[str, Any]) -> None:
    known = SETTINGS[head]
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"The head {head!r} has no setting `{name}`. It has {', '.join(known)}.")
        require_positive_int(name, value)


def _with_head(drafter: DFlashDraftModel, head: HeadName, settings: dict[str, Any]) -> DFlashDraftModel:
    _check_settings(head, settings)
    of_drafter = drafter.config.to_dict()
    for name in ("architectures", "dtype", "model_type"):
        of_drafter.pop(name, None)
    headed: DFlash2DraftModel | DSparkDraftModel
    if head == "dflash2":
        sizes = {"conv_kernel_size": 1, "conv_group_size": drafter.config.hidden_size, "selector_rank": RANK}
        candidates = {"selector_top_k": min(32, drafter.config.vocab_size)}
        headed = DFlash2DraftModel(DFlash2Config(**{**of_drafter, **sizes, **candidates, **settings}))
    else:
        sizes = {"markov_rank": RANK, "enable_confidence_head": False, "confidence_head_with_markov": False}
        headed = DSparkDraftModel(DSparkConfig(**{**of_drafter, **sizes, **settings}))
        if headed.markov_head is not None:
            torch.nn.init.normal_(headed.markov_head.markov_w1.weight, std=headed.config.markov_rank**-0.25)
            torch.nn.init.zeros_(headed.markov_head.markov_w2.weight)
    headed.load_state_dict(drafter.state_dict(), strict=False)
    return headed.to(drafter.device, drafter.dtype)
