"""Sampling: the distribution is the target's, and a seed gives what it gives in standard decoding."""

import itertools
import random

import pytest
import torch
import transformers
from helpers.families import make_config, make_model
from helpers.side_by_side import assert_equal, plain_and_tree
from scipy.stats import chisquare
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.attention import dispatch
from hf_ddtree.decoding.acceptance import accept_in_lockstep
from hf_ddtree.decoding.choosing import Chooser
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.cache_rows import CommittedRows
from hf_ddtree.target.model import CachedModel

VOCAB_SIZE = 16
NEW_TOKENS = 3
NUM_SAMPLES = 20_000
PROMPT = (3, 9, 9, 1)
# How many trees there are to draw from after a prefix of each length.
NUM_TREES = (12, 4, 1)

CASES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "combined": {"repetition_penalty": 1.5, "temperature": 0.7, "top_k": 8, "top_p": 0.9},
}
PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}


# --- the target, its exact distribution, and trees with its logits --------------------------------------------------


@pytest.fixture(scope="module")
def model():
    config = make_config("qwen3_5")
    config.vocab_size = VOCAB_SIZE
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def logits_after(model):
    """The target's logits after the prompt and each continuation, by one plain forward over all of them."""
    pairs = list(itertools.product(range(VOCAB_SIZE), repeat=2))
    logits = model(torch.tensor([(*PROMPT, *pair) for pair in pairs])).logits[:, len(PROMPT) - 1 :]
    after = {(): logits[0, 0]}
    for (first, second), row in zip(pairs, logits):
        after[first,] = row[1]
        after[first, second] = row[2]
    return after


def make_processors(case):
    return LogitsProcessorList([PROCESSORS[name](value) for name, value in CASES[case].items()])


def exact_distribution(logits_after, case):
    """`(16, 16, 16)`, the probability of each continuation."""
    processors = make_processors(case)

    def next_probabilities(prefix):
        return (
            processors(torch.tensor([[*PROMPT, *prefix]]), logits_after[prefix][None].clone())[0].softmax(-1).double()
        )

    probabilities = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    first = next_probabilities(())
    for a in range(VOCAB_SIZE):
        second = next_probabilities((a,))
        for b in range(VOCAB_SIZE):
            probabilities[a, b] = first[a] * second[b] * next_probabilities((a, b))
    return probabilities


