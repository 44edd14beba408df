"""The budget policy on simulated machines, drafters and texts, where the best fixed choice is known."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import make_oracle, make_prompt
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import AutoBudget, BudgetPolicy, DraftTree
from hf_ddtree.budget.auto import policy_for
from hf_ddtree.budget.policy import FixedBudget, RoundCost
from hf_ddtree.demo import demo_prompts
from hf_ddtree.testing import OracleTreeCandidateGenerator
from hf_ddtree.tree.build import build_tree

pytestmark = pytest.mark.auto_budget

NUM_ROUNDS = 300


@dataclass
class Machine:
    """A target, a drafter and a text: what a round takes, and how often drafted tokens are right.

    Attributes:
        seconds: Of a forward over a number of drafted nodes and the root.
        draft_seconds: Of a draft.
        confidence: What the drafter says of its best candidate at each depth, on average.
        accuracy: How often the candidates are right, for each time that they say they are.
        num_rows: Rows of the batch.
    """

    seconds: Callable[[int], float]
    draft_seconds: float
    confidence: float = 0.7
    accuracy: float = 1.0
    num_rows: int = 1

    def draft(self, budget: int, random: np.random.Generator) -> list[DraftTree]:
        trees = []
        for _ in range(self.num_rows):
            best = random.beta(6 * self.confidence, 6 * (1 - self.confidence) + 1e-3, size=(11, 1))
            rest = (1 - best) * 0.5 ** np.arange(1, 16)
            probabilities = np.sort(np.concatenate((best, rest), axis=1))[:, ::-1].copy()
            tokens = np.tile(np.arange(16), (11, 1))
            log_probs = np.log(probabilities.clip(1e-12, 1.0))
            trees.append(build_tree(torch.from_numpy(log_probs), torch.from_numpy(tokens), 0, budget))
        return trees

    def accept(self, tree: DraftTree, random: np.random.Generator) -> int:
        """The depth to which the tree turns out to be right."""
        node = depth = 0
        while children := tree.children(node):
            parent = float(tree.log_probs[node])
            chances = [self.accuracy * np.exp(float(tree.log_probs[child]) - parent) for child in children]
            drawn = random.random()
            right = [child for child, end in zip(children, np.cumsum(chances)) if drawn < end]
            if not right:
                break
            node, depth = right[0], depth + 1
        return depth

    def expected(self, tree: DraftTree) -> float:
        """The depth to which the tree is right on average."""
        return float((tree.log_probs.exp() * self.accuracy**tree.depths)[1:].sum())


def run(
    policy: BudgetPolicy,
    machine: Machine,
    rounds: int = NUM_ROUNDS,
    seed: int = 0,
    num_cached: int = 300,
    slower: Callable[[int], float] = lambda round: 1.0,
) -> float:
    """Tokens a second, if `slower`, by which factor the machine is slower in a round, is not counted."""
    random = np.random.default_rng(seed)
    tokens = seconds = 0.0
    for number in range(rounds):
        most = policy.nodes_to_draft(num_cached, machine.num_rows)
        trees = [DraftTree.root_only(0)] * machine.num_rows
        if most:
            drafted = machine.draft(most, random)
            size = policy.nodes_to_verify(drafted, num_cached)
            trees = [tree.truncate(size) if size else DraftTree.root_only(0) for tree in drafted]
        num_drafted = max(tree.num_drafted for tree in trees)
        accepted = [machine.accept(tree, random) for tree in trees]
        noise = slower(number) * (random.lognormal(sigma=0.05) if random.random() > 0.02 else 4.0)
        verify_seconds = machine.seconds(num_drafted) * noise
        draft_seconds = machine.draft_seconds * noise if most else None
        policy.observe(RoundCost(num_cached, machine.num_rows, num_drafted, accepted, draft_seconds, verify_seconds))
        tokens += machine.num_rows + sum(map(machine.expected, trees))
        seconds += machine.seconds(num_drafted) + (machine.draft_seconds if most else 0.0)
        num_cached += 1
    return tokens / seconds


class Plain(BudgetPolicy):
    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        return 0


MACHINES = {
    "slow for each node": Machine(lambda nodes: 1.0 + 0.08 * nodes, 0.25),
    "as fast for 64 nodes": Machine(lambda nodes: 1.0 + 0.002 * nodes, 0.1),
    "in steps of 8": Machine(lambda nodes: 1.0 + 0.3 * (nodes // 8), 0.2),
    "a weak drafter": Machine(lambda nodes: 1.0 + 0.05 * nodes, 0.3, confidence=0.25),
    "a drafter that is too sure": Machine(lambda nodes: 1.0 + 0.05 * nodes, 0.2, confidence=0.8, accuracy=0.6),
    "a drafter that is never right": Machine(lambda nodes: 1.0 + 0.05 * nodes, 0.3, confidence=0.8, accuracy=0.0),
    "a slow drafter": Machine(lambda nodes: 1.0 + 0.05 * nodes, 2.0, confidence=0.5),
    "a batch that is slow for each node": Machine(lambda nodes: 1.0 + 0.3 * nodes, 0.5, num_rows=2),
    "a batch that is fast": Machine(lambda nodes: 1.0 + 0.02 * nodes, 0.2, num_rows=2),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_finds_the_best_fixed_budget(machine: Machine) -> None:
    policies = {"plain": Plain(), **{str(size): FixedBudget(size) for size in (2, 4, 8, 16, 32, 64)}}
    fixed = {name: run(policy, machine) for name, policy in policies.items()}
    assert run(AutoBudget(), machine) > 0.94 * max(fixed.values()), fixed


def test_with_a_useless_drafter_it_is_hardly_slower_than_plain_decoding() -> None:
    machine = MACHINES["a drafter that is never right"]
    assert run(AutoBudget(), machine, rounds=512) > 0.96 * run(Plain(), machine, rounds=512)


def test_a_machine_whose_pace_drifts_does_not_mislead_it() -> None:
    """Sizes are timed at moments that differ by more than the sizes do, the first of them while all is slow."""
    machine = Machine(lambda nodes: 1.0 + 0.45 * (nodes > 0) + 0.038 * nodes, 0.75, confidence=0.75, num_rows=4)
    best = max(run(FixedBudget(size), machine) for size in (8, 16, 32))
    speeds = []
    for seed in range(6):
        changes = np.random.default_rng(seed).normal(scale=0.26, size=240)
        pace = [0.0]
        for change in changes:
            pace.append(0.9 * pace[-1] + change)
        slower = np.exp(pace)
        slower[:4] *= 1.5
        policy = AutoBudget()
        run(policy, machine, rounds=20, seed=seed, slower=slower.item)
        speeds.append(run(policy, machine, rounds=200, seed=seed, slower=slower[20:].item))
    assert np.mean(speeds) > 0.93 * best, np.array(speeds) / best


@pytest.mark.parametrize("first_plain", [50.0, 0.02])
def test_one_odd_time_of_plain_decoding_does_not_last(first_plain: float) -> None:
    """The second forward is the first over one token, which may have to set up a path of its own."""
    machine = Machine(lambda nodes: 1.0 + 0.3 * nodes, 0.5, confidence=0.3 if first_plain > 1 else 0.8)
    policy = AutoBudget()
    run(policy, machine, rounds=100, slower=lambda number: first_plain if number == 1 else 1.0)
    best = max(run(fixed, machine) for fixed in (Plain(), *map(FixedBudget, (1, 3, 7))))
    assert run(policy, machine) > 0.93 * best


def test_it_notices_when_trees_alone_become_slow() -> None:
    policy = AutoBudget()
    run(policy, Machine(lambda nodes: 1.0 + 0.02 * nodes, 0.3))
    slow = Machine(lambda nodes: 1.0 + 6.0 * (nodes > 0), 0.3)
    run(policy, slow, rounds=200)
    assert run(policy, slow) > 0.93 * run(Plain(), slow)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, 1e-300])
def test_times_of_a_clock_that_was_set_are_left_out(tmp_path: Path, seconds: float) -> None:
    policy = AutoBudget()
    for number in range(200):
        most = policy.nodes_to_draft(300, 1)
        size = policy.nodes_to_verify([DraftTree.chain([1, *[2] * most])], 300) if most else 0
        odd = number < 6 or number % 5 == 0
        policy.observe(RoundCost(300, 1, size, [size], seconds if most and odd else 0.1, seconds if odd else 1.0))
    assert size > 0
    policy.save(tmp_path / "budget.json")
    assert AutoBudget.load(tmp_path / "budget.json").nodes_to_draft(300, 1) > 0


def test_a_drafter_that_learns_is_never_given_up() -> None:
    """Useless for 300 rounds, then good: nearly at once it gives what it gave from the beginning."""
    seconds = MACHINES["slow for each node"].seconds
    useless, useful = (Machine(seconds, 0.01, 0.7, accuracy) for accuracy in (0.0, 1.0))
    policy = AutoBudget(drafter_learns=True)
    assert run(policy, useless) > 0.9 * run(Plain(), useless)
    best = max(run(FixedBudget(size), useful, rounds=150) for size in (4, 8, 16, 32))
    assert run(policy, useful, rounds=150) > 0.93 * best


def test_a_drafter_that_promises_too_little_is_believed_more_than_it_says() -> None:
    """With the tokens of greedy decoding more comes of a draft than a target's own probabilities say."""
    seconds = MACHINES["slow for each node"].seconds
    trusts = []
    for accuracy in (1.0, 1.6):
        policy = AutoBudget(drafter_learns=True)
        run(policy, Machine(seconds, 0.01, 0.4, accuracy))
        trusts.append(policy.trust[0])
    assert trusts[0] < 1.1 < trusts[1]


