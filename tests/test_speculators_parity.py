"""Checkpoints that the speculators library (0.9.0) writes: loaded here, they give the logits that it gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.speculators_reference import (
    AUX_LAYERS,
    BLOCK,
    DEPTH,
    DRAFT_VOCAB,
    HIDDEN,
    SIZES,
    VOCAB,
    import_speculators,
    make_reference,
    make_target,
    reference_block,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from hf_ddtree import load_drafter
from hf_ddtree.drafters import DFlash2DraftModel, DFlashContextCache, DFlashDraftModel

WINDOW = 7
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
    return import_speculators()


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
        expected = reference_block(theirs, features, token_ids, root)[1]
        got = our_logits(ours, target, cache, features[:, seen:root], token_ids[root])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        seen = root


def test_padded_rows_under_a_window(reference: ModuleType, tmp_path: Path) -> None:
    """A window counts real tokens, whatever padding lies between."""
    theirs = make_reference(reference, LAYERS["sliding alone"])
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    features, token_ids = torch.randn(1, 30, len(AUX_LAYERS) * HIDDEN), torch.randint(1, VOCAB, (30,))
    root, padding = 20, 4
    expected = reference_block(theirs, features, token_ids, root)[1]
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
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("layers", ["full", "sliding"])
@pytest.mark.parametrize("from_anchor", [False, True])
@torch.no_grad()
def test_dflash2(reference: ModuleType, tmp_path: Path, from_anchor: bool, layers: str) -> None:
    """Hidden states, logits and the selector's scores over several rounds, and decoding."""
    sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    theirs = make_reference(
        reference, LAYERS[layers], "dflash2", draft_vocab_size=VOCAB, sample_from_anchor=from_anchor, **sizes
    )
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    assert type(ours) is DFlash2DraftModel
    features, token_ids = torch.randn(1, 60, len(AUX_LAYERS) * HIDDEN), torch.randint(1, VOCAB, (60,))
    cache, seen = DFlashContextCache(), 0
    for root in (3, 4, 9, 30, 31, 40):
        expected_hidden, expected_logits = reference_block(theirs, features, token_ids, root)
        block = torch.full((1, BLOCK), 3)
        block[0, 0] = token_ids[root]
        hidden = ours(ours.embed(block, target.get_input_embeddings()), features[:, seen:root], cache=cache)
        torch.testing.assert_close(hidden[0], expected_hidden, rtol=1e-5, atol=1e-5)
        logits = ours.compute_logits(hidden, target.get_output_embeddings())
        torch.testing.assert_close(logits[0], expected_logits, rtol=1e-5, atol=1e-5)
        slots = hidden[:, ours.config.first_slot :]
        candidates = logits[:, ours.config.first_slot :].topk(4).indices
        scores = ours.pair_scores(slots, token_ids[root : root + 1], candidates)
        selector = theirs.candidate_selector
        for depth in range(slots.shape[1]):
            before = candidates[0, depth - 1] if depth else token_ids[root : root + 1].expand(4)
            expected = selector.transition_scores(
                slots[0, depth].expand(4, -1), before, candidates[0, depth].expand(4, -1)
            )
            torch.testing.assert_close(scores[0, depth], expected, rtol=1e-5, atol=1e-5)
        seen = root
    prompt = torch.arange(1, 9)[None]
    plain = target.generate(prompt, max_new_tokens=16, do_sample=False)
    drafts = {"assistant_model": ours, "generation_strategy": "ddtree", "tree_budget": 9}
    assert target.generate(prompt, max_new_tokens=16, do_sample=False, **drafts).tolist() == plain.tolist()


def test_dflash2_of_a_reduced_vocabulary(reference: ModuleType, tmp_path: Path) -> None:
    make_reference(reference, LAYERS["full"], "dflash2", draft_vocab_size=VOCAB).save_pretrained(tmp_path)
    change_config(tmp_path, draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(ValueError, match="`draft_vocab_size` is 24, but the selector compares"):
        load_drafter(tmp_path)


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


@pytest.mark.parametrize("kind", ["mtp", "xpress", "new one"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": kind, "architectures": ["Any"]}))
    with pytest.raises(ValueError, match=f"`speculators_model_type` '{kind}', which is not supported: it.*Use one of"):
        load_drafter(tmp_path)
