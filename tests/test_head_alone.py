"""A head that is trained on top of a frozen DFlash drafter."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from helpers.families import VOCAB_SIZE, make_model
from helpers.random_drafter import make_drafter
from helpers.training_run import make_documents, make_trainer

from hf_ddtree import load_drafter
from hf_ddtree.drafters.zlab.writing import save_drafter
from hf_ddtree.training import DrafterTrainer, Evaluator, PackedDocuments, TrainingConfig, add_head, new_drafter

HEADS = {"dflash2": "candidate_selector", "dspark": "markov_head"}
SIZES = {"dflash2": {"selector_rank": 8, "selector_top_k": 48}, "dspark": {"markov_rank": 8}}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a DFlash drafter that has learnt a little, as published ones are: in bfloat16."""
    trainer = make_trainer(None, "dflash", steps=10, learning_rate=1e-2)
    trainer.train()
    folder = tmp_path_factory.mktemp("published")
    save_drafter(trainer.drafter, folder)
    return folder


@pytest.mark.core
@pytest.mark.parametrize("head", HEADS)
def test_the_head_learns_and_the_backbone_stays(head, published, tmp_path):
    target = make_model("qwen3_5", "sdpa")
    drafter = add_head(load_drafter(published, target_model=target, dtype=torch.float32), head, **SIZES[head])
    rows, held_out = PackedDocuments(make_documents(), 48), make_documents(seed=1)
    evaluator = Evaluator(target, held_out, budgets=(4,), length=48)
    config = TrainingConfig(steps=40, rows=2, anchors=8, learning_rate=2e-2)
    trainer = DrafterTrainer(target, drafter, rows, config, evaluator=evaluator, accelerator=Accelerator(cpu=True))
    before = trainer.evaluate()
    after = trainer.train()
    assert after.negative_log_likelihood < 0.9 * before.negative_log_likelihood
    assert after.tokens_per_forward["tree:4"] > before.tokens_per_forward["tree:4"]

    save_drafter(drafter, tmp_path)
    whole = load_drafter(tmp_path, target_model=target)
    assert type(whole) is type(drafter)
    plain = load_drafter(published, target_model=target)
    now = whole.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, now[name]), name
    embedded, features = torch.randn(1, 4, 32), torch.randn(1, 9, plain.fc.in_features)
    assert torch.equal(whole(embedded, features), plain(embedded, features))
    assert any(name.startswith(HEADS[head]) for name in now)

    prompt = torch.tensor([held_out[0].token_ids[:5].tolist()])
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafts = {"assistant_model": whole, "generation_strategy": "ddtree", "tree_budget": 6}
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, **drafts), expected)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
@pytest.mark.parametrize("head", HEADS)
def test_untrained_it_drafts_what_the_drafter_drafts(head, kind):
    target = make_model("qwen3_5", "sdpa")
    drafter = new_drafter(target, VOCAB_SIZE - 1, kind, layers=2, block_size=4)
    headed = add_head(drafter, head)
    evaluations = [Evaluator(target, make_documents(), (4,))(one) for one in (drafter, headed)]
    assert evaluations[0].tokens_per_forward["chain"] == evaluations[1].tokens_per_forward["chain"]
    assert evaluations[0].negative_log_likelihood == pytest.approx(evaluations[1].negative_log_likelihood)
    trained = {name.split(".")[0] for name, parameter in headed.named_parameters() if parameter.requires_grad}
    assert trained == {HEADS[head]}


def test_a_head_that_is_there_is_trained_on():
    target = make_model("qwen3_5", "sdpa")
    drafter = make_drafter(target, version=2)
    assert add_head(drafter) is drafter
    assert not drafter.fc.weight.requires_grad and drafter.candidate_selector.successor_codebook.requires_grad


def test_refusals():
    drafter = make_drafter(make_model("qwen3_5", "sdpa"), version=2)
    with pytest.raises(ValueError, match="`head` must be one of 'dflash2', 'dspark', but is 'medusa'"):
        add_head(drafter, "medusa")
    with pytest.raises(ValueError, match=r"so \['selector_rank'\] cannot be set"):
        add_head(drafter, selector_rank=4)
    with pytest.raises(ValueError, match="goes on a DFlash drafter, but this is a `DFlash2DraftModel`"):
        add_head(drafter, "dspark")
    drafter = make_drafter(make_model("qwen3_5", "sdpa"))
    with pytest.raises(ValueError, match="has no setting `selector_rank`. It has markov_rank"):
        add_head(drafter, "dspark", selector_rank=4)
    for rank in (0, 2.5):
        with pytest.raises(ValueError, match="`markov_rank` must be an integer of at least 1"):
            add_head(drafter, "dspark", markov_rank=rank)
