"""Checkpoints of drafters that were trained here, read by the packages that publish such drafters, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.speculators_reference import import_speculators, reference_block
from helpers.training_run import make_documents
from transformers import PreTrainedModel

from hf_ddtree import load_drafter
from hf_ddtree.drafters import DFlashDraftModel
from hf_ddtree.training import (
    DrafterTrainer,
    PackedDocuments,
    TrainingConfig,
    add_head,
    new_drafter,
    save_drafter,
    save_for_speculators,
)

BLOCK = 4
SIZES = {"dflash2": {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}, "dspark": {"markov_rank": 4}}
KINDS = ("dflash", "dflash2", "dspark", "dflash with dflash2's head")


def trained(target: PreTrainedModel, kind: str, **settings: Any) -> DFlashDraftModel:
    """A drafter that has been trained for a few steps, so that all its weights have moved."""
    name, _, head = kind.partition(" with ")
    torch.manual_seed(0)
    sizes = SIZES.get(name, {})
    drafter = new_drafter(target, VOCAB_SIZE - 1, name, layers=2, block_size=BLOCK, **sizes, **settings)
    if head:
        drafter = add_head(drafter, "dflash2", selector_rank=6, selector_top_k=5)
    config = TrainingConfig(steps=3, rows=2, anchors=8, learning_rate=3e-2)
    DrafterTrainer(target, drafter, PackedDocuments(make_documents(), 48), config).train()
    return drafter.eval()


@pytest.mark.parametrize("kind", [*KINDS[:2], KINDS[3], "jetspec"])
@torch.no_grad()
def test_the_dflash_package_reads_them_and_writes_them_back(kind, tmp_path):
    reference = pytest.importorskip("dflash.model", reason="needs `pip install --no-deps dflash==0.1.0`")
    with torch.enable_grad():
        drafter = trained(make_model("qwen3", "sdpa"), kind, window=9)
    save_drafter(drafter, tmp_path, torch.float32)
    is_second = "dflash2" in kind
    theirs = (
        (reference.DFlash2DraftModel if is_second else reference.DFlashDraftModel).from_pretrained(tmp_path).eval()
    )
    features, block = torch.randn(1, 20, drafter.fc.in_features), torch.randn(1, BLOCK, drafter.config.hidden_size)
    positions = torch.arange(20 + BLOCK)[None]
    expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=features)
    theirs.save_pretrained(tmp_path / "theirs")
    for one in (drafter, load_drafter(tmp_path / "theirs")):
        torch.testing.assert_close(one(block, features), expected, atol=1e-5, rtol=1e-5)
    if is_second:
        logits, roots = 2 * torch.randn(1, BLOCK - 1, VOCAB_SIZE), torch.tensor([5])
        hidden = expected[:, 1:]
        paths, _, _ = theirs.candidate_selector.select(hidden, logits, roots, temperature=0.0)
        best = logits.topk(5, dim=-1)
        scores, chosen = drafter.pair_scores(hidden, roots, best.indices), 0
        for depth in range(BLOCK - 1):
            chosen = int((best.values[0, depth] + scores[0, depth, chosen]).argmax())
            assert int(best.indices[0, depth, chosen]) == int(paths[0, depth])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_speculators_reads_them_and_writes_them_back(kind, window, tmp_path):
    speculators = import_speculators()
    target = make_model("qwen3", "sdpa")
    settings = {} if window is None else {"window": window, "window_from_root": True}
    with torch.enable_grad():
        drafter = trained(target, kind, **settings)
    save_for_speculators(drafter, target, tmp_path / "ours", torch.float32)
    name = type(drafter).__name__
    theirs = getattr(speculators, name).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    theirs.embed_tokens.weight.data = target.get_input_embeddings().weight.data.clone()
    theirs.lm_head.weight.data = target.get_output_embeddings().weight.data.clone()
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_drafter(tmp_path / "theirs", target_model=target)
    assert type(back) is type(drafter)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    features, token_ids = torch.randn(1, 40, drafter.fc.in_features), torch.randint(VOCAB_SIZE - 1, (40,))
    for root in (5, 20, 31):
        expected = reference_block(theirs, features, token_ids, root)[0]
        block = torch.full((1, BLOCK), VOCAB_SIZE - 1)
        block[0, 0] = token_ids[root]
        for one in (drafter, back):
            hidden = one(one.embed(block, target.get_input_embeddings()), features[:, :root])
            torch.testing.assert_close(hidden[0], expected, atol=1e-5, rtol=1e-5)


def test_what_speculators_cannot_say_is_refused(tmp_path):
    target = make_model("qwen3", "sdpa")
    for settings, message in (
        ({"kind": "jetspec"}, "causal blocks in all its layers"),
        ({"window": 9}, "reach back from each slot"),
        ({"input_embedding_scale": 2.0}, "`input_embedding_scale` 2.0, which"),
        ({"kind": "dspark", "owns_vocabulary": True}, "and a vocabulary of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            save_for_speculators(new_drafter(target, 63, layers=1, **settings), target, tmp_path)
    assert not list(tmp_path.iterdir())