def test_it_comes_back_when_the_text_changes() -> None:
    policy = AutoBudget()
    useless, useful = MACHINES["a drafter that is never right"], MACHINES["as fast for 64 nodes"]
    run(policy, useless)
    run(policy, Machine(useless.seconds, useless.draft_seconds, useful.confidence), rounds=400)
    machine = Machine(useless.seconds, useless.draft_seconds, useful.confidence)
    best = max(run(FixedBudget(size), machine, rounds=400) for size in (4, 8, 16, 32))
    assert run(policy, machine, rounds=400) > 0.95 * best


def test_the_last_row_of_a_batch_is_drafted_for_as_much_as_one_alone() -> None:
    """Three of four rows have finished, and their share of the time goes on."""
    policy = AutoBudget()
    whole = Machine(lambda nodes: 1.0 + 0.1 * nodes, 0.2, confidence=0.5, num_rows=4)
    run(policy, whole)
    trees = whole.draft(policy.nodes_to_draft(300, 4), np.random.default_rng(1))
    alone = AutoBudget()
    run(alone, Machine(whole.seconds, whole.draft_seconds, whole.confidence))
    alone.nodes_to_draft(300, 1)
    # Sizes next to each other promise about as much.
    assert policy.nodes_to_verify(trees[:1], 300) >= 0.6 * alone.nodes_to_verify(trees[:1], 300) > 0


