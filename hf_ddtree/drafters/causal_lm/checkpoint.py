"""Causal language models as drafters: which fit a target, and loading them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...target.requirements import check_target
from ..checkpoint import Checkpoint
from ..kind import LEVELWISE, DrafterKind, Format

# Each model pads its embedding table to a round size and adds rows for its own tokens. Tables of one tokenizer differ
# by at most this many rows, and by at most this fraction of the larger table; those of two tokenizers by more.
MOST_VOCAB_PADDING, MOST_OF_VOCAB = 1024, 1 / 16


def check_causal_lm_fits(drafter: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """Checks that a causal language model can draft trees for a target.

    It must have the target's tokenizer, of which only the sizes of the embedding tables tell: they may differ by what
    padding and added tokens explain, at most 1024 rows and a sixteenth of the larger table.

    Raises:
        ValueError: If the vocabularies are different, or the drafter cannot run on trees, or is in training mode.
    """
    name = type(drafter).__name__
    _check_vocab_size(drafter.config, target_model.config, name)
    if not drafter.can_generate() or drafter.get_output_embeddings() is None:
        raise ValueError(
            f"`assistant_model` is a {name}, which has no output head and predicts no tokens. Load it with "
            "`hf_ddtree.load_drafter` or `AutoModelForCausalLM`."
        )
    try:
        check_target(drafter)
    except ValueError as error:
        raise ValueError(f"`assistant_model` must run on trees as the target does, but cannot: {error}") from error
    if drafter.training:
        raise ValueError(
            f"`assistant_model`, a {name}, is in training mode, where dropout would draw random numbers between those "
            "of sampling. Call `assistant_model.eval()` first."
        )


def is_causal_lm(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a causal language model that Transformers knows."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return checkpoint.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and any(
        architecture in known or architecture.endswith("ForConditionalGeneration")
        for architecture in checkpoint.architectures
    )


def load_causal_lm(
    checkpoint: Checkpoint, config: PreTrainedConfig, target_model: PreTrainedModel | None
) -> PreTrainedModel:
    """Loads a causal language model with `AutoModelForCausalLM`."""
    return checkpoint.load(AutoModelForCausalLM, target_model)


def check_config_fits(config: PreTrainedConfig, target_model: PreTrainedModel) -> None:
    """Checks that a causal language model with this configuration fits a target, as `check_causal_lm_fits` does."""
    _check_vocab_size(config, target_model.config, f"checkpoint {config.name_or_path!r}")
    with torch.device("meta"):
        check_causal_lm_fits(AutoModelForCausalLM.from_config(config).eval(), target_model)


def _check_vocab_size(config: PreTrainedConfig, target_config: PreTrainedConfig, name: str) -> None:
    own, others = config.get_text_config().vocab_size, target_config.get_text_config().vocab_size
    if abs(own - others) > min(MOST_VOCAB_PADDING, MOST_OF_VOCAB * max(own, others)):
        raise ValueError(
            f"The drafter does not fit the target: the {name} has `vocab_size` {own}, the target {others}, more apart "
            "than padding explains, so they have different tokenizers. The nodes of a tree are tokens of the target, "
            "and drafting in other tokens (universal assisted decoding) is not supported. Choose a drafter with the "
            "target's tokenizer."
        )


CAUSAL_LM = DrafterKind(
    name="causal language model",
    tree=LEVELWISE,
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
    is_never_a_target=False,
)
