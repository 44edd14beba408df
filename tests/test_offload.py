"""Targets and drafters whose weights accelerate keeps elsewhere, on the disk or in memory, between forwards."""

import copy

import accelerate
import pytest
import torch
from helpers.families import make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_oracle, make_prompt
from transformers import AutoModelForCausalLM

import hf_ddtree
from hf_ddtree.target.weights import embedding_rows, execution_device

FAMILIES = ["llama", "gemma3", "qwen3_5"]
OPTIONS = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
BY_TREE = {"generation_strategy": "ddtree", "tree_budget": 16, "calibrate": False}


def device_map(*on_disk):
    """Everything on the CPU, except what is on the disk."""
    parts = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    return {part: "disk" if part.removeprefix("model.") in on_disk else "cpu" for part in parts}


def offload(model, how, folder):
    model = copy.deepcopy(model)
    if how == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if how == "disk":
        accelerate.disk_offload(model, str(folder), execution_device="cpu")
        return model
    on_disk = ["layers.1", "lm_head"] if how == "layers" else ["embed_tokens", "layers.0", "lm_head"]
    return accelerate.dispatch_model(model, device_map(*on_disk), offload_dir=str(folder), main_device="cpu")


@pytest.mark.core
@pytest.mark.parametrize("how", ["cpu", "disk", "layers", "ends"])
@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_targets(family, how, tmp_path):
    """The same tokens as with the whole model; a drafter that uses its embeddings and head drafts the same trees."""
    whole, prompts = make_model(family, "sdpa"), make_prompt().repeat(2, 1)
    prompts[1, :4] = 5
    plain = whole.generate(prompts, **OPTIONS)
    target, drafter = offload(whole, how, tmp_path), make_drafter(whole)
    assert any(parameter.is_meta for parameter in target.parameters())
    oracle = hf_ddtree.testing.OracleTreeCandidateGenerator(plain.sequences, 64)
    by_tree = target.generate(prompts, **OPTIONS, **BY_TREE, candidate_generator=oracle)
    assert by_tree.sequences.tolist() == plain.sequences.tolist()
    assert by_tree.ddtree_stats.tokens_per_forward > 1.4

    drafted = [
        model.generate(prompts[:1], **OPTIONS, **BY_TREE, assistant_model=drafter, return_trees=True)
        for model in (whole, target)
    ]
    assert drafted[1].sequences.tolist() == plain.sequences[:1].tolist()
    trees, expected = ([tree.token_ids.tolist() for (tree,) in output.ddtree_stats.trees] for output in drafted)
    assert trees == expected


def test_an_offloaded_drafter(tmp_path):
    target = make_model("qwen3_5", "sdpa")
    plain = target.generate(make_prompt(), **OPTIONS)
    drafter = make_drafter(target)
    expected = target.generate(make_prompt(), **OPTIONS, **BY_TREE, assistant_model=drafter)
    accelerate.cpu_offload(drafter, execution_device="cpu")
    assert drafter.fc.weight.is_meta and drafter.device.type == "cpu"
    got = target.generate(make_prompt(), **OPTIONS, **BY_TREE, assistant_model=drafter)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert got.ddtree_stats.tree_sizes == expected.ddtree_stats.tree_sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_with_a_device_map(family, tmp_path):
    whole = make_model(family, "sdpa")
    whole.save_pretrained(tmp_path / "target")
    make_drafter(whole).save_pretrained(tmp_path / "drafter")
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        device_map=device_map("layers.0", "lm_head"),
        offload_folder=str(tmp_path / "offloaded"),
    ).eval()
    assert target.lm_head.weight.is_meta
    drafter = hf_ddtree.load_drafter(tmp_path / "drafter", target_model=target)
    assert drafter.device.type == "cpu"
    plain = whole.generate(make_prompt(), **OPTIONS)
    for drafting in ({"assistant_model": drafter}, {"candidate_generator": make_oracle(plain.sequences)}):
        by_tree = target.generate(make_prompt(), **OPTIONS, **drafting, **BY_TREE)
        assert by_tree.sequences.tolist() == plain.sequences.tolist()


def test_rows_of_embeddings_without_what_their_forward_adds(tmp_path):
    """The factor of Gemma's embeddings is not the drafter's, whether the weights are there or not."""
    whole = make_model("gemma3", "sdpa")
    token_ids = torch.arange(6).view(2, 3)
    expected = whole.get_input_embeddings().weight[token_ids]
    assert not torch.equal(whole.get_input_embeddings()(token_ids), expected)
    offloaded = offload(whole, "ends", tmp_path).get_input_embeddings()
    for embeddings in (whole.get_input_embeddings(), offloaded):
        torch.testing.assert_close(embedding_rows(embeddings, token_ids), expected, rtol=0, atol=0)
    assert offloaded.weight.is_meta and execution_device(offloaded).type == "cpu"
