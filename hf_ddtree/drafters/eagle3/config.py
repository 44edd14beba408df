"""The configuration of an EAGLE-3 drafter."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..layer_config import LayerConfig


@strict
class Eagle3Config(LayerConfig):
    """A `LayerConfig` with the settings of EAGLE-3.

    Args:
        qk_norm: Whether queries and keys are normalised, as in Qwen3 and not in Llama.
        mlp_bias: Whether the MLPs have biases.
        target_layer_ids: Decoder layers of the target, from 0, whose outputs are the features, in order. None for a
            low, a middle and a high one, see `layer_ids`.
        draft_vocab_size: Tokens that the drafter can predict, if these are a part of the target's vocabulary; None if
            it predicts them all.
        norm_before_residual: Whether the first layer's residual is the normalised hidden state.
        norm_before_fc: Whether the concatenated features are normalised.
        fc_norm: Whether the features of each layer are normalised.
        norm_output: Whether the hidden states that are fed back are normalised.
        owns_embeddings: Whether the drafter has embeddings of its own.

    Raises:
        ValueError: If a value is out of range.
    """

    model_type = "hf_ddtree_eagle3"

    qk_norm: bool = False
    mlp_bias: bool = False
    target_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    owns_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("`layer_types` holds 'sliding_attention', but there is no `sliding_window`.")

    @property
    def num_features(self) -> int:
        """Layers of the target that are read."""
        return len(self.target_layer_ids or (0, 0, 0))

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The target layers to read; by default the inputs of layers 2, `n // 2` and `n - 3`, as in EAGLE's code."""
        return tuple(self.target_layer_ids or (1, num_target_layers // 2 - 1, num_target_layers - 4))
