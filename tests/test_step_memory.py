"""What a step of training needs in memory is known before it runs."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from helpers.families import VOCAB_SIZE, make_model

from hf_ddtree.interop.allocations import PeakMemory
from hf_ddtree.training import Document, DrafterTrainer, PackedDocuments, TrainingConfig, add_head, new_drafter
from hf_ddtree.training.step_memory import step_memory
from hf_ddtree.training.target_features import TargetFeatures

LENGTH = 600
SIZES = {"dflash2": {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 8}, "dspark": {"markov_rank": 16}}
CASES = {
    "dflash": {},
    "dflash2": {},
    "dspark": {},
    "jetspec": {"rows": 1, "anchors": 60},
    "dflash, in chunks": {"logits_at_once": 2**14},
    "dflash, the target's distribution": {"distribution_share": 0.5},
    "dflash, accumulated": {"accumulation": 2},
    "dflash, a head alone": {},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_was_told(case):
    """Within 15% of what the operations of the second step allocate."""
    kind, _, what = case.partition(", ")
    target = make_model("qwen3", "sdpa")
    drafter = new_drafter(target, VOCAB_SIZE - 1, kind, layers=2, block_size=4, **SIZES.get(kind, {}))
    if what == "a head alone":
        drafter = add_head(drafter, selector_rank=16)
    config = TrainingConfig(**{"rows": 2, "anchors": 40, "steps": 3, **CASES[case]})
    told = step_memory(drafter, target, config, LENGTH)
    generator = torch.Generator().manual_seed(0)
    documents = [Document(torch.randint(60, (LENGTH,), generator=generator).tolist()) for _ in range(4)]
    rows = PackedDocuments(documents, LENGTH)
    trainer = DrafterTrainer(target, drafter, rows, config, accelerator=Accelerator(cpu=True))
    features = TargetFeatures(target, drafter.config.target_layer_ids)
    trainer._take_step(features)
    trainer.step += 1
    with PeakMemory() as memory:
        trainer._take_step(features)
    features.close()
    assert told.on_its_way == pytest.approx(memory.peak, rel=0.15)
    assert told.drafter == sum(one.nbytes for one in drafter.state_dict().values()) + buffers_of(drafter)
    assert told.target == sum(one.nbytes for one in target.parameters()) + buffers_of(target)
    states = [one for optimizer in trainer._optimizers for entry in optimizer.state.values() for one in entry.values()]
    assert told.optimizers == pytest.approx(sum(one.nbytes for one in states if torch.is_tensor(one)), rel=0.01)
    assert told.total == told.target + told.drafter + told.optimizers + told.on_its_way


def buffers_of(model):
    """Those that are not saved, which share what is the same."""
    return sum({one.data_ptr(): one.nbytes for one in model.buffers()}.values())