def random_tree(rng, root, num_drafted):
    """Half of the vocabulary below the root and below some of its descendants."""
    tokens, parents, leaves = [root], [-1], [0]
    while len(tokens) <= num_drafted:
        parent = leaves.pop(rng.randrange(len(leaves)))
        children = rng.sample(range(VOCAB_SIZE), min(VOCAB_SIZE // 2, num_drafted + 1 - len(tokens)))
        leaves += range(len(tokens), len(tokens) + len(children))
        tokens += children
        parents += [parent] * len(children)
    return DraftTree.from_parents(tokens, parents)


@pytest.fixture(scope="module")
def verified_trees(model):
    """Several random trees after every prefix, each with the logits that the target gives to its nodes."""
    rng = random.Random(0)
    dispatch.install(model)
    verified = {}
    for length, num_trees in enumerate(NUM_TREES):
        for prefix in itertools.product(range(VOCAB_SIZE), repeat=length):
            tokens = torch.tensor([[*PROMPT, *prefix]])
            for _ in range(num_trees):
                cache = model(tokens[:, :-1], use_cache=True)[CACHE_KEY]
                kwargs = {CACHE_KEY: cache, "position_ids": torch.arange(tokens.shape[1])[None], "use_cache": True}
                rows = CommittedRows(tokens.shape[1] - 1, kwargs, batch_size=1, device=model.device)
                tree = random_tree(rng, int(tokens[0, -1]), rng.randint(8, 40))
                cached_model = CachedModel(model, kwargs, rows)
                with cached_model.recording_past():
                    logits = cached_model.verify([tree]).logits[0]
                verified.setdefault(prefix, []).append((tree, logits))
    return verified


def test_trees_have_the_logits_of_plain_forwards(verified_trees, logits_after):
    for prefix, trees in verified_trees.items():
        for tree, logits in trees:
            for node in range(len(tree)):
                continuation = prefix + tuple(tree.tokens_of(tree.path(node))[1:])
                if len(continuation) < NEW_TOKENS:
                    torch.testing.assert_close(logits[node], logits_after[continuation], rtol=1e-4, atol=1e-4)


# --- 20,000 samples -------------------------------------------------------------------------------------------------


class Continuation:
    """A sequence that ends after three tokens."""

    def __init__(self):
        self._buffer = torch.tensor([[*PROMPT, 0, 0, 0]])
        self.tokens = ()

    @property
    def token_ids(self):
        return self._buffer[:, : len(PROMPT) + len(self.tokens)]

    @property
    def finished(self):
        return len(self.tokens) == NEW_TOKENS

    def append(self, choices):
        self._buffer[0, len(PROMPT) + len(self.tokens)] = choices.tokens[0]
        self.tokens += tuple(choices.tokens)
        return choices.tokens


@torch.inference_mode()
def sample_counts(verified_trees, chooser, num_samples=NUM_SAMPLES):
    """How often each continuation comes out, and the mean accepted length of a round."""
    rng = random.Random(1)
    torch.manual_seed(1)
    samples, num_rounds = [], 0
    for _ in range(num_samples):
        sequence = Continuation()
        while not sequence.finished:
            tree, logits = rng.choice(verified_trees[sequence.tokens])
            chooser.tree = tree
            accept_in_lockstep([tree], logits[None], chooser, sequence, [[0]])
            num_rounds += 1
        samples.append(sequence.tokens)
    return count(samples), num_samples * NEW_TOKENS / num_rounds


def count(samples):
    """`(16, 16, 16)`, how often each continuation is among the samples."""
    a, b, c = torch.tensor(samples).T
    flat = torch.bincount((a * VOCAB_SIZE + b) * VOCAB_SIZE + c, minlength=VOCAB_SIZE**3)
    return flat.double().view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)


def p_value(counts, probabilities):
    """Of the chi-square test; what is expected less than five times counts as one outcome."""
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    possible = expected > 0
    assert not observed[~possible].any()
    return chisquare(observed[possible], expected[possible]).pvalue


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_distribution_of_the_target(case, verified_trees, logits_after):
    probabilities = exact_distribution(logits_after, case)
    counts, accepted_length = sample_counts(verified_trees, Chooser(make_processors(case), do_sample=True))
    assert not counts[probabilities == 0].any()
    assert accepted_length > 1.2
    assert p_value(counts, probabilities) > 0.001


class WrongChooser(Chooser):
    """Knows the tree, and may choose another token than the target's."""

    def choose(self, nodes, emitted):
        choices = super().choose(nodes, emitted)
        scores = choices.logits if choices.scores is None else choices.scores
        children = self.tree.token_ids[self.tree.parents == nodes[0]]
        if len(children):
            choices.tokens[0] = self.choose_wrongly(children, scores[0], choices.tokens[0])
        return choices


class TakesTheMostProbableChild(WrongChooser):
    """Never leaves the tree while it can stay in it."""

    def choose_wrongly(self, children, scores, right):
        return int(children[scores[children].argmax()])


class ResamplesFromTheUnmodifiedDistribution(WrongChooser):
    """A classic: tries each child with its probability, then draws as if nothing had been rejected."""

    def choose_wrongly(self, children, scores, right):
        probabilities = scores.softmax(-1)
        return next((token for token in children.tolist() if torch.rand(()) < probabilities[token]), right)


class LooksAtTheParent(Chooser):
    """Off by one node."""

    def choose(self, nodes, emitted):
        return super().choose([max(0, int(self.tree.parents[nodes[0]]))], emitted)


@pytest.mark.parametrize(
    "wrong", [TakesTheMostProbableChild, ResamplesFromTheUnmodifiedDistribution, LooksAtTheParent]
)
@pytest.mark.parametrize("case", ["temperature", "repetition_penalty"])
def test_the_test_fails_for_wrong_rules(case, wrong, verified_trees, logits_after):
    chooser = wrong(make_processors(case), do_sample=True)
    counts, _ = sample_counts(verified_trees, chooser, num_samples=5_000)
    assert p_value(counts, exact_distribution(logits_after, case)) < 1e-9


# --- through generate() ---------------------------------------------------------------------------------------------


class RandomTrees(hf_ddtree.TreeCandidateGenerator):
    """Proposes random trees in which tokens have several siblings."""

    def __init__(self):
        super().__init__()
        self.rng = random.Random(2)

    def propose(self, context, budget):
        return [random_tree(self.rng, int(context.input_ids[0, -1]), budget)]


def test_generate_has_the_distribution_of_the_target(model, logits_after):
    generator, samples, lengths = RandomTrees(), [], []
    torch.manual_seed(3)
    for _ in range(400):
        output = model.generate(
            torch.tensor([PROMPT]),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            generation_strategy="ddtree",
            candidate_generator=generator,
            tree_budget=24,
            return_dict_in_generate=True,
            **{"top_k": 0} | CASES["combined"],
        )
        samples.append(output.sequences[0, len(PROMPT) :].tolist())
        lengths += output.ddtree_stats.accepted_lengths
    assert sum(lengths) > 1.2 * len(lengths)
    assert p_value(count(samples), exact_distribution(logits_after, "combined")) > 0.001


SEEDED = {
    "pure": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "warm_min_p": {"temperature": 1.8, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.3, "top_p": 0.9},
    "everything": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_new_tokens": 5,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "renormalize_logits": True,
    },
}


