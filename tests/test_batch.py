"""Batches: rows that accept different lengths, finish early, are padded; and how much padding that leaves."""

import itertools
import random

import pytest
import torch
from helpers.families import VOCAB_SIZE, WINDOW, first_implementation, make_config, make_model
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_close
from helpers.side_by_side import make_prompt
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_ddtree import DDTreeConfig, DraftContext, DraftTree, TreeCandidateGenerator
from hf_ddtree.candidate_generators import DFlashTreeCandidateGenerator
from hf_ddtree.candidate_generators.dflash import MOST_PADDING
from hf_ddtree.registration import register
from hf_ddtree.target.model import CachedModel
from hf_ddtree.testing import OracleTreeCandidateGenerator

FAMILIES = ["llama", "gemma3", "qwen2", "qwen3_5"]
NEW_TOKENS = 18
LENGTH = 14
TOGETHER = {"return_dict_in_generate": True, "output_scores": True}  # Scores have an entry per token of all rows.


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_model(request.param, first_implementation(request.param))


def make_inputs(batch_size, seed=0):
    """Prompts of different lengths, padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    pads = torch.randint(0, LENGTH - 1, (batch_size, 1), generator=generator)
    pads[0] = 0
    mask = (torch.arange(LENGTH) >= pads).long()
    return {"input_ids": torch.randint(1, VOCAB_SIZE, mask.shape, generator=generator) * mask, "attention_mask": mask}


def make_arguments(inputs, **kwargs):
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return defaults | inputs | kwargs


def by_tree(model, plain, seed=0, **arguments):
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE, seed=seed)
    return model.generate(
        **arguments, generation_strategy="ddtree", candidate_generator=oracle, return_trees=True, tree_budget=10
    )


def end_tokens_of(model, inputs):
    """Two tokens that end several rows, each somewhere in the middle."""
    answers = model.generate(**make_arguments(inputs))["sequences"][:, LENGTH:]
    return [answers[0, 12].item(), answers[-1, 5].item()]


def row_of(inputs, row):
    """The row without its padding, as a batch of one."""
    is_token = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, is_token] for name, value in inputs.items()}


def answer_of(sequences, length, ends=()):
    """The emitted tokens of one row, the padding behind an end token left out."""
    tokens = sequences[length:].tolist()
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    assert not any(tokens[stop:])
    return tokens[:stop]


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_rows_are_those_of_plain_decoding_and_of_the_row_alone(model, batch_size):
    inputs = make_inputs(batch_size, seed=batch_size)
    ends = end_tokens_of(model, inputs)
    arguments = make_arguments(inputs, eos_token_id=ends)
    plain = model.generate(**arguments)
    apart = by_tree(model, plain, **arguments)
    together = by_tree(model, plain, **arguments | TOGETHER)
    assert apart.sequences.tolist() == together.sequences.tolist() == plain.sequences.tolist()
    for row in {0, batch_size // 2, batch_size - 1}:
        alone = row_of(inputs, row)
        tokens = model.generate(**make_arguments(alone, eos_token_id=ends))["sequences"][0]
        assert answer_of(tokens, alone["input_ids"].shape[1], ends) == answer_of(plain.sequences[row], LENGTH, ends)

    paths = [[len(path) for path in round_ if path] for round_ in apart.ddtree_stats.accepted_paths]
    assert batch_size < 4 or any(len(set(lengths)) > 1 for lengths in paths)
    paths = [[len(path) for path in round_ if path] for round_ in together.ddtree_stats.accepted_paths]
    assert all(len(set(lengths)) == 1 for lengths in paths)
    assert apart.ddtree_stats.target_forwards <= together.ddtree_stats.target_forwards + 1


def test_many_rounds(model):
    """Errors of a row that falls far behind would add up."""
    arguments = make_arguments(make_inputs(3), max_new_tokens=60)
    plain = model.generate(**arguments)
    # One row is always drafted right and one never, so the latter ends 40 tokens behind.
    oracle = OracleTreeCandidateGenerator(plain.sequences, VOCAB_SIZE, accuracy=1.0)
    oracle._sequences[1] = oracle._sequences[1][:LENGTH]
    tree = model.generate(**arguments, generation_strategy="ddtree", candidate_generator=oracle, return_trees=True)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    first_done = next(i for i, round_ in enumerate(tree.ddtree_stats.accepted_paths) if not round_[0])
    assert first_done < 30


class RightChains(TreeCandidateGenerator):
    """Chains of three tokens, all right; but the second row's first one goes wrong at once."""

    def __init__(self, sequences):
        super().__init__()
        self.sequences, self.rounds = sequences.tolist(), 0

    def propose(self, context, budget):
        self.rounds += 1
        trees = []
        for row, (sequence, position) in enumerate(zip(self.sequences, context.root_positions)):
            tokens = sequence[position : position + 4]
            if (self.rounds, row) == (1, 1):
                tokens[1] = 1 + tokens[1] % 2
            trees.append(DraftTree.from_parents(tokens, list(range(-1, len(tokens) - 1))))
        return trees


