"""Drafters of the speculators library (0.9.0) with random weights, and a target for them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

HIDDEN, VOCAB, DRAFT_VOCAB, BLOCK, DEPTH = 32, 64, 24, 5, 6
AUX_LAYERS = [2, 6, 3]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
CLASSES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "Eagle3", "peagle": "PEagle"}


def import_speculators() -> ModuleType:
    """The library, with stand-ins for what it imports only to make training data. Skips the test without it."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("the parity tests need `pip install --no-deps speculators==0.9.0 loguru pydantic-settings`")
    names = ("datasets", "hs_connectors", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in missing})
    try:
        import speculators
    finally:
        for name in missing:
            del sys.modules[name]
    return speculators


def make_reference(
    speculators: ModuleType, layers: PretrainedConfig, kind: str = "dflash", **settings: Any
) -> nn.Module:
    """The library's drafter of a type with random weights, norms included."""
    layers = type(layers)(**layers.to_dict())
    layers._attn_implementation = "eager"
    block = {"block_size": BLOCK, "aux_hidden_state_layer_ids": AUX_LAYERS, "mask_token_id": 3}
    config = getattr(speculators, CLASSES[kind] + "SpeculatorConfig")(
        **{
            "transformer_layer_config": layers,
            "draft_vocab_size": DRAFT_VOCAB,
            **({"eagle_aux_hidden_state_layer_ids": AUX_LAYERS} if kind in ("eagle3", "peagle") else block),
            "speculators_config": speculators.SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
                default_proposal_method="greedy",
                verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **settings,
        }
    )
    torch.manual_seed(0)
    model = getattr(speculators, CLASSES[kind] + "DraftModel")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    if model.use_draft_vocab:
        kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        is_kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
        model.load_vocab_mappings(is_kept, kept - torch.arange(DRAFT_VOCAB))
    return model


def make_target(theirs: nn.Module) -> LlamaForCausalLM:
    """A target with the embeddings and, where it has a full vocabulary, the head that the library's drafter has."""
    sizes = SIZES | {"num_hidden_layers": DEPTH, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    target = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    target.get_input_embeddings().weight.data = theirs.embed_tokens.weight.data.clone()
    if not theirs.use_draft_vocab:
        target.get_output_embeddings().weight.data = theirs.lm_head.weight.data.clone()
    return target


@torch.no_grad()
def reference_block(theirs: nn.Module, features: Tensor, token_ids: Tensor, root: int) -> tuple[Tensor, Tensor]:
    """The hidden states and logits, `(block, ...)`, of a block whose root is the token at place `root`."""
    length = len(token_ids)
    hidden, logits, *_ = theirs._backbone_forward(
        hidden_states=features,
        input_ids=token_ids[None],
        loss_mask=(torch.arange(length) == root)[None].float(),
        verifier_last_hidden_states=torch.randn(1, length, HIDDEN),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    return hidden[0], logits[0]
