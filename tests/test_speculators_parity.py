"""Checkpoints that the speculators library (0.9.0) writes: loaded here, they give the logits that it gives."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

from hf_ddtree import load_drafter
from hf_ddtree.drafters import DFlashContextCache, DFlashDraftModel

HIDDEN, VOCAB, DRAFT_VOCAB, BLOCK, WINDOW, DEPTH = 32, 64, 24, 5, 7, 6
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
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LAYERS = {
    "full": Qwen3Config(**SIZES, rope_theta=5000.0),
    "sliding": Qwen3Config(**SIZES, **SLIDING, use_sliding_window=True),
    "sliding alone": Qwen3Config(
        **SIZES, layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, use_sliding_window=True
    ),
    "window switched off": Qwen3Config(**SIZES, **SLIDING),
    "of a Llama": LlamaConfig(**SIZES | {"rms_norm_eps": 1e-6}, rope_theta=100.0),
}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The library, with stand-ins for what it imports only to make training data."""
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


def make_reference(speculators: ModuleType, layers: PretrainedConfig, **settings: Any) -> nn.Module:
    """The library's drafter with random weights, norms included."""
    layers = type(layers)(**layers.to_dict())
    layers._attn_implementation = "eager"
    config = speculators.DFlashSpeculatorConfig(
        **{
            "transformer_layer_config": layers,
            "draft_vocab_size": DRAFT_VOCAB,
            "block_size": BLOCK,
            "aux_hidden_state_layer_ids": AUX_LAYERS,
            "mask_token_id": 3,
            "speculators_config": speculators.SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
                default_proposal_method="greedy",
                verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **settings,
        }
    )
    torch.manual_seed(0)
    model = speculators.DFlashDraftModel(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    if model.use_draft_vocab:
        kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        is_kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
        model.load_vocab_mappings(is_kept, kept - torch.arange(DRAFT_VOCAB))
    return model


def make_target(theirs: nn.Module) -> LlamaForCausalLM:
    """A target with the embeddings and, where it has a full vocabulary, the head that the library's drafter has."""
    target = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": DEPTH})).eval()
    target.get_input_embeddings().weight.data = theirs.embed_tokens.weight.data.clone()
    if not theirs.use_draft_vocab:
        target.get_output_embeddings().weight.data = theirs.lm_head.weight.data.clone()
    return target


@torch.no_grad()
def reference_logits(theirs: nn.Module, features: Tensor, token_ids: Tensor, root: int) -> Tensor:
    """`(block, draft vocabulary)`: the logits of a block whose root is the token at place `root`."""
    length = len(token_ids)
    _, logits, *_ = theirs._backbone_forward(
        hidden_states=features,
        input_ids=token_ids[None],
        loss_mask=(torch.arange(length) == root)[None].float(),
        verifier_last_hidden_states=torch.randn(1, length, HIDDEN),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    return logits[0]


@torch.no_grad()
def our_logits(drafter: DFlashDraftModel, target: LlamaForCausalLM, cache: Any, new: Tensor, root: Tensor) -> Tensor:
    block = torch.full((1, BLOCK), drafter.config.mask_token_id)
    block[0, 0] = root
    hidden = drafter(drafter.embed(block, target.get_input_embeddings()), new, cache=cache)
    return drafter.compute_logits(hidden, target.get_output_embeddings())[0]


@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize("vocabulary", [DRAFT_VOCAB, VOCAB])
@pytest.mark.parametrize("layers", LAYERS)
def test_logits_over_rounds(
    reference: ModuleType, tmp_path: Path, layers: str, vocabulary: int, non_causal: bool
) -> None:
    theirs = make_reference(
        reference, LAYERS[layers], draft_vocab_size=vocabulary, sliding_window_non_causal=non_causal
    )
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    assert ours.config.target_layer_ids == [1, 5, 2]
    length = 60
    features, token_ids = torch.randn(1, length, len(AUX_LAYERS) * HIDDEN), torch.randint(1, VOCAB, (length,))
    cache, seen = DFlashContextCache(), 0
    for root in (3, 4, 9, 10, 30, 31, 40):
        expected = reference_logits(theirs, features, token_ids, root)
        got = our_logits(ours, target, cache, features[:, seen:root], token_ids[root])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        seen = root


def test_padded_rows_under_a_window(reference: ModuleType, tmp_path: Path) -> None:
    """A window counts real tokens, whatever padding lies between."""
    theirs = make_reference(reference, LAYERS["sliding alone"])
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    features, token_ids = torch.randn(1, 30, len(AUX_LAYERS) * HIDDEN), torch.randint(1, VOCAB, (30,))
    root, padding = 20, 4
    expected = reference_logits(theirs, features, token_ids, root)
    padded = torch.cat((features[:, :17], torch.randn(1, padding, features.shape[2]), features[:, 17:root]), dim=1)
    mask = torch.ones(1, root + padding, dtype=torch.bool)
    mask[:, 17 : 17 + padding] = False
    positions = torch.cat((torch.arange(17), torch.zeros(padding), torch.arange(17, root + BLOCK)))[None].long()
    block = torch.full((1, BLOCK), 3)
    block[0, 0] = token_ids[root]
    with torch.no_grad():
        embedded = ours.embed(block, target.get_input_embeddings())
        hidden = ours(embedded, padded, positions, context_mask=mask)
        got = ours.compute_logits(hidden, target.get_output_embeddings())[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_vocabulary_and_slots(reference: ModuleType, tmp_path: Path) -> None:
    theirs = make_reference(reference, LAYERS["full"], sample_from_anchor=True)
    theirs.save_pretrained(tmp_path)
    ours = load_drafter(tmp_path)
    assert (ours.config.first_slot, ours.config.draft_length) == (0, BLOCK)
    assert ours.target_token_ids.tolist() == theirs.t2d.nonzero().flatten().tolist()
    # As the package saves it.
    ours.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again")
    assert again.config.to_diff_dict() == ours.config.to_diff_dict()
    assert torch.equal(again.target_token_ids, ours.target_token_ids)
    assert torch.equal(again.lm_head.weight, theirs.lm_head.weight)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_hidden_state_layer_ids": [0, 2]}, r"`aux_hidden_state_layer_ids` \[0, 2\]"),
        ({"aux_hidden_state_layer_ids": None}, "has no `aux_hidden_state_layer_ids`"),
        ({"aux_hidden_state_layer_ids": [1, 2, DEPTH + 1]}, rf"`target_layer_ids` hold \[{DEPTH}\]"),
        ({"mask_token_id": None}, "has no `mask_token_id`"),
        ({"transformer_layer_config": {"model_type": "no such model"}}, "'no such model'"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, "without 'attention_bias', .*'rope_parameters'"),
        ({"transformer_layer_config": {**SIZES, "vocab_size": 65}}, "`vocab_size` 65, but the target.* 64"),
        ({"transformer_layer_config": {**SIZES, "qk_clip": 2}}, "has 'qk_clip' in its `transformer_layer_config`"),
        ({"markov_rank": 8, "use_gate": False}, "has 'markov_rank', 'use_gate' in its config.json"),
        ({"target_hidden_size": 64}, "`hidden_size` 32, but `target_hidden_size` 64"),
    ],
)
def test_checkpoints_that_do_not_fit(
    reference: ModuleType, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    theirs = make_reference(reference, LAYERS["full"])
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=make_target(theirs))


def test_maps_that_lead_astray(reference: ModuleType, tmp_path: Path) -> None:
    make_reference(reference, LAYERS["full"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for d2t in (
        torch.full((DRAFT_VOCAB,), VOCAB),
        torch.arange(DRAFT_VOCAB).neg(),
        torch.arange(DRAFT_VOCAB).neg() - 1,
    ):
        save_file({**weights, "d2t": d2t}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="has a map `d2t` from its 24 tokens"):
            load_drafter(tmp_path)
    del weights["d2t"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the drafter's weights, e.g. 'd2t'"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "eagle3", "mtp", "peagle", "xpress", "new one"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": kind, "architectures": ["Any"]}))
    with pytest.raises(ValueError, match=f"`speculators_model_type` '{kind}', which is not supported: it.*Use one of"):
        load_drafter(tmp_path)
