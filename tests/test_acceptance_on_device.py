"""Acceptance by tensor operations is acceptance node by node."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_ddtree.decoding import acceptance_on_device
from hf_ddtree.decoding.acceptance import accept_in_lockstep
from hf_ddtree.decoding.acceptance_on_device import ChoicesOnDevice
from hf_ddtree.decoding.choosing import Chooser, argmax
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.tree_batch import TreeBatch

VOCAB_SIZE = 5
CPU = torch.device("cpu")
PROMPT_LENGTH = 3
# Their effects begin and end within a path.
PROCESSORS = {
    "temperature": lambda: logits_process.TemperatureLogitsWarper(0.7),
    "top k": lambda: logits_process.TopKLogitsWarper(3),
    "repetition": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition after the prompt": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.7, PROMPT_LENGTH),
    "repetition after the padding": lambda: logits_process.RepetitionPenaltyLogitsProcessor(
        1.7, torch.tensor([1, 0, 2])
    ),
    "least length": lambda: logits_process.MinLengthLogitsProcessor(PROMPT_LENGTH + 2, [1, 4]),
    "least new tokens": lambda: logits_process.MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 1, 2),
    "first token": lambda: logits_process.ForcedBOSTokenLogitsProcessor(3),
    "last token": lambda: logits_process.ForcedEOSTokenLogitsProcessor(PROMPT_LENGTH + 3, 4),
    "rising end": lambda: logits_process.ExponentialDecayLengthPenalty((1, 1.5), 2, PROMPT_LENGTH),
    "not at first": lambda: logits_process.SuppressTokensAtBeginLogitsProcessor([0, 3], PROMPT_LENGTH + 1),
    "bias": lambda: logits_process.SequenceBiasLogitsProcessor([[[1], 1.5], [[0, 2], -4.0], [[2, 3, 4], 6.0]]),
    "bad words": lambda: logits_process.NoBadWordsLogitsProcessor([[1, 1], [2, 3], [4, 0, 1]]),
}


def random_tree(generator: torch.Generator, budget: int) -> DraftTree:
    """Bushy, of a few tokens, so that walks often go on; nodes of all depths are mixed."""
    tokens, parents = [int(torch.randint(VOCAB_SIZE, (), generator=generator))], [-1]
    for _ in range(budget):
        parent = int(torch.randint(len(tokens), (), generator=generator))
        token = int(torch.randint(VOCAB_SIZE, (), generator=generator))
        if (parent, token) not in zip(parents, tokens):
            tokens.append(token)
            parents.append(parent)
    return DraftTree.from_parents(tokens, parents)


class Emitted:
    """Sequences that stop after a number of steps, and emit other tokens than those that were chosen at some."""

    def __init__(self, num_steps: int, rows: int, ends: dict[int, list[int]] | None = None) -> None:
        self.ends = ends or {}
        self.steps = []
        self.indices = list(range(rows))
        self._num_steps = num_steps
        self.token_ids = torch.zeros((rows, PROMPT_LENGTH), dtype=torch.int64)

    @property
    def finished(self) -> bool:
        return len(self.steps) == self._num_steps

    def append(self, choices):
        self.steps.append((choices.tokens, choices.logits, choices.scores))
        tokens = self.ends.get(len(self.steps), choices.tokens)
        self.token_ids = torch.cat((self.token_ids, torch.tensor(tokens)[:, None]), dim=1)
        return tokens


def same(one, other):
    return one is other is None or torch.equal(one, other)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 3),
    budget=st.integers(0, 24),
    do_sample=st.booleans(),
    names=st.sets(st.sampled_from(sorted(PROCESSORS)), max_size=4),
    num_steps=st.sampled_from((1, 2, 99)),
    slice_size=st.sampled_from((1, 5 * VOCAB_SIZE, 2**24)),
)
def test_rows_in_lockstep(seed, rows, budget, do_sample, names, num_steps, slice_size):
    rows = 3 if "repetition after the padding" in names else rows
    generator = torch.Generator().manual_seed(seed)
    trees = [random_tree(generator, max(0, budget - 3 * row)) for row in range(rows)]
    batch = TreeBatch.from_trees(trees, CPU)
    logits = torch.randn((rows, batch.num_nodes, VOCAB_SIZE), generator=generator) * 2
    chooser = Chooser(LogitsProcessorList([PROCESSORS[name]() for name in sorted(names)]), do_sample)
    assert chooser.chooses_ahead

    torch.manual_seed(seed)
    expected, expected_paths = Emitted(num_steps, rows), [[0] for _ in trees]
    accept_in_lockstep(trees, logits, chooser, expected, expected_paths)
    expected_state = torch.get_rng_state()

    torch.manual_seed(seed)
    got, paths = Emitted(num_steps, rows), [[0] for _ in trees]
    with mock.patch.object(acceptance_on_device, "SLICE", slice_size):
        ahead = ChoicesOnDevice(chooser, logits, trees, batch if batch.num_nodes > 1 else None, [got], {})
    ahead.emit(got, paths)
    ahead.rewind_rng(len(paths[0]))
    assert paths == expected_paths
    assert not ahead.has_nan
    for (tokens, step_logits, scores), (tokens_expected, logits_expected, scores_expected) in zip(
        got.steps, expected.steps, strict=True
    ):
        assert tokens == tokens_expected
        assert same(step_logits, logits_expected) and same(scores, scores_expected)
    assert torch.equal(torch.get_rng_state(), expected_state)


def test_rows_that_have_finished_go_on_with_padding():
    trees = [DraftTree.chain([3, 0, 0]), DraftTree.from_parents([1, 2, 4, 1], [-1, 0, 0, 2])]
    batch = TreeBatch.from_trees(trees, CPU)
    logits = torch.zeros((2, 4, VOCAB_SIZE))
    logits[0, :, 3] = logits[1, 0, 4] = logits[1, 2, 1] = logits[1, 3, 2] = 1.0
    paths, emitted = [[0], [0]], Emitted(99, 2)
    ahead = ChoicesOnDevice(Chooser(LogitsProcessorList(), False), logits, trees, batch, [emitted], {0: 0})
    ahead.emit(emitted, paths)
    assert paths == [[0, 1, 2], [0, 2, 3]]
    assert [tokens for tokens, *_ in emitted.steps] == [[0, 4], [0, 1], [0, 2]]


def test_a_token_that_was_not_chosen_ends_the_path():
    """A row that has just ended emits padding."""
    trees = [DraftTree.chain([3, 1, 2])]
    logits = torch.zeros((1, 3, VOCAB_SIZE))
    logits[0, 0, 1] = logits[0, 1, 2] = 1.0
    batch = TreeBatch.from_trees(trees, CPU)
    ahead = ChoicesOnDevice(Chooser(LogitsProcessorList(), False), logits, trees, batch, [], {})
    for ends, expected in (({}, [0, 1, 2]), ({2: [4]}, [0, 1]), ({1: [4]}, [0])):
        path = [0]
        ahead.emit(Emitted(99, 1, ends), [path])
        assert path == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_greedy_choice_is_that_of_standard_decoding(dtype):
    values = torch.randint(-4, 4, (3, 20, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 3, [7, 20]] = torch.nan
    values[1, 2] = -torch.inf
    assert torch.equal(argmax(values), values.argmax(dim=-1))


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_anywhere_is_told(do_sample):
    trees = [DraftTree.from_parents([1, 2, 4, 1], [-1, 0, 0, 2])]
    batch = TreeBatch.from_trees(trees, CPU)
    for node in range(4):
        logits = torch.randn((1, 4, VOCAB_SIZE))
        logits[0, node] = float("nan")
        before = torch.get_rng_state()
        ahead = ChoicesOnDevice(Chooser(LogitsProcessorList(), do_sample), logits, trees, batch, [], {})
        assert ahead.has_nan
        ahead.rewind_rng(0)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_lone_root_without_a_distribution():
    logits = torch.full((1, 1, VOCAB_SIZE), float("nan"))
    root = [DraftTree.root_only(1)]
    assert ChoicesOnDevice(Chooser(LogitsProcessorList(), False), logits, root, None, [], {}).has_nan
    with pytest.raises(RuntimeError, match="NaN"):
        ChoicesOnDevice(Chooser(LogitsProcessorList(), True), logits, root, None, [], {})
