"""The DSpark drafter with Gemma 4's layers, as DeepSpec trains it. Weights are named as in its checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ..dflash.model import DFlashAttention, DFlashLayer, rotate
from ..dspark.model import DSparkDraftModel
from .config import Gemma4DSparkConfig


class Gemma4DSparkAttention(DFlashAttention):
    """DFlash's attention with unscaled queries and normalised values, which the keys' projection may give as well."""

    def __init__(self, config: Gemma4DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        self.eps = config.rms_norm_eps
        self.shares_projection = config.attention_k_eq_v
        if self.shares_projection:
            del self.v_proj

    def _keys_and_values(self, source: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        projected = self._split_heads(self.k_proj(source))
        value = projected if self.shares_projection else self._split_heads(self.v_proj(source))
        key = rotate(self.k_norm(projected).transpose(1, 2), cos, sin)
        return key, F.rms_norm(value, (self.head_dim,), eps=self.eps).transpose(1, 2)


class Gemma4DSparkLayer(DFlashLayer):
    """A layer that normalises what attention and MLP give as well, and scales what it hands on."""

    attention_class = Gemma4DSparkAttention

    def __init__(self, config: Gemma4DSparkConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states: Tensor, *attention_args: object) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), *attention_args)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        transformed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(transformed)) * self.layer_scalar


class Gemma4DSparkDraftModel(DSparkDraftModel):
    """The DSpark drafter with Gemma 4's layers. `forward` is that of `DFlashDraftModel`."""

    config_class = Gemma4DSparkConfig
    layer_class = Gemma4DSparkLayer
    _no_split_modules = ["Gemma4DSparkLayer"]


AutoConfig.register(Gemma4DSparkConfig.model_type, Gemma4DSparkConfig, exist_ok=True)
AutoModel.register(Gemma4DSparkConfig, Gemma4DSparkDraftModel, exist_ok=True)