@pytest.mark.core
def test_whole_trees_of_rows_that_stand_at_different_lengths(model):
    """Their nodes lie behind the longest row, not where the shorter one's belong."""
    arguments = make_arguments(make_inputs(2), max_new_tokens=40)
    plain = model.generate(**arguments)
    generator = RightChains(plain.sequences)
    tree = model.generate(**arguments, generation_strategy="ddtree", candidate_generator=generator, return_trees=True)
    assert [len(path) for path in tree.ddtree_stats.accepted_paths[0]] == [4, 1]
    assert [len(path) for path in tree.ddtree_stats.accepted_paths[1]] == [4, 4]
    assert tree.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.core
def test_a_row_that_finishes_with_its_first_token(model):
    inputs = make_inputs(3)
    first = model.generate(**make_arguments(inputs, max_new_tokens=1))["sequences"][:, -1]
    arguments = make_arguments(inputs, eos_token_id=first[1].item())
    plain = model.generate(**arguments)
    for kwargs in ({}, TOGETHER):
        assert by_tree(model, plain, **arguments | kwargs).sequences.tolist() == plain.sequences.tolist()
    arguments = make_arguments(inputs, eos_token_id=first.tolist())
    plain = model.generate(**arguments)
    assert plain.sequences.shape[1] == LENGTH + 1
    assert by_tree(model, plain, **arguments).sequences.tolist() == plain.sequences.tolist()


@pytest.mark.core
def test_num_return_sequences(model):
    inputs = make_inputs(2)
    arguments = make_arguments(inputs, num_return_sequences=3, do_sample=True, temperature=0.7, top_k=20)
    runs = []
    for kwargs in ({}, TOGETHER):
        torch.manual_seed(0)
        plain = model.generate(**arguments | kwargs)
        torch.manual_seed(0)
        runs.append(by_tree(model, plain, **arguments | kwargs).sequences)
    assert runs[1].tolist() == plain.sequences.tolist()
    # Rows that walk apart draw in another order: the same distribution, and the same tokens run to run.
    assert runs[0].shape[0] == 6 and runs[0][:, :LENGTH].tolist() == plain.sequences[:, :LENGTH].tolist()
    torch.manual_seed(0)
    assert by_tree(model, plain, **arguments).sequences.tolist() == runs[0].tolist()