@pytest.mark.core
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", SEEDED)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_seed_gives_the_tokens_of_plain_sampling(family, case, seed):
    arguments = {"do_sample": True, "top_k": 0} | SEEDED[case]
    plain, tree = plain_and_tree(make_model(family, "sdpa"), lambda: arguments, seed=seed)
    assert_equal(plain, tree)
    assert plain.sequences.shape[1] < 20 or tree.ddtree_stats.tokens_per_forward > 1.5


def test_seeds_differ_and_runs_do_not():
    tokens = []
    for seed in (0, 1, 0):
        _, tree = plain_and_tree(make_model("qwen3_5", "sdpa"), lambda: {"do_sample": True}, seed=seed)
        tokens.append(tree.sequences.tolist())
    assert tokens[0] == tokens[2] != tokens[1]


def test_cold_sampling_is_greedy():
    model = make_model("qwen3_5", "sdpa")
    greedy, _ = plain_and_tree(model, dict)
    _, cold = plain_and_tree(model, lambda: {"do_sample": True, "temperature": 1e-4})
    assert cold.sequences.tolist() == greedy.sequences.tolist()


def test_rows_apart_give_the_same_tokens_again_with_a_fixed_budget():
    """Whatever the drafter has learned in between, if it is not used."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    rows = tokenizer(["def f(x):\n", "class A:\n"], return_tensors="pt", padding=True, padding_side="left")
    arguments = {"max_new_tokens": 32, "do_sample": True, "assistant_model": drafter, "tree_budget": 16}
    arguments["tree_probabilities"] = "marginal"
    outputs = []
    for calibrate in (False, True, False):
        torch.manual_seed(0)
        out = model.generate(**rows, **arguments, generation_strategy="ddtree", calibrate=calibrate)
        outputs.append(out.tolist())
    assert outputs[0] == outputs[2]
    drafter.calibration = hf_ddtree.Calibration()
    torch.manual_seed(0)
    assert model.generate(**rows, **arguments, generation_strategy="ddtree").tolist() == outputs[1]
