"""The multi-token-prediction (MTP) layers of a target, as a drafter.

An MTP layer gets, for a token, its embedding and a hidden state of the token before it: the target's final-normalised
one or, for a drafted token, an MTP layer's own output. Both are normalised, concatenated, projected, and go through
one decoder layer of the target's family. Embeddings and output head are the target's (DeepSeek-V3, arXiv:2412.19437,
section 2.2).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")


class MTPDrafter(PreTrainedModel):
    """MTP layers without the embeddings and the head, which are the target's.

    Args:
        config: Of the layers, which are numbered from 0.
        layers: The first predicts what follows the next token, each other one a token further. A single one predicts
            further tokens from its own outputs.
        shared_post_norm: A norm on the output of every layer, if they have none of their own.
    """

    _supports_sdpa = True

    def __init__(
        self, config: PreTrainedConfig, layers: nn.ModuleList, shared_post_norm: nn.Module | None = None
    ) -> None:
        super().__init__(config)
        self.layers = layers
        self.shared_post_norm = shared_post_norm

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The layers are the target's own kind.
        return True

    def forward(self, layer: int, **inputs: Any) -> Tensor:
        """The output of one layer, `(batch, length, hidden_size)`; the inputs are those of `MtpLayer`."""
        hidden_states = self.layers[layer](**inputs)
        return hidden_states if self.shared_post_norm is None else self.shared_post_norm(hidden_states)


def wrap_mtp_model(model: MtpModel) -> MTPDrafter:
    """The drafter of layers that Transformers has loaded.

    Raises:
        ValueError: If a layer is of a kind that the package does not know.
    """
    unknown = sorted(set(getattr(model.config, "layer_types", None) or ()) - set(ATTENTION_LAYER_TYPES))
    if unknown or hasattr(model.config, "logits_mup_width_multiplier"):
        raise ValueError(
            f"The target's MTP layers are of a kind that cannot draft trees ({', '.join(unknown) or 'scaled logits'}; "
            f"known are {', '.join(ATTENTION_LAYER_TYPES)}). Use another drafter."
        )
    return MTPDrafter(model.config, model.layers, getattr(model, "shared_post_norm", None))


def check_mtp_drafter_fits(drafter: MTPDrafter, target_model: PreTrainedModel) -> None:
    """Checks that MTP layers can draft for a target.

    Raises:
        ValueError: If they are of another family or size than the target, or in training mode.
    """
    own, others = drafter.config, target_model.config.get_text_config()
    if (own.hidden_size, own.model_type) != (others.hidden_size, others.model_type):
        raise ValueError(
            f"The MTP layers do not fit the target: they are of family {own.model_type!r} and hidden size "
            f"{own.hidden_size}, the target of {others.model_type!r} and {others.hidden_size}. Load them with "
            '`hf_ddtree.load_drafter("mtp", target_model=model)`.'
        )
    if drafter.layers.training:
        raise ValueError(
            "`assistant_model`, MTP layers, is in training mode, where dropout would draw random numbers between "
            "those of sampling. Call `assistant_model.eval()` first."
        )
