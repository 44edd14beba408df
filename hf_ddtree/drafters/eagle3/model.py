"""The EAGLE-3 drafter (arXiv:2503.01840): a decoder layer that reads a token and the features of the one before.

The outputs of a low, a middle and a high layer of the target, projected to one hidden state, and the embedding of the
next token enter the first layer side by side. Its output stands for the features of a drafted token. Weights are named
as in the checkpoints of the speculators library, which has `layers.0` for `midlayer`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from ...target.weights import embedding_rows, execution_device
from .config import Eagle3Config


class Eagle3Attention(nn.Module):
    """Grouped-query attention; the first layer's reads embeddings and hidden states side by side."""

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        width, bias = config.hidden_size * (2 if layer_idx == 0 else 1), config.attention_bias
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        """`(batch, length, hidden_size)`; see `Eagle3DraftModel.forward`."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        key, value = cache.update(_rotate(key, *rotary), value, self.layer_idx)
        attended = F.scaled_dot_product_attention(
            _rotate(query, *rotary), key, value, attention_mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def _rotate(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = hidden.chunk(2, dim=-1)
    return hidden * cos + torch.cat((-second, first), dim=-1) * sin


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one normalises the embeddings and the hidden states, each on its own."""

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        super().__init__()
        self.is_first, self.norm_before_residual = layer_idx == 0, config.norm_before_residual
        self.self_attn = Eagle3Attention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        inputs_embeds: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        """`(batch, length, hidden_size)`; `inputs_embeds` is for the first layer alone."""
        residual = hidden_states
        if self.is_first:
            normed = self.hidden_norm(hidden_states)
            residual = normed if self.norm_before_residual else residual
            normed = torch.cat((self.input_layernorm(inputs_embeds), normed), dim=-1)
        else:
            normed = self.input_layernorm(hidden_states)
        hidden_states = residual + self.self_attn(normed, rotary, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3DraftModel(PreTrainedModel):
    """The EAGLE-3 drafter. It uses the target's embeddings, and has an output head of its own."""

    config_class = Eagle3Config
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"
    _no_split_modules = ["Eagle3Layer"]
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [
        r"^embed_tokens\.",
        r"^verifier_",
        "^t2d$",
        "^d2t$",
        r"rotary_emb\.inv_freq$",
    ]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_features * hidden_size, hidden_size, bias=False)
        self.input_norm = Qwen3RMSNorm(config.num_features * hidden_size, eps=eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Qwen3RMSNorm(hidden_size, eps=eps) for _ in range(config.num_features))
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden_size, eps=eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            # What to add to a token of the drafter's vocabulary to have that of the target's.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        if config.owns_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size)
        self.post_init()

    @property
    def target_token_ids(self) -> Tensor | None:
        """`(draft_vocab_size,)` int64, the drafter's vocabulary in tokens of the target; None if it has them all."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def embed(self, token_ids: Tensor, target_embeddings: nn.Embedding) -> Tensor:
        """Embeddings `(*token_ids.shape, hidden_size)`, on the device and in the dtype of the drafter."""
        embeddings = self.embed_tokens if self.config.owns_embeddings else target_embeddings
        return embedding_rows(embeddings, token_ids).to(execution_device(self), self.dtype)

    def project(self, features: Tensor) -> Tensor:
        """Hidden states `(..., hidden_size)` from the target's `(..., num_features * hidden_size)`."""
        features = features.to(execution_device(self), self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        attention_masks: Mapping[str, Tensor],
        cache: DynamicCache,
    ) -> Tensor:
        """One pass over tokens or tree nodes.

        Args:
            inputs_embeds: `(batch, length, hidden_size)`, from `embed`.
            hidden_states: `(batch, length, hidden_size)`: for each token what `project` made of the features of the
                one before it or, if that is drafted, the drafter's own output there.
            position_ids: `(batch, length)` int64.
            attention_masks: For each kind of layer `(batch or 1, 1, length, cached + length)` bool.
            cache: Takes up the keys and values.

        Returns:
            `(batch, length, hidden_size)`; see `compute_logits`.
        """
        cos, sin = self.rotary_emb(inputs_embeds, position_ids)
        rotary = cos[:, None], sin[:, None]
        for layer, kind in zip(self.layers, self.config.layer_types):
            hidden_states = layer(hidden_states, inputs_embeds, rotary, attention_masks[kind], cache)
        return self.norm(hidden_states) if self.config.norm_output else hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`(..., draft_vocab_size)` in the order of `target_token_ids`, or `(..., vocab_size)`, from `forward`'s."""
        return self.lm_head(hidden_states if self.config.norm_output else self.norm(hidden_states))


AutoConfig.register(Eagle3Config.model_type, Eagle3Config, exist_ok=True)
AutoModel.register(Eagle3Config, Eagle3DraftModel, exist_ok=True)
