"""The registry of drafters: the kinds there are, and the generator that drafts with each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .candidate_generators.base import TreeCandidateGenerator
from .candidate_generators.causal_lm import CausalLMTreeCandidateGenerator
from .candidate_generators.dflash import DFlashTreeCandidateGenerator
from .candidate_generators.dflash2 import DFlash2TreeCandidateGenerator
from .candidate_generators.eagle3 import Eagle3TreeCandidateGenerator
from .candidate_generators.gemma4_assistant import Gemma4AssistantTreeCandidateGenerator
from .candidate_generators.mtp import MTPTreeCandidateGenerator
from .candidate_generators.peagle import PEagleTreeCandidateGenerator
from .candidate_generators.sequential_head import SequentialHeadTreeCandidateGenerator
from .configuration import DDTreeConfig
from .drafters.causal_lm.checkpoint import CAUSAL_LM
from .drafters.checkpoint import Checkpoint, config_errors
from .drafters.dflash.checkpoint import DFLASH
from .drafters.dflash2.checkpoint import DFLASH2
from .drafters.domino.checkpoint import DOMINO
from .drafters.dspark.checkpoint import DSPARK
from .drafters.eagle3.checkpoint import EAGLE3
from .drafters.gemma4_assistant.checkpoint import GEMMA4_ASSISTANT
from .drafters.gemma4_dspark.checkpoint import GEMMA4_DSPARK
from .drafters.kind import DrafterKind
from .drafters.mtp.checkpoint import MTP
from .drafters.native.checkpoint import NATIVE
from .drafters.native.view import view_native
from .drafters.peagle.checkpoint import PEAGLE
from .drafters.speculators.layout import refuse_other_types
from .interop.wrappers import unwrapped
from .target.weights import execution_device
from .validation import describe_type


def _make_native_generator(
    drafter: PreTrainedModel, target_model: PreTrainedModel, config: DDTreeConfig, state: Any
) -> DFlashTreeCandidateGenerator:
    return DFlashTreeCandidateGenerator(view_native(drafter, target_model), target_model, config, state)


# Per kind what makes its candidate generator from the drafter, the target, the knobs and an earlier call's
# `draft_state`, and raises `ValueError` if the drafter does not fit. The first kind that matches is taken.
GENERATORS: Mapping[DrafterKind, Callable[[Any, PreTrainedModel, DDTreeConfig, Any], TreeCandidateGenerator]] = {
    MTP: MTPTreeCandidateGenerator,
    NATIVE: _make_native_generator,
    GEMMA4_DSPARK: SequentialHeadTreeCandidateGenerator,
    DSPARK: SequentialHeadTreeCandidateGenerator,
    DOMINO: SequentialHeadTreeCandidateGenerator,
    DFLASH2: DFlash2TreeCandidateGenerator,
    DFLASH: DFlashTreeCandidateGenerator,
    PEAGLE: PEagleTreeCandidateGenerator,
    EAGLE3: Eagle3TreeCandidateGenerator,
    GEMMA4_ASSISTANT: Gemma4AssistantTreeCandidateGenerator,
    CAUSAL_LM: CausalLMTreeCandidateGenerator,
}
DRAFTER_KINDS = tuple(GENERATORS)


def load_drafter(
    path_or_repo_id: str | os.PathLike[str], target_model: PreTrainedModel | None = None, **from_pretrained_kwargs: Any
) -> PreTrainedModel:
    """Loads a drafter from a local folder or the Hugging Face Hub, and checks that it fits its target.

    No code from the checkpoint is run: `trust_remote_code` is neither needed nor passed on.

    Args:
        path_or_repo_id: A folder, or a repository of the Hub such as `"z-lab/Qwen3.5-4B-DFlash"`. `"mtp"` stands for
            the multi-token-prediction layers in the target's own checkpoint, and so does the name of a checkpoint of
            the target that holds them.
        target_model: The model that the drafter will draft for. Its dtype, and the device of its output head, are the
            defaults for the drafter's.
        from_pretrained_kwargs: Passed on to `from_pretrained`, e.g. `dtype`, `device_map`, `revision`, `token`.

    Returns:
        The drafter, in evaluation mode.

    Raises:
        ValueError: If the checkpoint has a format that is not supported, lacks weights, or does not fit the target.
        TypeError: If `target_model` is no model.
        OSError: If there is no such folder or repository.
    """
    target_model = unwrapped(target_model, "target_model")
    if target_model is not None and not isinstance(target_model, PreTrainedModel):
        raise TypeError(f"`target_model` must be the loaded target model, but is a `{type(target_model).__name__}`.")
    options = {key: value for key, value in from_pretrained_kwargs.items() if key != "trust_remote_code"}
    checkpoint = Checkpoint(path_or_repo_id, options)
    kind, config = _read(checkpoint, target_model)
    if target_model is not None:
        kind.check_fits(config, target_model)
    with config_errors(checkpoint.name):
        drafter = kind.load(checkpoint, config, target_model).eval()
    if target_model is not None:
        _share_special_tokens(drafter, target_model)
    return drafter


def _share_special_tokens(drafter: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """Tells a drafter that names no special tokens those of its target.

    By them Transformers' pipelines see that both have the same tokenizer.
    """
    own, shared = drafter.config.get_text_config(), target_model.config.get_text_config()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(own, name, None) is None:
            setattr(own, name, getattr(shared, name, None))


def checkpoint_kind(path_or_repo_id: str | os.PathLike[str]) -> DrafterKind:
    """What kind of drafter a checkpoint holds, by its `config.json` alone.

    Raises:
        ValueError: If it is of none that is known.
        OSError: If there is no such folder or repository.
    """
    checkpoint = Checkpoint(path_or_repo_id)
    with config_errors(checkpoint.name, AttributeError, TypeError):
        return _kind_of_checkpoint(checkpoint, target_model=None)


def check_checkpoint_fits(
    path_or_repo_id: str | os.PathLike[str], target_model: PreTrainedModel
) -> PreTrainedConfig | None:
    """Checks that a drafter fits a target, from the drafter's `config.json` alone.

    Args:
        path_or_repo_id: As of `load_drafter`.
        target_model: The target, whose weights may be on the meta device.

    Returns:
        The drafter's configuration; None if only its weights can tell.

    Raises:
        ValueError: If the format is not supported, or the drafter does not fit.
        OSError: If there is no such folder or repository.
    """
    kind, config = _read(Checkpoint(path_or_repo_id), None)
    kind.check_fits(config, target_model)
    return config


def is_drafter_alone(raw_config: dict[str, Any]) -> bool:
    """Whether a checkpoint with this `config.json` is a drafter and can be nothing else, such as a target."""
    checkpoint = Checkpoint("", raw_config=raw_config)
    kinds = [kind for kind in DRAFTER_KINDS if kind.is_never_a_target]
    return checkpoint.speculators_type is not None or any(kind.recognises(checkpoint, None) for kind in kinds)


def make_candidate_generator(
    assistant_model: Any, model: PreTrainedModel, config: DDTreeConfig, draft_state: Any = None
) -> TreeCandidateGenerator:
    """The generator for a drafter, chosen by what the drafter is.

    Raises:
        ValueError: If the drafter is of a kind that the package does not know, has no weights, or does not fit the
            model.
    """
    assistant_model = unwrapped(assistant_model, "assistant_model")
    kind = drafter_kind(assistant_model)
    if execution_device(assistant_model).type == "meta":
        raise ValueError(
            f"`assistant_model`, {describe_type(assistant_model)}, is on the device 'meta', so it has shapes but no "
            "weights. Load it with `hf_ddtree.load_drafter` or `from_pretrained`, not under `torch.device('meta')`."
        )
    return GENERATORS[kind](assistant_model, model, config, draft_state)


def drafter_kind(assistant_model: Any) -> DrafterKind:
    """What kind of drafter an `assistant_model` is.

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


def _read(checkpoint: Checkpoint, target_model: PreTrainedModel | None) -> tuple[DrafterKind, PreTrainedConfig | None]:
    """What kind of drafter a checkpoint holds, and its configuration; None if only the weights can tell."""
    with config_errors(checkpoint.name, AttributeError, TypeError):
        kind = _kind_of_checkpoint(checkpoint, target_model)
        return kind, kind.read_config(checkpoint)


def _kind_of_checkpoint(checkpoint: Checkpoint, target_model: PreTrainedModel | None) -> DrafterKind:
    """What kind of drafter a checkpoint holds.

    Raises:
        ValueError: If it is of none that is known.
    """
    for kind in DRAFTER_KINDS:
        if kind.recognises(checkpoint, target_model):
            return kind
    refuse_other_types(checkpoint)
    raise ValueError(
        f"The checkpoint {checkpoint.name!r} is no drafter that can be loaded: it has `architectures` "
        f"{checkpoint.architectures} and `model_type` {checkpoint.model_type!r}. What can be loaded: "
        f"{', '.join(kind.name for kind in DRAFTER_KINDS)}. By what each is recognised stands in docs/drafters.md."
    )
