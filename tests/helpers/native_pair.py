"""A tiny Muse Glimmer and a DFlash drafter of Transformers' own class for it, with random weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

HIDDEN, DEPTH, TARGET_WINDOW = 32, 4, 8


@cache
def make_native_target(vocab_size: int = 64, attention: str = "sdpa") -> PreTrainedModel:
    """Sliding and full attention, and a norm on the embeddings that drafters must not see."""
    text = transformers.MuseGlimmerTextConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=TARGET_WINDOW,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        output_multiplier=0.7,
        initializer_range=0.3,
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = transformers.MuseGlimmerConfig(text_config=text.to_dict(), vision_config=vision)
        model = transformers.MuseGlimmerForConditionalGeneration._from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def make_native_drafter(seed: int = 5, **settings: Any) -> PreTrainedModel:
    """Two layers, one of them with a sliding window."""
    config = transformers.MuseGlimmerAssistantConfig(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "block_size": 6,
            "mask_token_id": 1,
            "target_layer_ids": [0, 2, 1],
            **settings,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = transformers.MuseGlimmerAssistantModel(config)
        for parameter in drafter.parameters():
            parameter.data.normal_(std=0.3)
    return drafter.eval().requires_grad_(False)
