"""The DFlash drafter (arXiv:2602.06036): a small block-diffusion model that drafts a whole block in one forward.

The outputs of some of the target's layers for the tokens it has seen (the context) enter every layer as keys and
values in front of the block's own. The block is `[root, mask, mask, ...]`, and slot `i` predicts the token at offset
`i` of the root. Embeddings are the target's, and so is the output head, unless the drafter's vocabulary is a part of
the target's. Weights are named as in the checkpoints that z-lab publishes and that the speculators library writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ...target.weights import embedding_rows, execution_device, head_logits
from ..calibration import Calibration
from .config import DFlashConfig
from .context_cache import DFlashContextCache

# Context tokens that enter a layer at once.
CONTEXT_AT_ONCE = 1024


def _block_mask(
    block: int,
    context: int,
    window: int | None,
    window_from_root: bool,
    is_causal: bool,
    context_mask: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """What a block may see: `(batch or 1, 1, block, context + block)` bool, or None if that is everything.

    Distances are counted in real tokens, so padding anywhere in the context does not count in a window.
    """
    if not is_causal and context_mask is None:
        if window is None or context + (0 if window_from_root else block) <= window:
            return None
    slots = torch.arange(block, device=device)
    if context_mask is None:
        before_root = torch.arange(context, 0, -1, device=device)[None]
    else:
        before_root = context_mask.flip(-1).cumsum(-1).flip(-1)
    distance = torch.cat((-before_root, slots.expand(len(before_root), -1)), dim=-1)[:, None]
    distance = slots[:, None] - distance  # (batch or 1, block, context + block): how far back a key lies
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if window is not None and window_from_root:
        visible[:, :, :context] &= before_root[:, None] <= window
    elif window is not None:
        visible &= distance.abs() < window
    if context_mask is not None:
        visible[:, :, :context] &= context_mask[:, None].bool()
    return visible[:, None]


def rotate(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `(batch, heads, length, head_dim)`; `cos` and `sin` are `(batch, 1, length, head_dim)`."""
    first, second = hidden.chunk(2, dim=-1)
    return hidden * cos + torch.cat((-second, first), dim=-1) * sin


