"""A drafter for a target, from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.dflash import DFlashConfig, DFlashDraftModel
from ..drafters.dflash.checkpoint import check_dflash_fits
from ..drafters.dflash2 import DFlash2Config, DFlash2DraftModel
from ..drafters.dspark import DSparkConfig, DSparkDraftModel

DrafterName = Literal["dflash", "dflash2", "dspark", "jetspec"]
DRAFTERS: tuple[str, ...] = get_args(DrafterName)
_CLASSES: dict[str, tuple[type[DFlashConfig], type[DFlashDraftModel], dict[str, Any]]] = {
    "dflash": (DFlashConfig, DFlashDraftModel, {"is_causal": False}),
    "dflash2": (DFlash2Config, DFlash2DraftModel, {"is_causal": False, "selector_top_k": 32}),
    "dspark": (DSparkConfig, DSparkDraftModel, {"is_causal": False, "markov_rank": 128}),
    "jetspec": (DFlashConfig, DFlashDraftModel, {"is_causal": True}),
}
# Parts of the names of tokens that no text holds.
UNUSED_NAMES = ("mask", "unused", "reserved", "extra", "placeholder")


def new_drafter(
    target_model: PreTrainedModel,
    mask_token_id: int,
    kind: DrafterName = "dflash2",
    *,
    layers: int = 5,
    block_size: int = 16,
    window: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    **settings: Any,
) -> DFlashDraftModel:
    """A drafter with random weights, with layers of the target's sizes.

    Args:
        target_model: The target.
        mask_token_id: The token whose embedding stands for a slot to predict; one that no text holds, see
            `find_mask_token`.
        kind: `"dflash"`; `"dflash2"`, with convolutions and a candidate selector; `"dspark"`, with a Markov head and a
            confidence head; `"jetspec"`, DFlash with causal blocks.
        layers: Its layers.
        block_size: Slots of a block, the root's included.
        window: Tokens of the context that a block sees; all if None. Where it sees more than the texts that it learns
            from are long, it is right less often.
        target_layer_ids: Layers of the target to read, from 0. By default evenly spaced, as many as it has layers.
        settings: Of the drafter's configuration, in place of the target's sizes and the defaults of its kind.

    Returns:
        The drafter, in float32 on the CPU.

    Raises:
        ValueError: If a setting is out of range, or there can be no such drafter for the target.
    """
    if kind not in _CLASSES:
        raise ValueError(f"`kind` must be one of {', '.join(map(repr, DRAFTERS))}, but is {kind!r}.")
    target = target_model.config.get_text_config()
    heads = target.num_attention_heads
    kind_of_layer = "full_attention" if window is None else "sliding_attention"
    if target_layer_ids is None:
        target_layer_ids = _spread(target.num_hidden_layers, layers)
    config_class, model_class, of_kind = _CLASSES[kind]
    of_target = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(target, "intermediate_size", None) or 3 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(target)},
        "num_target_layers": target.num_hidden_layers,
    }
    own = {
        "num_hidden_layers": layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
        "layer_types": [kind_of_layer] * layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    config = config_class(**{**of_target, **own, **of_kind, **settings})
    check_dflash_fits(config, target_model)
    return model_class(config)


def find_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """A token that no text holds.

    It is the tokenizer's mask token; else a row of the embeddings that the tokenizer does not use; else a special
    token that is named as unused.

    Args:
        tokenizer: The target's.
        vocab_size: Rows of the target's embeddings.

    Raises:
        ValueError: If there is none.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    named = [number for name, number in special.items() if "mask" in name.lower()]
    if not named and vocab_size > len(tokenizer):
        return vocab_size - 1
    named += [number for name, number in special.items() if any(part in name.lower() for part in UNUSED_NAMES)]
    if not named:
        raise ValueError(
            f"The tokenizer has no token that no text holds, among {len(tokenizer)} in a vocabulary of {vocab_size}. "
            "Name one as `mask_token_id`."
        )
    return int(named[0])


def _spread(num_target_layers: int, layers: int) -> list[int]:
    """Layers of the target from an early one to the last but one, evenly spaced; the last of a shallow target."""
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, min(2, num_target_layers - 1))
    steps = max(layers - 1, 1)
    return sorted({round(first + (last - first) * step / steps) for step in range(layers)})


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    thetas = [entry["rope_theta"] for entry in (nested or [parameters]) if entry.get("rope_theta")]
    return float(max(thetas, default=10000.0))
