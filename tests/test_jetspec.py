"""JetSpec's drafters: DFlash layers in z-lab's layout, with `causal_head` in their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.generator_grid import GRID, check_case
from helpers.heads import backbone_shapes, random_tensors, write_checkpoint, zlab_config
from transformers import PreTrainedModel

from hf_ddtree import load_drafter


def write(folder: Path, target: PreTrainedModel, nested: dict[str, Any], **beside: Any) -> Path:
    config = zlab_config(target, "DFlashDraftModel", nested, **beside)
    return write_checkpoint(folder, config, random_tensors(backbone_shapes(config)))


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str], tmp_path: Path) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        drafter = load_drafter(write(tmp_path, model, {"causal_head": True}), target_model=model)
        return {"assistant_model": drafter, "tree_budget": 20}

    check_case(case, make_drafts)


@pytest.mark.parametrize("key", ["causal_head", "causal", "is_causal"])
@torch.no_grad()
def test_a_slot_sees_no_later_slot(key: str, tmp_path: Path) -> None:
    """The first slots of a block are those of a shorter block, if and only if the block is causal."""
    target = make_model("llama", "sdpa")
    features, block = torch.randn(1, 9, 64), torch.randn(1, 6, 32)
    for is_causal in (True, False):
        drafter = load_drafter(write(tmp_path / str(is_causal), target, {key: is_causal}), target_model=target)
        differs = (drafter(block, features)[:, :4] - drafter(block[:, :4], features)).abs().max() > 1e-3
        assert differs != is_causal


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    with pytest.raises(ValueError, match="'is_causal': False, 'causal_head': True"):
        load_drafter(write(tmp_path, target, {"causal_head": True, "is_causal": False}))
