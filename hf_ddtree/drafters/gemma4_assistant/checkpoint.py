"""Gemma 4's assistants: which fit a target, which of its layers they read, and loading them.

Transformers has their class. All their layers attend to the keys and values of the target's last layer of the same
kind that has any of its own; they have none themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...interop.attention_functions import TAKE_MASKS
from ...interop.models import attention_implementation
from ...target.layers import decoder_layers
from ..checkpoint import Checkpoint
from ..fit import ADVICE
from ..kind import LEVELWISE, DrafterKind, Format

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_gemma4_assistant(assistant_model: Any) -> bool:
    """Whether it is such a drafter."""
    return isinstance(assistant_model, PreTrainedModel) and assistant_model.config.model_type in MODEL_TYPES


def is_gemma4_assistant_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds such a drafter."""
    return checkpoint.model_type in MODEL_TYPES


def layers_to_read(target_model: PreTrainedModel) -> dict[str, int]:
    """For each kind of layer the target's last one with keys of its own."""
    config = target_model.config.get_text_config()
    with_keys = config.num_hidden_layers - config.num_kv_shared_layers
    return {kind: layer for layer, kind in enumerate(config.layer_types[:with_keys])}


def check_config_fits(config: PreTrainedConfig, target_model: PreTrainedModel) -> None:
    """Checks that an assistant with this configuration can draft for a target, as `check_assistant_fits` does."""
    with torch.device("meta"):
        check_assistant_fits(AutoModelForCausalLM.from_config(config).eval(), target_model)


def check_assistant_fits(assistant: PreTrainedModel, target_model: PreTrainedModel) -> None:
    """Checks that an assistant can draft for a target.

    Raises:
        ValueError: If the target is no Gemma 4, or of other sizes; or if the assistant's clusters are not of equal
            size, it is in training mode, or it runs with an attention function that takes no mask.
    """
    own, target = assistant.config.get_text_config(), target_model.config.get_text_config()
    kind = type(target_model).__name__
    if not target.model_type.startswith("gemma4"):
        raise ValueError(
            f"The drafter is a {type(assistant).__name__}, which drafts for Gemma 4, but the target is a {kind}. "
            f"{ADVICE}"
        )
    for setting, given, allowed in (
        ("backbone_hidden_size", assistant.config.backbone_hidden_size, target.hidden_size),
        ("vocab_size", own.vocab_size, target.vocab_size),
        *_sizes_of_keys(assistant, target_model),
    ):
        if given != allowed:
            raise ValueError(
                f"The drafter does not fit the target: the drafter has {setting} {given}, but the target, a {kind}, "
                f"has {allowed}. {ADVICE}"
            )
    if assistant.config.use_ordered_embeddings and own.vocab_size % assistant.config.num_centroids:
        raise ValueError(
            f"The drafter has `num_centroids` {assistant.config.num_centroids}, but clusters of equal size need one "
            f"that divides `vocab_size` ({own.vocab_size}). {ADVICE}"
        )
    if (implementation := attention_implementation(own)) not in TAKE_MASKS:
        raise ValueError(
            f"`assistant_model`, a {type(assistant).__name__}, runs with attn_implementation={implementation!r}, "
            'which takes no mask. Load it with attn_implementation="sdpa" or "eager".'
        )
    if assistant.training:
        raise ValueError(
            f"`assistant_model`, a {type(assistant).__name__}, is in training mode, where dropout would draw random "
            "numbers between those of sampling. Call `assistant_model.eval()` first."
        )


def _sizes_of_keys(assistant: PreTrainedModel, target_model: PreTrainedModel) -> list[tuple[str, Any, Any]]:
    """For each kind of layer the size of a head and the number of key heads: a name, the assistant's, the target's."""
    read, layers = layers_to_read(target_model), decoder_layers(target_model)
    sizes = []
    for kind in dict.fromkeys(assistant.config.get_text_config().layer_types):
        own = next(layer for layer in assistant.model.layers if layer.self_attn.layer_type == kind)
        target = _size_of_keys(layers[read[kind]], target_model) if kind in read else None
        sizes.append((f"keys for {kind} of (heads, size)", _size_of_keys(own, assistant), target))
    return sizes


def _size_of_keys(layer: Any, model: PreTrainedModel) -> tuple[int, int]:
    attention, config = layer.self_attn, model.config.get_text_config()
    return config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


def load_gemma4_assistant(
    checkpoint: Checkpoint, config: PreTrainedConfig, target_model: PreTrainedModel | None
) -> PreTrainedModel:
    """Loads an assistant of the class that Transformers has.

    Raises:
        ValueError: If the checkpoint lacks weights, or its clusters do not hold every token once.
    """
    assistant = checkpoint.load(AutoModelForCausalLM, target_model)
    if assistant.masked_embedding is not None:
        ordering = assistant.masked_embedding.token_ordering
        if not torch.equal(ordering.sort().values, torch.arange(len(ordering), device=ordering.device)):
            raise ValueError(
                f"The checkpoint {checkpoint.name!r} has a `masked_embedding.token_ordering` that does not hold each "
                f"of the {len(ordering)} tokens once. Download it again."
            )
    return assistant


GEMMA4_ASSISTANT = DrafterKind(
    name="assistant of Gemma 4",
    tree=LEVELWISE,
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
    check_fits=check_config_fits,
    load=load_gemma4_assistant,
    matches=is_gemma4_assistant,
)