def test_hard_text_after_easy_text_is_drafted_for_what_it_is_worth() -> None:
    """Each 20 rounds the text is one where nearly all drafted tokens are right, or one where few are; both pay."""
    easy = Machine(lambda nodes: 1.0 + 0.05 * nodes, 0.4, confidence=0.97)
    hard = Machine(easy.seconds, easy.draft_seconds, confidence=0.45)
    auto, fixed = AutoBudget(), FixedBudget(11)

    def seconds_a_token(policy: BudgetPolicy, machine: Machine) -> float:
        return sum(1 / run(policy, machine, rounds=20, seed=seed) for seed in range(6))

    for machine in (easy, hard):
        run(auto, machine, rounds=20)
    by_auto = dict.fromkeys(("easy", "hard"), 0.0)
    for seed in range(6):
        for kind, machine in (("easy", easy), ("hard", hard)):
            by_auto[kind] += 1 / run(auto, machine, rounds=20, seed=seed)
    assert by_auto["easy"] < 1.05 * seconds_a_token(fixed, easy)
    assert by_auto["hard"] < 1.05 * seconds_a_token(fixed, hard)


def test_it_notices_that_a_longer_context_costs_more_for_each_node() -> None:
    policy = AutoBudget()
    run(policy, MACHINES["as fast for 64 nodes"], num_cached=300)
    machine = MACHINES["slow for each node"]
    best = max(run(FixedBudget(size), machine, num_cached=5000) for size in (2, 4, 8, 16))
    assert run(policy, machine, num_cached=5000) > 0.93 * best


def test_what_was_learned_can_be_saved(tmp_path: Path) -> None:
    machine = MACHINES["slow for each node"]
    policy = AutoBudget(most_nodes=48)
    run(policy, machine)
    policy.save(tmp_path / "budget.json")
    loaded = AutoBudget.load(tmp_path / "budget.json")
    assert loaded.most_nodes == 48 and (loaded.trust == policy.trust).all()
    told = re.fullmatch(r"<AutoBudget of 48 nodes: timed \[(0, [\d, ]+)\], trust at depth 1 ([\d.]+)>", repr(loaded))
    assert told and float(told[2]) == pytest.approx(policy.trust[0], abs=0.01)
    assert repr(policy) == repr(loaded) != repr(AutoBudget(most_nodes=48))
    # It starts with what the other one ended with: no size is tried first.
    assert loaded.nodes_to_draft(300, 1) > 0
    short = run(AutoBudget.load(tmp_path / "budget.json"), machine, rounds=30)
    assert short > run(AutoBudget(), machine, rounds=30)


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON", '{"most_nodes": 8, "forward_seconds": [[1, 2]]}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "budget.json").write_text(content)
    with pytest.raises(ValueError, match="not a file that `AutoBudget.save` wrote"):
        AutoBudget.load(tmp_path / "budget.json")


