"""The registry of drafters: one entry per kind, from recognising a checkpoint to the generator that drafts with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from .candidate_generators.base import TreeCandidateGenerator
from .candidate_generators.causal_lm import CausalLMTreeCandidateGenerator
from .candidate_generators.dflash import DFlashTreeCandidateGenerator
from .candidate_generators.eagle3 import Eagle3TreeCandidateGenerator
from .candidate_generators.gemma4_assistant import Gemma4AssistantTreeCandidateGenerator
from .candidate_generators.mtp import MTPTreeCandidateGenerator
from .candidate_generators.sequential_head import SequentialHeadTreeCandidateGenerator
from .configuration import DDTreeConfig
from .drafters.causal_lm.checkpoint import check_config_fits, is_causal_lm, load_causal_lm
from .drafters.checkpoint import Checkpoint
from .drafters.dflash import DFlashDraftModel
from .drafters.dflash.checkpoint import check_dflash_fits, is_dflash, load_dflash, read_dflash_config
from .drafters.dflash2 import DFlash2DraftModel
from .drafters.dflash2.checkpoint import is_dflash2, read_dflash2_config
from .drafters.domino import DominoDraftModel
from .drafters.domino.checkpoint import is_domino, read_domino_config
from .drafters.dspark import DSparkDraftModel
from .drafters.dspark.checkpoint import is_dspark, read_dspark_config
from .drafters.eagle3 import Eagle3DraftModel
from .drafters.eagle3.checkpoint import check_eagle3_fits, is_eagle3, load_eagle3, read_eagle3_config
from .drafters.gemma4_assistant.checkpoint import check_config_fits as check_gemma4_assistant_fits
from .drafters.gemma4_assistant.checkpoint import (
    is_gemma4_assistant,
    is_gemma4_assistant_checkpoint,
    load_gemma4_assistant,
)
from .drafters.mtp.checkpoint import OWN_CHECKPOINT, check_mtp_fits, is_mtp, load_mtp
from .drafters.mtp.model import MTPDrafter
from .drafters.native.checkpoint import check_native_fits, is_native_checkpoint, load_native
from .drafters.native.view import is_native, view_native
from .drafters.speculators.layout import refuse_other_types
from .interop.wrappers import unwrapped
from .target.weights import execution_device
from .validation import describe_type


class Format(NamedTuple):
    """A format that drafters of a kind are published in; a row of the table in `docs/drafters.md`.

    Attributes:
        publisher: Whose it is.
        recognised_by: What in its `config.json` tells.
        needs: What must be there.
        parity: The test that compares it with its publisher's implementation, or with plain equations.
    """

    publisher: str
    recognised_by: str
    needs: str
    parity: str


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        name: What it is called.
        tree: What its trees are like.
        formats: The formats that it comes in.
        recognises: Whether a checkpoint holds such a drafter, for the target that it is loaded for. The target is None
            if there is none, or if nothing but the checkpoint's config may be read.
        read_config: The drafter's configuration, from its checkpoint's; None if only the weights can tell.
        check_fits: Raises `ValueError` if a drafter with this configuration does not fit a target, whose weights may
            be on the meta device.
        load: Loads the drafter from its checkpoint and configuration for a target, or for None.
        matches: Whether an `assistant_model` is a drafter of this kind.
        make_generator: Makes the candidate generator from the drafter, the target, the knobs and an earlier call's
            `draft_state`. Raises `ValueError` if the drafter does not fit.
        is_never_a_target: Whether such a checkpoint can be nothing else than a drafter.
    """

    name: str
    tree: str
    formats: tuple[Format, ...]
    recognises: Callable[[Checkpoint, PreTrainedModel | None], bool]
    read_config: Callable[[Checkpoint], PreTrainedConfig | None]
    check_fits: Callable[[Any, PreTrainedModel], None]
    load: Callable[[Checkpoint, Any, PreTrainedModel | None], PreTrainedModel]
    matches: Callable[[Any], bool]
    make_generator: Callable[[Any, PreTrainedModel, DDTreeConfig, Any], TreeCandidateGenerator]
    is_never_a_target: bool = True


