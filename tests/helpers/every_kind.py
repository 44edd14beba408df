"""A tiny drafter of every kind that reads features of its target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel

from helpers.families import make_config
from helpers.native_pair import make_native_drafter
from helpers.random_drafter import make_drafter
from hf_ddtree.drafters import DSparkConfig, DSparkDraftModel
from hf_ddtree.drafters.domino import DominoConfig, DominoDraftModel
from hf_ddtree.drafters.eagle3 import Eagle3Config, Eagle3DraftModel
from hf_ddtree.drafters.gemma4_dspark import Gemma4DSparkConfig, Gemma4DSparkDraftModel
from hf_ddtree.drafters.mtp.checkpoint import MTP_FAMILIES
from hf_ddtree.drafters.mtp.model import MTPDrafter
from hf_ddtree.drafters.peagle import PEagleConfig, PEagleDraftModel
from hf_ddtree.target.layers import decoder_layers


def sizes_for(target: PreTrainedModel) -> dict[str, Any]:
    """The configuration of one layer, which reads the target's first and last layer."""
    config = target.config.get_text_config()
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "target_layer_ids": [0, config.num_hidden_layers - 1],
        "initializer_range": 0.3,
    }


def make_mtp_layer(target: PreTrainedModel) -> PreTrainedModel:
    if target.config.model_type not in MTP_FAMILIES:
        return MtpModel(target, 1)
    config = copy.deepcopy(target.config)
    config.layer_types = ["full_attention"]
    layer = MtpLayer(config, type(decoder_layers(target)[0]), type(target.get_decoder().norm), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return MTPDrafter(config, torch.nn.ModuleList([layer]))


def make_assistant(target: PreTrainedModel) -> PreTrainedModel:
    """Of Gemma 4, as wide as the target."""
    own = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = transformers.Gemma4AssistantConfig(
        text_config=make_config("gemma4", **own).to_dict(), backbone_hidden_size=target.config.hidden_size
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


BLOCK: dict[str, Any] = {"block_size": 5, "mask_token_id": 1}
MAKERS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "DFlash": make_drafter,
    "JetSpec": partial(make_drafter, is_causal=True),
    "DFlash 2": partial(make_drafter, version=2),
    "DFlash of Transformers": lambda target: make_native_drafter(target_layer_ids=[0, 1]),
    "DSpark": lambda target: DSparkDraftModel(DSparkConfig(**sizes_for(target), **BLOCK, markov_rank=8)),
    "DSpark for Gemma 4": lambda target: Gemma4DSparkDraftModel(
        Gemma4DSparkConfig(**sizes_for(target), **BLOCK, markov_rank=8, attention_k_eq_v=True, owns_vocabulary=True)
    ),
    "Domino": lambda target: DominoDraftModel(DominoConfig(**sizes_for(target), **BLOCK, emb_dim=8, gru_hidden_dim=8)),
    "EAGLE-3": lambda target: Eagle3DraftModel(Eagle3Config(**sizes_for(target), draft_vocab_size=None)),
    "P-EAGLE": lambda target: PEagleDraftModel(PEagleConfig(**sizes_for(target), draft_length=5, mask_token_id=1)),
    "multi-token-prediction layers": make_mtp_layer,
    "assistant of Gemma 4": make_assistant,
}
# The families that these kinds draft for; the others draft for any.
ONLY_FOR = {
    "multi-token-prediction layers": ("deepseek_v3", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "assistant of Gemma 4": ("gemma4",),
}


def make(kind: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MAKERS[kind](target).eval().requires_grad_(False)