@pytest.mark.parametrize(
    "changed",
    [
        {"most_nodes": 0},
        {"forward_seconds": [[1, 9, 0, 0.0]]},
        {"forward_seconds": [[1, 9, 0, math.nan]]},
        {"forward_seconds": [[1, 9, 8, 0.1]]},
        {"forward_seconds": [[0, 9, 0, 0.1]]},
        {"forward_seconds": [[1, 9, 0, 1e-320]]},
        {"draft_seconds": {"1": -1.0}},
        {"draft_seconds": []},
        {"trust": [[0.0] * 33] * 2},
        {"trust": [[math.nan] * 33] * 2},
        {"trust": [[1e-300] * 33, [1e300] * 33]},
        {"trust": [[1.0], [1.0]]},
    ],
)
def test_files_with_other_values_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    policy, path = AutoBudget(), tmp_path / "budget.json"
    run(policy, MACHINES["in steps of 8"], rounds=20)
    policy.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match="not a file that `AutoBudget.save` wrote"):
        AutoBudget.load(path)


def test_calls_with_the_same_target_and_drafter_learn_together() -> None:
    model, other = make_model("llama", "sdpa"), make_model("qwen3", "sdpa")
    generator = make_oracle(make_prompt())
    policy = policy_for("auto", model, None, generator)
    assert policy_for("auto", model, None, make_oracle(make_prompt())) is policy
    assert policy_for("auto", other, None, generator) is not policy
    of_drafter = policy_for("auto", model, other, generator)
    assert of_drafter is not policy and policy_for("auto", model, other, generator) is of_drafter
    assert policy_for("auto", model, other, object()) is not of_drafter
    assert policy_for(7, model, other, generator).nodes_to_draft(0, 1) == 7


def test_threads_may_share_a_policy() -> None:
    policy, errors = AutoBudget(), []

    def work(seed: int) -> None:
        try:
            run(policy, MACHINES["in steps of 8"], rounds=150, seed=seed)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_no_tree_is_larger_than_allowed() -> None:
    """Nor at first, when nothing was timed."""
    model, prompt = make_model("llama", "sdpa"), make_prompt()
    plain = model.generate(prompt, max_new_tokens=32, do_sample=False)
    tree = model.generate(
        prompt,
        max_new_tokens=32,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain),
        tree_budget=AutoBudget(2),
        return_trees=True,
        return_dict_in_generate=True,
    )
    assert tree.sequences.tolist() == plain.tolist()
    assert max(drafted.num_drafted for trees in tree.ddtree_stats.trees for drafted in trees) == 2


def test_drafting_begins_whenever_there_is_something_to_draft() -> None:
    """A lookup may find nothing for long, and no size but that of the root alone is timed."""
    policy, full = AutoBudget(), DraftTree.chain([1, *[2] * 16])
    verified = []
    for num_round in range(60):
        tree = full if num_round > 20 else DraftTree.root_only(1)
        asked = policy.nodes_to_draft(50, 1)
        size = min(policy.nodes_to_verify([tree], 50), tree.num_drafted) if asked else 0
        policy.observe(RoundCost(50, 1, size, [size], 1e-5 if asked else None, 1.0 + 0.001 * size))
        verified.append(size)
    assert max(verified[:21]) == 0 and verified[-1] == 16


@pytest.mark.parametrize("name", ["nodes_to_draft", "nodes_to_verify", "most_nodes"])
@pytest.mark.parametrize("nodes", [-1, 2.5, None, "4", True, math.nan])
def test_what_a_policy_gives_is_checked(name: str, nodes: Any) -> None:
    policy = FixedBudget(4)
    setattr(policy, name, nodes if name == "most_nodes" else lambda *_: nodes)
    arguments = {"cache_implementation": "static", "max_new_tokens": 4, "generation_strategy": "ddtree"}
    with pytest.raises(ValueError, match=f"`{name}` of the policy `FixedBudget` must give an integer of at least 0"):
        make_model("llama", "sdpa").generate(
            make_prompt(), **arguments, candidate_generator=make_oracle(make_prompt()), tree_budget=policy
        )


