"""Models with random weights that can be decoded: no two tokens are tied."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HEAD_DIM = 64


def scale(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model weights that keep activations at unit scale, so that no two tokens are tied."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.3 if "embed_tokens" in name else 1.3 / math.sqrt(weight.shape[-1]))
    return model.eval().requires_grad_(False)


def make_qwen3(hidden_size: int, num_layers: int) -> PreTrainedModel:
    """A Qwen3 of 16,000 tokens, with a head of attention for 64 channels and one of keys for three of these."""
    num_heads = hidden_size // HEAD_DIM
    config = Qwen3Config(
        vocab_size=16_000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 3),
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        **NO_TOKENS,
    )
    torch.manual_seed(0)
    return scale(Qwen3ForCausalLM(config))


def random_prompts(vocab_size: int, count: int, length: int) -> list[dict[str, Tensor]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab_size, (count, 1, length), generator=generator)
    return [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in ids]
