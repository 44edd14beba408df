"""The DFlash generator with a random drafter: it is mostly wrong, and never changes a token."""

from __future__ import annotations

from typing import Any

import pytest
from generator_grid import GRID, check_case
from random_drafter import make_drafter
from transformers import PreTrainedModel

KINDS = ("full_attention", "sliding_attention")


@pytest.mark.core
@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str]) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        return {"assistant_model": make_drafter(model, KINDS[GRID.index(case) % 2]), "tree_budget": 20}

    check_case(case, make_drafts)