@pytest.mark.parametrize("most_nodes", [0, -1, 2.5, None])
def test_auto_takes_whole_sizes(most_nodes: Any) -> None:
    with pytest.raises(ValueError, match="`most_nodes` must be an integer of at least 1"):
        AutoBudget(most_nodes)


def test_a_policy_may_ask_for_more_than_there_is() -> None:
    model, prompt = make_model("llama", "sdpa"), make_prompt()
    plain = model.generate(prompt, max_new_tokens=8, do_sample=False)
    policy = FixedBudget(10**12)
    assert policy.nodes_to_draft(0, 1) == 10**12
    tree = model.generate(
        prompt,
        max_new_tokens=8,
        do_sample=False,
        generation_strategy="ddtree",
        tree_lookup=True,
        tree_budget=policy,
        cache_implementation="static",
    )
    assert tree.tolist() == plain.tolist()


class EverySize(BudgetPolicy):
    """Goes through all sizes, and what it observes."""

    def __init__(self) -> None:
        self.sizes = [0, 5, 1, 0, 0, 12, 3, 30, 0, 2]
        self.costs: list[RoundCost] = []

    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        return self.sizes[len(self.costs) % len(self.sizes)]

    def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
        return 4 if len(self.costs) % 3 == 1 else super().nodes_to_verify(trees, num_cached)

    def observe(self, cost: RoundCost) -> None:
        self.costs.append(cost)


def test_rows_that_have_finished_are_left_out() -> None:
    class Recorder(FixedBudget):
        def nodes_to_verify(self, trees: Sequence[DraftTree], num_cached: int) -> int:
            drafted.append([tree.num_drafted for tree in trees])
            return super().nodes_to_verify(trees, num_cached)

    drafted: list[list[int]] = []
    model = make_model("llama", "sdpa")
    input_ids = torch.cat([make_prompt(0), make_prompt(1)])
    length = input_ids.shape[1]
    alone = model.generate(input_ids, max_new_tokens=32)
    end = int(alone[0, length + 4])  # the second row may not emit it
    allowed = {"max_new_tokens": 32, "eos_token_id": end, "pad_token_id": 0}
    plain = model.generate(input_ids, **allowed)
    assert (plain[1] != 0).all()
    generator = OracleTreeCandidateGenerator(plain, VOCAB_SIZE)
    tree = model.generate(
        input_ids,
        **allowed,
        generation_strategy="ddtree",
        candidate_generator=generator,
        tree_budget=Recorder(4),
    )
    assert tree.tolist() == plain.tolist()
    assert {len(of_round) for of_round in drafted} == {1, 2}
    assert len(drafted[0]) == 2 and len(drafted[-1]) == 1


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rounds_of_every_size_emit_what_plain_decoding_emits(family: str, num_rows: int, do_sample: bool) -> None:
    """Plain rounds between trees, with rows that walk apart and together (sampling with a seed, scores kept)."""
    model = make_model(family, "sdpa")
    input_ids = torch.cat([make_prompt(seed) for seed in range(num_rows)])
    mask = torch.ones_like(input_ids)
    if num_rows > 1:
        input_ids[0, :3], mask[0, :3] = 0, 0
    arguments = {
        "inputs": input_ids,
        "attention_mask": mask,
        "max_new_tokens": 48,
        "do_sample": do_sample,
        "return_dict_in_generate": True,
        "output_logits": do_sample,
    }
    torch.manual_seed(0)
    plain = model.generate(**arguments)
    policy = EverySize()
    torch.manual_seed(0)
    tree = model.generate(
        **arguments,
        generation_strategy="ddtree",
        candidate_generator=OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE),
        tree_budget=policy,
    )
    assert tree.sequences.tolist() == plain.sequences.tolist()
    for step_plain, step_tree in zip(plain.logits or (), tree.logits or (), strict=True):
        torch.testing.assert_close(step_tree, step_plain, rtol=1e-4, atol=1e-4)
    assert {cost.num_drafted == 0 for cost in policy.costs} == {True, False}
    assert all(cost.draft_seconds is not None for cost in policy.costs if cost.num_drafted)
    assert sum(sum(cost.accepted) for cost in policy.costs) > 0


def test_the_policy_of_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "budget.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=32, do_sample=False)
    assert names["out"].tolist() == plain.tolist()


