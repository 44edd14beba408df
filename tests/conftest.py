"""What all tests share."""

from __future__ import annotations

from typing import Any

import pytest

from hf_ddtree import strategy

DEFAULT_BUDGET = 16


@pytest.fixture(autouse=True)
def fixed_budget_by_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes with 16 nodes where `"auto"` would go by the time of each forward, so that no test depends on it.

    Tests of the budget itself carry the mark `auto_budget`.
    """
    if request.node.get_closest_marker("auto_budget") is not None:
        return
    policy_for = strategy.policy_for

    def fixed(tree_budget: Any, *args: Any) -> Any:
        return policy_for(DEFAULT_BUDGET if tree_budget == "auto" else tree_budget, *args)

    monkeypatch.setattr(strategy, "policy_for", fixed)
