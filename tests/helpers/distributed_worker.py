"""What one of two processes does for `test_distributed.py`: tensor parallelism first, then FSDP.

Started by `torchrun` with a folder to keep checkpoints in. Any difference raises, which ends both processes.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_ddtree  # noqa: F401
from helpers.families import VOCAB_SIZE, make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_prompt
from hf_ddtree.target.model import Verification
from hf_ddtree.testing import OracleTreeCandidateGenerator

FAMILIES = ("llama", "gemma3", "qwen3_5")
RETURNED = {"return_dict_in_generate": True}
EOS = {"eos_token_id": list(range(0, VOCAB_SIZE, 9)), "pad_token_id": 0}


def from_all(value):
    """The value of every process, in order."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def prompts_of(rank, rows):
    return torch.cat([make_prompt(seed=3 * rank + row, length=6 + 5 * rank) for row in range(rows)])


def by_tree(model, prompt, drafting, seed=0, tree_budget=16, **options):
    torch.manual_seed(seed)
    options = {**options, "tree_budget": tree_budget}
    drafting = {"assistant_model" if isinstance(drafting, torch.nn.Module) else "candidate_generator": drafting}
    return model.generate(prompt, **options, **drafting, generation_strategy="ddtree", **RETURNED)


def plain_of(model, prompt, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(prompt, **options)


def oracle(sequences, seed=0):
    return OracleTreeCandidateGenerator(sequences, VOCAB_SIZE, seed=seed)


def check_tensor_parallel(family, folder, rank):
    """All processes decode the same prompts, and what they would disagree on is settled."""
    whole = make_model(family, "sdpa")
    drafter = make_drafter(whole)
    target = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert any(hasattr(parameter, "full_tensor") for parameter in target.parameters())
    for rows, options in (
        (1, {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 12}),
        (1, {"max_new_tokens": 10, "do_sample": True, "repetition_penalty": 1.3}),
        (3, {"max_new_tokens": 16, "do_sample": False, **EOS}),
    ):
        prompt = prompts_of(0, rows)
        expected = plain_of(whole, prompt, **options)
        # The first process has the seed of the run in one process; the generators guess something else in each.
        got = by_tree(target, prompt, oracle(expected, seed=rank), seed=rank, **options)
        # What `"auto"` chooses hangs on the time that each process measures.
        drafted = by_tree(target, prompt, drafter, seed=rank, tree_budget="auto", **options)
        assert got.ddtree_stats.tokens_per_forward > 1.2
        assert got.sequences.tolist() == expected.tolist(), (family, rows, options)
        assert drafted.sequences.tolist() == expected.tolist(), (family, rows, options)
    try:
        target.generate(
            prompt, max_time=9.0, max_length=30, generation_strategy="ddtree", candidate_generator=oracle(expected)
        )
    except ValueError as error:
        assert "`max_time`" in str(error)
    else:
        raise AssertionError("`max_time` was not refused")


def check_fsdp(family, target, rank):
    """Each process decodes prompts of its own, and those that have finished wait for the others."""
    whole = make_model(family, "sdpa")
    drafter = make_drafter(whole)
    for rows, options in (
        (1, {"max_new_tokens": [20, 6][rank], "do_sample": True, "temperature": 0.8}),
        (3, {"max_new_tokens": [12, 20][rank], "do_sample": False, **EOS}),
    ):
        prompt = prompts_of(rank, rows)
        expected = plain_of(whole, prompt, seed=rank, **options)
        got = by_tree(target, prompt, oracle(expected), seed=rank, **options)
        drafted = by_tree(target, prompt, drafter, seed=rank, tree_budget="auto", **options)
        assert got.sequences.tolist() == expected.tolist(), (family, rows, options)
        assert drafted.sequences.tolist() == expected.tolist(), (family, rows, options)
        # Prefill, rounds, and the padding at the end: no process ever runs a forward alone.
        for stats in (got.ddtree_stats, drafted.ddtree_stats):
            assert len(set(from_all(stats.target_forwards))) == 1


def check_a_token_that_spoils_a_forward(target, rank):
    """One process runs some of its verifications again, and the other keeps step."""
    whole = make_model("llama", "sdpa")
    prompt, options = prompts_of(rank, 1), {"max_new_tokens": 16, "do_sample": False}
    expected = plain_of(whole, prompt, **options)
    asked, original = [], Verification.has_nan
    Verification.has_nan = property(lambda self: bool(asked.append(None)) or (rank == 1 and len(asked) % 3 == 1))
    try:
        got = by_tree(target, prompt, oracle(expected), **options)
    finally:
        Verification.has_nan = original
    assert got.sequences.tolist() == expected.tolist()


def main():
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = distributed.get_rank()
    if rank == 0:
        for family in FAMILIES:
            make_model(family, "sdpa").save_pretrained(folder / family)
    distributed.barrier()
    for family in FAMILIES:
        check_tensor_parallel(family, folder / family, rank)
    for family in FAMILIES:
        sharded = AutoModelForCausalLM.from_pretrained(
            folder / family, distributed_config=DistributedConfig(fsdp_size=2)
        ).eval()
        check_fsdp(family, sharded, rank)
    by_hand = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
    for layer in by_hand.model.layers:
        fully_shard(layer)
    fully_shard(by_hand, reshard_after_forward=True)
    check_fsdp("llama", by_hand, rank)
    check_a_token_that_spoils_a_forward(by_hand, rank)
    distributed.barrier()
    distributed.destroy_process_group()


main()
