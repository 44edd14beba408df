"""Whether a drafter's sizes are those of its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..target.layers import decoder_layers
from .checkpoint import Checkpoint

ADVICE = "Choose a drafter that was trained for this target."


def check_sizes_fit(config: PreTrainedConfig, target_model: PreTrainedModel, layer_ids: Iterable[int]) -> None:
    """Checks that a drafter with this configuration has its target's hidden size, vocabulary and layers.

    Args:
        config: The drafter's configuration.
        target_model: The target.
        layer_ids: The target's layers that the drafter reads.

    Raises:
        ValueError: If they disagree, or the target has no output head; the message says what disagrees.
    """
    decoder_layers(target_model)  # refuses a target whose layers cannot be read
    target = target_model.config.get_text_config()
    kind = type(target_model).__name__
    if target_model.get_output_embeddings() is None:
        raise ValueError(
            f"The target, a {kind}, has no output head, which the drafter needs. Load it with `AutoModelForCausalLM`."
        )
    for setting, target_setting in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        given, allowed = getattr(config, setting, None), getattr(target, target_setting)
        if given is not None and given != allowed:
            raise ValueError(
                f"The drafter does not fit the target: the drafter has `{setting}` {given}, but the target, a {kind}, "
                f"has `{target_setting}` {allowed}. {ADVICE}"
            )
    if wrong := [layer for layer in layer_ids if not 0 <= layer < target.num_hidden_layers]:
        raise ValueError(
            f"The drafter does not fit the target: its `target_layer_ids` hold {wrong}, but the target, a {kind}, has "
            f"layers 0 to {target.num_hidden_layers - 1}. {ADVICE}"
        )


def check_vocabulary(token_ids: Tensor | None, config: Any, checkpoint: Checkpoint) -> None:
    """Checks that a reduced vocabulary, if there is one, names tokens of the target's, each once.

    Raises:
        ValueError: If it does not.
    """
    if token_ids is None:
        return
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= config.vocab_size or len(token_ids.unique()) < len(token_ids):
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} has a map `d2t` from its {config.draft_vocab_size} tokens to tokens "
            f"{lowest} to {highest} of the target, but they must be distinct and between 0 and "
            f"{config.vocab_size - 1}. Download it again."
        )
