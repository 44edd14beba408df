"""A DFlash drafter with random weights for a tiny target: seldom right, but with a context that must be kept right."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ddtree.drafters import DFlash2Config, DFlash2DraftModel, DFlashConfig, DFlashDraftModel


def make_drafter(
    target: PreTrainedModel, kind: str = "full_attention", block_size: int = 6, version: int = 1, **settings: Any
) -> DFlashDraftModel:
    """Two layers of one kind that read the first and the last layer of the target; its own vocabulary is at random."""
    config = target.config.get_text_config()
    settings = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": [kind] * 2,
        "sliding_window": 12,
        "use_sliding_window": True,
        "block_size": block_size,
        "target_layer_ids": [0, config.num_hidden_layers - 1],
        "num_target_layers": config.num_hidden_layers,
        "mask_token_id": config.vocab_size - 1,
        "initializer_range": 0.3,
        **settings,
    }
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if version == 1:
            drafter = DFlashDraftModel(DFlashConfig(**settings))
        else:
            selector = {"conv_group_size": 8, "selector_rank": 12, "selector_top_k": 5}
            drafter = DFlash2DraftModel(DFlash2Config(**settings, **selector))
            # A new one does what the first version does.
            for name, parameter in drafter.named_parameters():
                if "conv" in name or "selector" in name:
                    torch.nn.init.normal_(parameter, std=0.5)
        if drafter.config.draft_vocab_size is not None:
            kept = torch.randperm(config.vocab_size)[: drafter.config.draft_vocab_size]
            drafter.d2t = kept - torch.arange(len(kept))
    return drafter.eval().requires_grad_(False)