@pytest.mark.auto_budget
def test_a_policy_in_a_generation_config(tmp_path: Path) -> None:
    """It can be printed and saved, as "auto", and all copies of the config learn with the original."""
    policy = AutoBudget()
    config = GenerationConfig(
        generation_strategy="ddtree", tree_budget=policy, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert json.loads(repr(config).removeprefix("GenerationConfig "))["tree_budget"] == "auto"
    config.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).tree_budget == "auto"
    assert copy.deepcopy(config).tree_budget is policy
    model = make_model("llama", "sdpa")
    expected = model.generate(make_prompt(), max_new_tokens=8, do_sample=False)
    output = model.generate(make_prompt(), generation_config=config, candidate_generator=make_oracle(expected))
    assert output.tolist() == expected.tolist()
    assert repr(policy) != repr(AutoBudget())  # it has timed forwards
    with pytest.raises(TypeError, match="cannot be pickled. Keep what it learned with `policy.save"):
        pickle.dumps(policy)


def test_a_policy_of_one_s_own_in_a_generation_config_can_be_printed() -> None:
    class Four(BudgetPolicy):
        def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
            return 4

    assert "Four object" in repr(GenerationConfig(tree_budget=Four()))


class Wide(hf_ddtree.TreeCandidateGenerator):
    """Proposes sixty children of the root, the right token the least probable, whatever it is asked for."""

    def __init__(self, expected: torch.Tensor) -> None:
        super().__init__()
        self.expected = expected[0].tolist()

    def propose(self, context: hf_ddtree.DraftContext, budget: int) -> list[DraftTree]:
        place = context.input_ids.shape[1]
        right = self.expected[place] if place < len(self.expected) else 0
        others = [token for token in range(VOCAB_SIZE) if token != right][:59]
        tokens = [self.expected[place - 1], *others, right]
        log_probs = np.log(np.array([1.0, *[1 / 61 - 1e-4 * rank / 61 for rank in range(60)]]))
        return [DraftTree.from_parents(tokens, [-1] + [0] * 60, torch.tensor(log_probs, dtype=torch.float32))]


class Three(BudgetPolicy):
    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        return 3


@pytest.mark.parametrize(("tree_budget", "most"), [(4, 4), (1, 1), (60, 60), (AutoBudget(15), 15), (Three(), 3)])
def test_no_more_nodes_are_verified_than_the_budget_says(tree_budget: Any, most: int) -> None:
    """Whatever a generator proposes: the most probable ones are kept."""
    model = make_model("llama", "sdpa")
    expected = model.generate(make_prompt(), max_new_tokens=12, do_sample=False)
    stats = model.generate(
        make_prompt(),
        max_new_tokens=12,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=Wide(expected),
        tree_budget=tree_budget,
        return_trees=True,
        return_dict_in_generate=True,
    )
    assert stats.sequences.tolist() == expected.tolist()
    sizes = stats.ddtree_stats.tree_sizes
    assert max(sizes) <= most and (isinstance(tree_budget, AutoBudget) or min(sizes[:-1]) == most)
    if tree_budget in (4, 1):
        for (tree,) in stats.ddtree_stats.trees[:-1]:
            assert max(tree.token_ids[1:].tolist()) <= most  # the first that are not the right one


def test_a_class_in_place_of_a_policy() -> None:
    with pytest.raises(ValueError, match="but is the class `Plain`. Pass an instance of it"):
        hf_ddtree.DDTreeConfig(tree_budget=Plain)


def test_auto_is_the_default_and_goes_through_a_saved_generation_config(tmp_path: Path) -> None:
    assert hf_ddtree.DDTreeConfig().tree_budget == "auto"
    config = make_model("llama", "sdpa").generation_config
    copied = copy.deepcopy(config)
    copied.generation_strategy, copied.tree_budget = "ddtree", "auto"
    copied.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["tree_budget"] == "auto"


@pytest.mark.parametrize("value", [0, -1, 1.5, "most", None, True, object()])
def test_other_budgets_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="`tree_budget` "):
        hf_ddtree.DDTreeConfig(tree_budget=value)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_shipped_pair_decodes_as_plainly(num_rows: int) -> None:
    """Whatever the policy chooses on this machine."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    texts = [entry["prompt"] for entry in demo_prompts()[:num_rows]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    for _ in range(2):
        plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        tree = model.generate(
            **inputs, max_new_tokens=64, do_sample=False, assistant_model=drafter, generation_strategy="ddtree"
        )
        assert tree.tolist() == plain.tolist()
