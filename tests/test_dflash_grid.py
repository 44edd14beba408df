"""The DFlash generator with a random drafter: it is mostly wrong, and never changes a token."""

from __future__ import annotations

from typing import Any

import pytest
from generator_grid import GRID, check_case
from random_drafter import make_drafter
from transformers import PreTrainedModel

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