class DFlashAttention(nn.Module):
    """Attention from the block to the context and to the block itself."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_grouped = config.num_attention_heads != config.num_key_value_heads
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.window = config.sliding_window if is_sliding else None
        self.window_from_root = config.window_from_root
        self.is_causal = is_sliding if config.is_causal is None else config.is_causal
        self.layer_type = config.layer_types[layer_idx]
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        block: Tensor,
        context: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cache: DFlashContextCache | None,
        context_mask: Tensor | None,
        attention_mask: Tensor | Mapping[str, Tensor] | None,
        masks: dict[tuple[Any, ...], Tensor | None],
    ) -> Tensor:
        """As `DFlashDraftModel.forward`; `masks` keeps what is made for one layer for those that are alike."""
        if isinstance(attention_mask, Mapping):
            attention_mask = attention_mask[self.layer_type]
        length = block.shape[1]
        source = block if context is None else torch.cat((context, block), dim=1)
        num_context = source.shape[1] - length
        cos, sin = rotary
        query = self.q_norm(self._split_heads(self.q_proj(block))).transpose(1, 2)
        query = rotate(query, cos[:, :, num_context:], sin[:, :, num_context:])
        key, value = self._keys_and_values(source, cos, sin)

        reach = self._reach() if context_mask is None else None
        if cache is not None:
            key, value = cache._append(self.layer_idx, torch.stack((key, value)), num_context, reach)
        if reach is not None and attention_mask is None:
            key, value = key[:, :, -(reach + length) :], value[:, :, -(reach + length) :]
        if attention_mask is None:
            kind = length, key.shape[2] - length, self.window, self.window_from_root, self.is_causal
            if kind not in masks:
                masks[kind] = _block_mask(*kind, context_mask, block.device)
            attention_mask = masks[kind]
        attended = F.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=self.scaling, enable_gqa=self.is_grouped
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def extend_context(
        self,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: DFlashContextCache,
        context_mask: Tensor | None,
        following: int,
    ) -> None:
        """Puts the keys and values of context tokens into the cache; `following` more positions are to come."""
        new = torch.stack(self._keys_and_values(context, *rotary))
        reach = self._reach() if context_mask is None else None
        if reach is not None:
            following = min(following, reach)
        cache._append(self.layer_idx, new, context.shape[1], reach, following)

    def _keys_and_values(self, source: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Each `(batch, heads, length, head_dim)`, of `source (batch, length, hidden_size)`."""
        key = self.k_norm(self._split_heads(self.k_proj(source))).transpose(1, 2)
        return rotate(key, cos, sin), self._split_heads(self.v_proj(source)).transpose(1, 2)

    def _reach(self) -> int | None:
        """How many of the last context tokens a block sees, at most; None if all."""
        return self.window if self.window is None or self.window_from_root else self.window - 1

    def _split_heads(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(-1, (-1, self.head_dim))


class DFlashLayer(nn.Module):
    """Attention and a gated MLP, each on normalised input and added to it."""

    attention_class: type[DFlashAttention] = DFlashAttention

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, *attention_args: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *attention_args)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(PreTrainedModel):
    """The DFlash drafter. It uses the target's embeddings, and its output head unless `draft_vocab_size` is set.

    Attributes:
        calibration: The measured corrections of its probabilities. Assign `Calibration.load(path)` to continue from a
            saved table.

    Raises:
        ValueError: If the config does not say which target layers to read.
    """

    config_class = DFlashConfig
    # Whether it knows how probable a token is after another one.
    is_conditional: bool = False
    layer_class: type[DFlashLayer] = DFlashLayer
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"
    _no_split_modules = ["DFlashLayer"]
    _supports_sdpa = True
    # What the speculators library writes of the target's.
    _keys_to_ignore_on_load_unexpected = [
        *(r"^embed_tokens\.", r"^lm_head\.", r"^verifier_", "^t2d$", "^d2t$"),
        r"rotary_emb\.inv_freq$",
    ]

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        if not config.target_layer_ids:
            raise ValueError(
                "`target_layer_ids` is not set, so the drafter does not know which of the target's layers to read. "
                "Set it, or `num_target_layers`, in the drafter's config."
            )
        self.calibration = Calibration()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # What to add to a token of the drafter's vocabulary to have that of the target's.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    @property
    def device(self) -> torch.device:
        """Where the drafter computes, which is not where its weights are if they are offloaded."""
        device = self.fc.weight.device
        return execution_device(self) if device.type == "meta" else device

    @property
    def dtype(self) -> torch.dtype:
        """That of its weights, without looking for the first of them."""
        dtype = self.fc.weight.dtype
        return dtype if dtype.is_floating_point else super().dtype

    @property
    def target_token_ids(self) -> Tensor | None:
        """`(draft_vocab_size,)` int64, the drafter's vocabulary in tokens of the target; None if it has them all."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def embed(self, token_ids: Tensor, target_embeddings: nn.Embedding) -> Tensor:
        """Embeddings of a block, as this drafter was trained to see them.

        Args:
            token_ids: `(batch, block)` int64.
            target_embeddings: The target's input embeddings. Their weights are used as they are, without a factor or a
                norm that the target may apply, and multiplied by `input_embedding_scale`.

        Returns:
            `(batch, block, hidden_size)`, on the device and in the dtype of the drafter.
        """
        embedded = embedding_rows(target_embeddings, token_ids).to(self.device, self.dtype)
        scale = self.config.input_embedding_scale
        return embedded if scale == 1 else embedded * scale

    def forward(
        self,
        inputs_embeds: Tensor,
        context_features: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DFlashContextCache | None = None,
        context_mask: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """One pass over a block.

        Args:
            inputs_embeds: `(batch, block, hidden_size)`, from `embed`.
            context_features: `(batch, new_context, len(target_layer_ids) * hidden_size)`, the outputs of the target's
                `target_layer_ids` for the tokens it has seen since the last call, which stand in front of the block.
            position_ids: `(batch or 1, new_context + block)` int64. By default they count on from the cache.
            cache: Holds the context of earlier calls, and takes up this call's.
            context_mask: `(batch, total_context)`, false where a row's context, cached or new, is padding. None if
                nothing is.
            attention_mask: `(batch or 1, 1, block, total_context + block)` bool, what each slot may see, in place of
                everything else that decides it; or one for each kind of layer in `config.layer_types`. For training,
                where many blocks share one pass.
            context: `(batch, new_context, hidden_size)`, what `project` has made of the features, in their place.

        Returns:
            `(batch, block, hidden_size)`; the slots from `config.first_slot` on predict the tokens that follow the
            root. See `compute_logits`.

        Raises:
            ValueError: If `position_ids` or `context_mask` do not cover what they must, or if there are both
                `context_features` and `context`.
        """
        if context_features is not None and context is not None:
            raise ValueError("Pass `context_features` or `context`, which is what `project` makes of them.")
        new = context_features if context is None else context
        num_context = 0 if new is None else new.shape[1]
        cached = 0 if cache is None else cache.get_seq_length()
        num_new = num_context + inputs_embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(cached, cached + num_new, device=inputs_embeds.device)[None]
        elif position_ids.shape[-1] != num_new:
            raise ValueError(
                f"`position_ids` has {position_ids.shape[-1]} positions, but the new context and the block have "
                f"{num_context} + {inputs_embeds.shape[1]}. Pass one position for each."
            )
        if context_mask is not None and context_mask.shape[-1] != cached + num_context:
            raise ValueError(
                f"`context_mask` has {context_mask.shape[-1]} columns, but the context has {cached} cached and "
                f"{num_context} new tokens. Pass one column for each."
            )
        unseen = num_context - self._reach() if context_mask is None and attention_mask is None else 0
        # Rows may be padded later on, and then all of them count.
        if unseen > 0 and len(inputs_embeds) == 1 and new is not None:
            new, position_ids = new[:, unseen:], position_ids[:, unseen:]
            if cache is not None:
                cache._skip(unseen)
        while cache is not None and new is not None and new.shape[1] > CONTEXT_AT_ONCE:
            part = new[:, :CONTEXT_AT_ONCE]
            part = self.project(part) if context is None else part
            rotary = self._rotary(part, position_ids[:, :CONTEXT_AT_ONCE])
            new, position_ids = new[:, CONTEXT_AT_ONCE:], position_ids[:, CONTEXT_AT_ONCE:]
            for layer in self.layers:
                attention: Any = layer.self_attn
                attention.extend_context(part, rotary, cache, context_mask, position_ids.shape[1])
        if new is not None and context is None:
            new = self.project(new)
        rotary = self._rotary(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        masks: dict[tuple[Any, ...], Tensor | None] = {}
        for layer in self.layers:
            hidden_states = layer(hidden_states, new, rotary, cache, context_mask, attention_mask, masks)
        return self.norm(hidden_states)

    def project(self, context_features: Tensor) -> Tensor:
        """What enters the layers of the target's features `(batch, tokens, len(target_layer_ids) * hidden_size)`.

        Returns:
            `(batch, tokens, hidden_size)`, on the device and in the dtype of the drafter.
        """
        return self.hidden_norm(self.fc(context_features.to(self.device, self.dtype)))

    def _rotary(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each `(batch or 1, 1, length, head_dim)`."""
        cos, sin = self.rotary_emb(hidden_states, position_ids)
        return cos[:, None], sin[:, None]

    def _reach(self) -> int:
        """How many of the last context tokens a block sees, at most."""
        config = self.config
        if config.sliding_window is None or set(config.layer_types) != {"sliding_attention"}:
            return sys.maxsize
        return config.sliding_window if config.window_from_root else config.sliding_window - 1

    def compute_logits(self, hidden_states: Tensor, lm_head: nn.Module) -> Tensor:
        """Logits of `(..., hidden_size)` by the output head, with this drafter's factor and bound.

        Args:
            hidden_states: From `forward`.
            lm_head: The target's output head. A drafter with a head of its own uses that.

        Returns:
            `(..., vocab_size)`, or `(..., draft_vocab_size)` in the order of `target_token_ids`; on the device and in
            the dtype of the head.
        """
        logits = head_logits(getattr(self, "lm_head", lm_head), hidden_states)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        if bound := self.config.final_logit_softcapping:
            logits = torch.tanh(logits / bound) * bound
        return logits


AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
