"""Which candidate generator drafts with what a call gives as `assistant_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..configuration import DDTreeConfig
from ..drafters import DFlashDraftModel, is_native, view_native
from ..drafters.mtp import MTPDrafter
from ..target.weights import execution_device
from ..validation import describe_type
from .base import TreeCandidateGenerator
from .causal_lm import CausalLMTreeCandidateGenerator
from .dflash import DFlashTreeCandidateGenerator
from .mtp import MTPTreeCandidateGenerator


class DrafterKind(NamedTuple):
    """A kind of drafter.

    Attributes:
        matches: Whether an `assistant_model` is of this kind.
        make: Makes the generator from the drafter, the target, the knobs and a former call's `draft_state`.
    """

    matches: Callable[[Any], bool]
    make: Callable[[Any, PreTrainedModel, DDTreeConfig, Any], TreeCandidateGenerator]


def make_native_generator(
    drafter: PreTrainedModel, target_model: PreTrainedModel, config: DDTreeConfig, state: Any = None
) -> DFlashTreeCandidateGenerator:
    """The generator for a DFlash drafter that Transformers has a model class for."""
    return DFlashTreeCandidateGenerator(view_native(drafter, target_model), target_model, config, state)


# The first that matches is taken.
DRAFTER_KINDS = [
    DrafterKind(lambda drafter: isinstance(drafter, DFlashDraftModel), DFlashTreeCandidateGenerator),
    DrafterKind(is_native, make_native_generator),
    DrafterKind(lambda drafter: isinstance(drafter, (MTPDrafter, MtpModel)), MTPTreeCandidateGenerator),
    DrafterKind(lambda drafter: isinstance(drafter, PreTrainedModel), CausalLMTreeCandidateGenerator),
]


def make_candidate_generator(
    assistant_model: Any, model: PreTrainedModel, config: DDTreeConfig, draft_state: Any = None
) -> TreeCandidateGenerator:
    """The generator for a drafter, chosen by what the drafter is.

    Raises:
        ValueError: If the drafter is of a kind that the package does not know, has no weights, or does not fit the
            model.
    """
    kind = drafter_kind(assistant_model)
    if execution_device(assistant_model).type == "meta":
        raise ValueError(
            f"`assistant_model`, {describe_type(assistant_model)}, is on the device 'meta', so it has shapes but no "
            "weights. Load it with `hf_ddtree.load_drafter` or `from_pretrained`, not under `torch.device('meta')`."
        )
    return kind.make(assistant_model, model, config, draft_state)


def drafter_kind(assistant_model: Any) -> DrafterKind:
    """What kind of drafter it is.

    Raises:
        ValueError: If it is of none.
    """
    for kind in DRAFTER_KINDS:
        if kind.matches(assistant_model):
            return kind
    raise ValueError(
        f"`assistant_model` is {describe_type(assistant_model)}, but must be a drafter that `hf_ddtree.load_drafter` "
        "loads, or a causal language model with the target's tokenizer. For another way to draft, pass a "
        "`TreeCandidateGenerator` as `candidate_generator`."
    )
