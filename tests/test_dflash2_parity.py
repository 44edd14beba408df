"""The DFlash 2 drafter against the `dflash` package (0.1.0): hidden states over many rounds, and the selected path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_dflash_parity import (
    BLOCK,
    COMMITTED,
    HIDDEN,
    LAYER_TYPES,
    TOLERANCE,
    VOCAB,
    checkpoint_config,
    reference,
    rounds,
)
from torch import nn
from transformers import Qwen3Config

from hf_ddtree.drafters import DFlash2DraftModel, DFlashContextCache
from hf_ddtree.drafters.checkpoint import Checkpoint
from hf_ddtree.drafters.dflash2.checkpoint import read_dflash2_config
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import best_tokens, conditional_candidates

SETTINGS = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 7}


def make_pair(**settings: Any) -> tuple[nn.Module, DFlash2DraftModel]:
    """The reference's drafter and ours with the same random weights."""
    config = checkpoint_config("new", architectures=["DFlash2DraftModel"])
    config["dflash_config"] |= SETTINGS
    config |= settings
    torch.manual_seed(0)
    theirs = reference.DFlash2DraftModel(Qwen3Config(**config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = DFlash2DraftModel(read_dflash2_config(Checkpoint("test", raw_config=config))).eval()
    # Published checkpoints name the codebooks as we do; the reference renames them as it loads.
    ours.load_state_dict({name.replace("codebook.weight", "codebook"): w for name, w in theirs.state_dict().items()})
    return theirs, ours


@pytest.mark.parametrize("layer_types", LAYER_TYPES)
@torch.no_grad()
def test_hidden_states_over_rounds(layer_types: str) -> None:
    theirs, ours = make_pair(layer_types=LAYER_TYPES[layer_types])
    cache = DFlashContextCache()
    for count, root, features, block, expected in rounds(theirs, COMMITTED):
        hidden = ours(block, features, torch.arange(root - count, root + BLOCK)[None], cache)
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("taps", "group"), [(1, 32), (2, 4), (5, 1)])
@torch.no_grad()
def test_kernels_of_any_size(taps: int, group: int) -> None:
    """From none but the slot itself to all slots before it but one."""
    theirs, ours = make_pair(
        dflash_config={
            **SETTINGS,
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "mask_token_id": 3,
            "target_layer_ids": [1, 4, 2],
            "block_size": BLOCK,
        }
    )
    for *_, features, block, expected in rounds(theirs, [7]):
        torch.testing.assert_close(ours(block, features), expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_selected_paths() -> None:
    """The chain of a conditional tree is the path that the reference selects, and seldom the best tokens alone."""
    theirs, ours = make_pair()
    differs = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(2, BLOCK - 1, HIDDEN, generator=generator)
        logits = 2 * torch.randn(2, BLOCK - 1, VOCAB, generator=generator)
        roots = torch.randint(VOCAB, (2,), generator=generator)
        paths, _, _ = theirs.candidate_selector.select(hidden, logits, roots, temperature=0.0)
        log_probs, token_ids = best_tokens(logits, ours.config.selector_top_k)
        candidates = conditional_candidates(log_probs, token_ids, ours.pair_scores(hidden, roots, token_ids))
        for row, (row_log_probs, row_token_ids, next_state) in enumerate(zip(*candidates)):
            chain = build_tree(row_log_probs, row_token_ids, int(roots[row]), 9, "chain", next_state=next_state)
            assert chain.token_ids[1:].tolist() == paths[row].tolist()
            differs += chain.token_ids[1:].tolist() != logits[row].argmax(-1).tolist()
    assert differs > 40
