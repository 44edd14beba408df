"""The DFlash generator with a random drafter: it is mostly wrong, and never changes a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.generator_grid import GRID, check_case
from helpers.random_drafter import make_drafter
from transformers import PreTrainedModel

from hf_ddtree import DDTreeConfig
from hf_ddtree.candidate_generators import DFlashTreeCandidateGenerator, DraftContext

KINDS = ("full_attention", "sliding_attention")
# As the speculators library trains them.
OWN_VOCABULARY = {"draft_vocab_size": 40, "window_from_root": True}


@pytest.mark.core
@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str]) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        return {"assistant_model": make_drafter(model, KINDS[GRID.index(case) % 2]), "tree_budget": 20}

    check_case(case, make_drafts)


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens_by_a_vocabulary_of_its_own(case: tuple[str, str]) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        settings = OWN_VOCABULARY | {"sample_from_anchor": GRID.index(case) % 3 == 0}
        return {"assistant_model": make_drafter(model, KINDS[GRID.index(case) % 2], **settings), "tree_budget": 20}

    check_case(case, make_drafts)


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@torch.no_grad()
def test_drafts_are_what_the_slots_predict_as_tokens_of_the_target(sample_from_anchor: bool) -> None:
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model, **OWN_VOCABULARY, sample_from_anchor=sample_from_anchor)
    generator = DFlashTreeCandidateGenerator(drafter, model, DDTreeConfig(tree_shape="chain", tree_budget=16))
    features, input_ids = torch.randn(1, 7, 2 * 32), torch.arange(1, 9)[None]
    (tree,) = generator.propose(DraftContext(input_ids, [7], generator.reduce_features(features), [7]), 16)
    block = torch.full((1, 6), drafter.config.mask_token_id)
    block[0, 0] = 8
    hidden = drafter(drafter.embed(block, model.get_input_embeddings()), features)
    best = drafter.lm_head(hidden)[0].argmax(-1)
    expected = (best + drafter.d2t[best]).tolist()
    assert tree.token_ids[1:].tolist() == expected[0 if sample_from_anchor else 1 :]
    assert expected != best.tolist()
