"""The configuration of a DFlash drafter."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..layer_config import LayerConfig

# Most slots of a block; those that are published have 16.
MOST_SLOTS = 1024


@strict
class DFlashConfig(LayerConfig):
    """A `LayerConfig` with the settings of DFlash.

    Args:
        block_size: Slots of a block, the root's included. The drafter predicts `draft_length` tokens.
        target_layer_ids: Decoder layers of the target, from 0, whose outputs are the context features, in order.
            `evenly_spaced_layers` by default.
        mask_token_id: The token of the target's vocabulary whose embedding stands for a slot to predict.
        num_target_layers: Decoder layers of the target.
        is_causal: Whether a slot sees only earlier slots. None: in layers with a sliding window only.
        window_from_root: Whether every slot sees all of the block, as far as `is_causal` lets it, and the
            `sliding_window` last tokens of the context. Otherwise a window reaches back from each slot.
        sample_from_anchor: Whether slot `i` predicts the token at offset `i + 1`, so that the root's slot predicts one
            as well, and not the token at offset `i`.
        draft_vocab_size: Tokens that the drafter can predict, if it has an output head of its own for a part of the
            target's vocabulary. None if it has the target's.
        input_embedding_scale: Factor on the target's embedding weights.
        output_multiplier: Factor on the logits.
        final_logit_softcapping: Bound `c` of `c * tanh(logits / c)`, applied after the factor; None or 0 for no bound.

    Raises:
        ValueError: If a value is missing or out of range.
    """

    model_type = "hf_ddtree_dflash"

    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    is_causal: bool | None = None
    window_from_root: bool = False
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    input_embedding_scale: int | float = 1.0
    output_multiplier: int | float = 1.0
    final_logit_softcapping: int | float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = evenly_spaced_layers(self.num_target_layers, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        self._check_values()

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token at offset 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def draft_length(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot

    def _check_values(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}. It counts the root, so it must be at least 2.")
        if self.block_size > MOST_SLOTS:
            raise ValueError(f"`block_size` is {self.block_size}, but must be at most {MOST_SLOTS}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, but must be between 0 and `vocab_size - 1` "
                f"({self.vocab_size - 1})."
            )
        depth = self.num_target_layers
        for layer in self.target_layer_ids or []:
            if layer < 0 or (depth is not None and layer >= depth):
                allowed = "at least 0" if depth is None else f"between 0 and `num_target_layers - 1` ({depth - 1})"
                raise ValueError(f"`target_layer_ids` holds {layer}, but every id must be {allowed}.")
        unknown = set(self.layer_types or []) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"`layer_types` holds {sorted(unknown)}. A DFlash layer is 'full_attention' or 'sliding_attention'."
            )


def evenly_spaced_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """The target layers that a drafter of `num_layers` reads if its checkpoint names none: from the second layer to
    the third last, evenly spaced; the middle one for a single layer."""
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [min(max(round(1 + i * step), 0), num_target_layers - 1) for i in range(num_layers)]