def _make_native_generator(
    drafter: PreTrainedModel, target_model: PreTrainedModel, config: DDTreeConfig, state: Any
) -> DFlashTreeCandidateGenerator:
    return DFlashTreeCandidateGenerator(view_native(drafter, target_model), target_model, config, state)


_BLOCK = (
    "one forward for a block; by one distribution per depth, calibrated, and by what the target said on the branch"
)
_CONDITIONAL = "one forward for a block; by each token's probability given the one before it"
_ALONG_BRANCH = "one forward for a block, then a small head per level; by each token's probability given its branch"
_LEVELWISE = "one forward per level; by each token's probability given its branch"
_LAYERS = "`mask_token_id`, and `target_layer_ids` or `num_target_layers`, in `dflash_config` or beside it"
_SPECULATORS = (
    "`aux_hidden_state_layer_ids`, `transformer_layer_config`, `mask_token_id`; `d2t` of a reduced vocabulary"
)

# Drafters that are known and not supported, by their class, and why.
UNSUPPORTED = {
    "Gemma4DSparkModel": "its layers are Gemma 4's, and only DSpark drafters with Qwen3's layers are read",
}

# The first that recognises or matches is taken.
DRAFTER_KINDS = (
    DrafterKind(
        name="multi-token-prediction layers",
        tree=_LEVELWISE,
        formats=(
            Format(
                "Qwen3-Next, Qwen3.5, Qwen3.5-MoE",
                '`"mtp"`, or tensors `mtp.*` in a checkpoint of the target',
                "all tensors of one such layer, not quantized",
                "test_mtp_drafter.py::test_the_tree_against_a_plain_step",
            ),
            Format(
                "families whose layers Transformers loads",
                '`"mtp"`, and `num_mtp_layers` in the target\'s config',
                "the target's own checkpoint",
                "test_mtp_drafter.py::test_what_transformers_drafts",
            ),
        ),
        recognises=is_mtp,
        read_config=lambda checkpoint: None,
        check_fits=check_mtp_fits,
        load=load_mtp,
        matches=lambda drafter: isinstance(drafter, MTPDrafter | MtpModel),
        make_generator=MTPTreeCandidateGenerator,
        is_never_a_target=False,
    ),
    DrafterKind(
        name="DFlash of Transformers",
        tree=_BLOCK,
        formats=(
            Format(
                "Muse Glimmer",
                "`model_type` `muse_glimmer_assistant`",
                "what its class needs",
                "test_native_dflash.py::test_hidden_states_over_rounds",
            ),
        ),
        recognises=lambda checkpoint, _: is_native_checkpoint(checkpoint),
        read_config=Checkpoint.read_config,
        check_fits=check_native_fits,
        load=load_native,
        matches=is_native,
        make_generator=_make_native_generator,
    ),
    DrafterKind(
        name="DSpark",
        tree=_ALONG_BRANCH,
        formats=(
            Format(
                "DeepSpec",
                "`architectures` with `Qwen3DSparkModel`",
                f"`markov_rank`, `enable_confidence_head`; {_LAYERS}",
                "test_dspark.py::test_trees_over_rounds",
            ),
            Format(
                "SpecForge",
                "`architectures` with `DSparkDraftModel`, or `projector_type` `dspark` in `dflash_config`",
                f"`markov_rank`, `enable_confidence_head`; {_LAYERS}",
                "test_dspark.py::test_trees_over_rounds",
            ),
            Format(
                "speculators", "`speculators_model_type` `dspark`", _SPECULATORS, "test_dspark.py::test_speculators"
            ),
        ),
        recognises=lambda checkpoint, _: is_dspark(checkpoint),
        read_config=read_dspark_config,
        check_fits=check_dflash_fits,
        load=partial(load_dflash, DSparkDraftModel),
        matches=lambda drafter: isinstance(drafter, DSparkDraftModel),
        make_generator=SequentialHeadTreeCandidateGenerator,
    ),
    DrafterKind(
        name="Domino",
        tree=_ALONG_BRANCH,
        formats=(
            Format(
                "SpecForge",
                "`architectures` with `DominoDraftModel`, or `projector_type` `domino` in `dflash_config`",
                f"`emb_dim`, `gru_hidden_dim`; {_LAYERS}",
                "test_domino.py::test_trees_over_rounds",
            ),
        ),
        recognises=lambda checkpoint, _: is_domino(checkpoint),
        read_config=read_domino_config,
        check_fits=check_dflash_fits,
        load=partial(load_dflash, DominoDraftModel),
        matches=lambda drafter: isinstance(drafter, DominoDraftModel),
        make_generator=SequentialHeadTreeCandidateGenerator,
    ),
    DrafterKind(
        name="DFlash 2",
        tree=_CONDITIONAL,
        formats=(
            Format(
                "z-lab",
                "`architectures` with `DFlash2DraftModel`, or `selector_rank`",
                f"`conv_kernel_size`, `conv_group_size`, `selector_rank`, `selector_top_k`; {_LAYERS}",
                "test_dflash2_parity.py::test_hidden_states_over_rounds",
            ),
            Format(
                "speculators",
                "`speculators_model_type` `dflash2`",
                _SPECULATORS,
                "test_speculators_parity.py::test_dflash2",
            ),
        ),
        recognises=lambda checkpoint, _: is_dflash2(checkpoint),
        read_config=read_dflash2_config,
        check_fits=check_dflash_fits,
        load=partial(load_dflash, DFlash2DraftModel),
        matches=lambda drafter: isinstance(drafter, DFlash2DraftModel),
        make_generator=DFlashTreeCandidateGenerator,
    ),
    DrafterKind(
        name="DFlash",
        tree=_BLOCK,
        formats=(
            Format(
                "z-lab",
                "`architectures` with `DFlashDraftModel`",
                _LAYERS,
                "test_dflash_parity.py::test_hidden_states_over_rounds",
            ),
            Format(
                "JetSpec",
                "z-lab's, with `causal_head` in `dflash_config`",
                _LAYERS,
                "test_dflash_parity.py::test_jetspec",
            ),
            Format(
                "speculators",
                "`speculators_model_type` `dflash`",
                _SPECULATORS,
                "test_speculators_parity.py::test_logits_over_rounds",
            ),
        ),
        recognises=lambda checkpoint, _: is_dflash(checkpoint),
        read_config=read_dflash_config,
        check_fits=check_dflash_fits,
        load=partial(load_dflash, DFlashDraftModel),
        matches=lambda drafter: isinstance(drafter, DFlashDraftModel),
        make_generator=DFlashTreeCandidateGenerator,
    ),
    DrafterKind(
        name="EAGLE-3",
        tree=_LEVELWISE,
        formats=(
            Format(
                "SafeAILab",
                "`architectures` with `LlamaForCausalLM`, and `draft_vocab_size`",
                "layers of Llama with full attention; `d2t`",
                "test_eagle3.py::test_the_two_layouts_are_one_drafter",
            ),
            Format(
                "SpecForge",
                "`architectures` with `LlamaForCausalLMEagle3`",
                "layers of Llama with full attention; `d2t`",
                "test_eagle3.py::test_the_two_layouts_are_one_drafter",
            ),
            Format(
                "speculators",
                "`speculators_model_type` `eagle3`",
                "layers of Llama or Qwen3 with full attention; `d2t` of a reduced vocabulary",
                "test_eagle3.py::test_trees_over_rounds",
            ),
        ),
        recognises=lambda checkpoint, _: is_eagle3(checkpoint),
        read_config=read_eagle3_config,
        check_fits=check_eagle3_fits,
        load=load_eagle3,
        matches=lambda drafter: isinstance(drafter, Eagle3DraftModel),
        make_generator=Eagle3TreeCandidateGenerator,
    ),
    DrafterKind(
        name="assistant of Gemma 4",
        tree=_LEVELWISE,
        formats=(
            Format(
                "Google",
                "`model_type` `gemma4_assistant` or `gemma4_unified_assistant`",
                "a Gemma 4 as the target, whose own keys and values it reads",
                "test_gemma4_assistant.py::test_chains_are_those_of_transformers",
            ),
        ),
        recognises=lambda checkpoint, _: is_gemma4_assistant_checkpoint(checkpoint),
        read_config=Checkpoint.read_config,
        check_fits=check_gemma4_assistant_fits,
        load=load_gemma4_assistant,
        matches=is_gemma4_assistant,
        make_generator=Gemma4AssistantTreeCandidateGenerator,
    ),
    DrafterKind(
        name="causal language model",
        tree=_LEVELWISE,
        formats=(
            Format(
                "Transformers",
                "`architectures` with a class of `AutoModelForCausalLM`, or one that ends in "
                "`ForConditionalGeneration` and has such a counterpart",
                "the target's tokenizer, see below",
                "test_causal_lm_drafter.py::test_the_tree_is_the_best_under_the_drafters_probabilities",
            ),
        ),
        recognises=lambda checkpoint, _: is_causal_lm(checkpoint),
        read_config=Checkpoint.read_config,
        check_fits=check_config_fits,
        load=load_causal_lm,
        matches=lambda drafter: isinstance(drafter, PreTrainedModel),
        make_generator=CausalLMTreeCandidateGenerator,
        is_never_a_target=False,
    ),
)


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
    kind = _kind_of_checkpoint(checkpoint, target_model)
    config = kind.read_config(checkpoint)
    if target_model is not None:
        kind.check_fits(config, target_model)
    return kind.load(checkpoint, config, target_model).eval()