class NoTokenTwiceInABatch(LogitsProcessor):
    """Looks at all rows: what one of them emitted last none may emit now."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[:, -1], -torch.inf)


class LastTokensSum(StoppingCriteria):
    """Looks at all rows, and stops all of them or each for itself."""

    def __init__(self, each):
        self.each = each

    def __call__(self, input_ids, scores, **kwargs):
        total = input_ids[:, -3:].sum(dim=1 if self.each else None)
        return (total % 23 == 0).expand(len(input_ids))


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [1, 4])
def test_processors_and_criteria_that_look_at_the_whole_batch(model, batch_size):
    inputs = make_inputs(batch_size)
    extras = [
        {"logits_processor": [NoTokenTwiceInABatch()]},
        {"stopping_criteria": [LastTokensSum(each=False)]},
        {"stopping_criteria": [LastTokensSum(each=True)], "eos_token_id": 3},
        {"logits_processor": [NoTokenTwiceInABatch()], "stopping_criteria": [LastTokensSum(each=True)]},
    ]
    for extra in extras:
        for kwargs in ({}, {"do_sample": True}):
            arguments = make_arguments(inputs, **extra, **kwargs)
            torch.manual_seed(2)
            plain = model.generate(**arguments)
            torch.manual_seed(2)
            assert by_tree(model, plain, **arguments).sequences.tolist() == plain.sequences.tolist()


# --- sampling -------------------------------------------------------------------------------------------------------


class RandomTrees(TreeCandidateGenerator):
    """Half of a small vocabulary below the root and below half of its children."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.random = random.Random(0)

    def propose(self, context, budget):
        return [self.tree(root) for root in context.input_ids[:, -1].tolist()]

    def tree(self, root):
        tokens, parents = [root], [-1]
        for parent in (0, 1, 2):
            if parent < len(tokens):
                children = self.random.sample(range(self.vocab_size), self.vocab_size // 2)
                tokens += children
                parents += [parent] * len(children)
        return DraftTree.from_parents(tokens, parents)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_each_row_samples_the_target_s_distribution(family):
    """Rows that walk apart share PyTorch's generator, but none may bend another's distribution."""
    config = make_config(family)
    config.vocab_size = 8
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.lm_head.weight.normal_(std=0.12)
    prompts = torch.tensor([[0, 5, 2, 7], [3, 3, 6, 1]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    repeats, calls = 128, 16
    counts = torch.zeros(2, 8, 8)
    for seed in range(calls):
        torch.manual_seed(seed)
        tokens = model.generate(
            prompts.repeat_interleave(repeats, dim=0),
            attention_mask=mask.repeat_interleave(repeats, dim=0),
            do_sample=True,
            max_new_tokens=3,
            generation_strategy="ddtree",
            candidate_generator=RandomTrees(8),
        )
        for row in range(2):
            of_row = tokens[row * repeats : (row + 1) * repeats, 5:]
            counts[row] += torch.bincount(of_row[:, 0] * 8 + of_row[:, 1], minlength=64).view(8, 8)

    for row in range(2):
        start = prompts[row, mask[row].bool()].tolist()
        every = torch.tensor([[*start, *pair] for pair in itertools.product(range(8), repeat=2)])
        probabilities = model(every).logits.softmax(-1).double()[:, len(start) - 1 :]
        first, second, third = probabilities[0, 0], probabilities[::8, 1], probabilities[:, 2].view(8, 8, 8)
        expected = torch.einsum("a,ab,abc->bc", first, second, third)
        assert expected.min() * repeats * calls > 3
        assert chisquare(counts[row].flatten(), (expected / expected.sum()).flatten() * repeats * calls).pvalue > 1e-3


# --- what a row drafts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_row_drafts_what_it_drafts_alone(model, kind):
    inputs, drafter = make_inputs(4), make_drafter(model, kind)
    ends = end_tokens_of(model, inputs)
    tree_arguments = {"generation_strategy": "ddtree", "assistant_model": drafter, "tree_budget": 40}
    tree_arguments |= {"calibrate": False, "return_trees": True, "eos_token_id": ends, "max_new_tokens": 40}
    batch = model.generate(**make_arguments(inputs, **tree_arguments)).ddtree_stats
    uneven = False
    for row in range(4):
        alone = model.generate(**make_arguments(row_of(inputs, row), **tree_arguments)).ddtree_stats
        rounds = [(trees[row], paths[row]) for trees, paths in zip(batch.trees, batch.accepted_paths) if paths[row]]
        assert len(rounds) == len(alone.trees)
        for (tree, path), [tree_alone], [path_alone] in zip(rounds, alone.trees, alone.accepted_paths):
            assert tree.token_ids.tolist() == tree_alone.token_ids.tolist()
            assert tree.parents.tolist() == tree_alone.parents.tolist()
            assert path == path_alone
        uneven |= len(rounds) != len(batch.trees)
    assert uneven


# --- padding --------------------------------------------------------------------------------------------------------


def test_the_cache_is_never_longer_than_its_longest_row(model, monkeypatch):
    """During a verification the trees' nodes come on top; in a window, what the window reaches and they."""
    inputs = make_inputs(4)
    arguments = make_arguments(inputs, eos_token_id=end_tokens_of(model, inputs), max_new_tokens=40)
    plain = model.generate(**arguments)
    checked = []

    def verify(target, trees, greedy=None):
        longest = max(target.rows.lengths)
        check(target.cache, longest, 0)
        verification = original(target, trees, greedy)
        check(target.cache, longest, max(map(len, trees)))
        checked.append(longest - min(target.rows.lengths))
        return verification

    def check(cache, longest, num_nodes):
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                assert layer.conv_states[0].shape[-1] <= layer.conv_kernel_size[0] + num_nodes
            elif isinstance(layer, DynamicSlidingWindowLayer):
                assert layer.keys.shape[-2] == layer.values.shape[-2] == min(longest, WINDOW - 1) + num_nodes
            else:
                assert layer.keys.shape[-2] == layer.values.shape[-2] == longest + num_nodes

    original = CachedModel.verify
    monkeypatch.setattr(CachedModel, "verify", verify)
    tree = by_tree(model, plain, **arguments)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert len(checked) > 3 and max(checked) > 3


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_the_drafter_s_context_is_bounded(kind):
    """Each round another row, or always the same one, accepts much and the others little; drafts stay each row's."""
    target = make_model("llama", "sdpa")
    drafter, config, num_rows = make_drafter(target, kind), DDTreeConfig(tree_budget=8), 5
    features = torch.randn(num_rows, 400, 2 * target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    roots = torch.randint(VOCAB_SIZE, (60, num_rows, 1), generator=torch.Generator().manual_seed(2))
    for rotates in (True, False):
        generators = [DFlashTreeCandidateGenerator(drafter, target, config) for _ in range(1 + num_rows)]
        together, *alone = generators
        lengths, contexts = [0] * num_rows, [0]
        for step in range(60):
            counts = [6 if row == (step % num_rows if rotates else 0) else 1 for row in range(num_rows)]
            new = [features[row, lengths[row] : lengths[row] + count] for row, count in enumerate(counts)]
            lengths = [length + count for length, count in zip(lengths, counts)]
            padded = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=9.0)
            trees = together.propose(DraftContext(roots[step], lengths, together.reduce_features(padded), counts), 8)
            contexts.append(together.state.cache.get_seq_length())
            assert contexts[-1] <= 2 * max(lengths) + MOST_PADDING
            for row, generator in enumerate(alone):
                reduced = generator.reduce_features(new[row][None])
                context = DraftContext(roots[step, row, None], [lengths[row]], reduced, [counts[row]])
                [tree] = generator.propose(context, 8)
                assert tree.token_ids.tolist() == trees[row].token_ids.tolist()
                assert tree.parents.tolist() == trees[row].parents.tolist()
                assert_close(tree.log_probs, trees[row].log_probs)
        # Where the same row leads throughout, the context is as long as that row and nothing is dropped.
        assert any(later < earlier for earlier, later in zip(contexts, contexts[1:])) == rotates


class Lagging(TreeCandidateGenerator):
    """Drafts the truth for the first row in the first rounds, then nothing for anyone, while rows are apart."""

    def __init__(self, sequences):
        super().__init__()
        self._sequences, self._rounds = sequences, 0

    def propose(self, context, budget):
        self._rounds += 1
        trees = [DraftTree.root_only(token) for token in context.input_ids[:, -1].tolist()]
        if self._rounds <= 2:
            done = context.root_positions[0] + 1
            chain = self._sequences[0, done - 1 : done + 3].tolist()
            trees[0] = DraftTree.from_parents(chain, list(range(-1, len(chain) - 1)))
        return trees


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_rows_that_are_apart_and_draft_nothing(family):
    """A round that accepts all that was fed still finds rows of different lengths."""
    model = make_model(family, first_implementation(family))
    prompt = torch.cat([make_prompt(seed) for seed in range(3)])
    plain = model.generate(prompt, max_new_tokens=24, do_sample=False)
    tree = model.generate(
        prompt, max_new_tokens=24, do_sample=False, generation_strategy="ddtree", candidate_generator=Lagging(plain)
    )
    assert tree.tolist() == plain.tolist()