def checkpoint_kind(path_or_repo_id: str | os.PathLike[str]) -> DrafterKind:
    """What kind of drafter a checkpoint holds, by its `config.json` alone.

    Raises:
        ValueError: If it is of none that is known.
        OSError: If there is no such folder or repository.
    """
    return _kind_of_checkpoint(Checkpoint(path_or_repo_id), target_model=None)


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
    checkpoint = Checkpoint(path_or_repo_id)
    kind = _kind_of_checkpoint(checkpoint, target_model=None)
    config = kind.read_config(checkpoint)
    kind.check_fits(config, target_model)
    return config


def is_drafter_alone(raw_config: dict[str, Any]) -> bool:
    """Whether a checkpoint with this `config.json` is a drafter and can be nothing else, such as a target."""
    checkpoint = Checkpoint("", raw_config=raw_config)
    kinds = [kind for kind in DRAFTER_KINDS if kind.is_never_a_target]
    if checkpoint.speculators_type is not None or not UNSUPPORTED.keys().isdisjoint(checkpoint.architectures):
        return True
    return any(kind.recognises(checkpoint, None) for kind in kinds)


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
    return kind.make_generator(assistant_model, model, config, draft_state)


def drafter_kind(assistant_model: Any) -> DrafterKind:
    """What kind of drafter an `assistant_model` is.

    Raises:
        ValueError: If it is of none.
    """
    _refuse_unsupported(type(assistant_model).__name__)
    for kind in DRAFTER_KINDS:
        if kind.matches(assistant_model):
            return kind
    raise ValueError(
        f"`assistant_model` is {describe_type(assistant_model)}, but must be a drafter that `hf_ddtree.load_drafter` "
        "loads, or a causal language model with the target's tokenizer. For another way to draft, pass a "
        "`TreeCandidateGenerator` as `candidate_generator`."
    )


def _refuse_unsupported(*classes: str) -> None:
    for name in UNSUPPORTED.keys() & set(classes):
        raise ValueError(
            f"The drafter is a {name}, which is not supported: {UNSUPPORTED[name]}. Use another drafter for the same "
            "target, `tree_lookup=True`, or the drafter without `generation_strategy` if Transformers supports it."
        )


def _kind_of_checkpoint(checkpoint: Checkpoint, target_model: PreTrainedModel | None) -> DrafterKind:
    """What kind of drafter a checkpoint holds.

    Raises:
        ValueError: If it is of none that is known.
    """
    if checkpoint.path != OWN_CHECKPOINT:
        _refuse_unsupported(*checkpoint.architectures)
    for kind in DRAFTER_KINDS:
        if kind.recognises(checkpoint, target_model):
            return kind
    refuse_other_types(checkpoint)
    raise ValueError(
        f"The checkpoint {checkpoint.name!r} is no drafter that can be loaded: it has `architectures` "
        f"{checkpoint.architectures} and `model_type` {checkpoint.model_type!r}. What can be loaded: "
        f"{', '.join(kind.name for kind in DRAFTER_KINDS)}. By what each is recognised stands in docs/drafters.md."
    )
