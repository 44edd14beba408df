"""Logits processors: each sees in tree decoding exactly what it sees in standard decoding, and so gives the same."""

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import NEW_TOKENS, PROMPT_LENGTH, assert_equal, make_prompt, plain_and_tree
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process

from hf_ddtree.decoding.choosing import PER_TOKEN_PROCESSORS

# Tokens that end the continuation of the prompt early.
EOS = {"eos_token_id": [42, 57], "pad_token_id": 0}
BIAS = {"sequence_bias": [[[3], 4.0], [[38, 42], -9.0], [[58, 10], -9.0], [[9, 8, 7], 8.0]]}

ANY_MODE = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[3], [17], [40, 41], [12, 13, 14]]},
    "sequence_bias": BIAS,
    "min_length": {"min_length": PROMPT_LENGTH + 12, **EOS},
    "min_new_tokens": {"min_new_tokens": 12, **EOS},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "forced_bos_token_id": {"forced_bos_token_id": 6, "inputs": make_prompt(length=1)},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3, 40, 41]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, VOCAB_SIZE, 2))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), **EOS},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "watermark_lefthash": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark_selfhash": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "watermark_synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15])},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda _, tokens: [(int(tokens[-1]) * 3 + k) % VOCAB_SIZE for k in range(9)]
    },
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 14,
        "bad_words_ids": [[11, 12]],
        "suppress_tokens": [30],
        **EOS,
    },
}
# What changes no token of a healthy model.
IDLE = {"none", "remove_invalid_values", "renormalize_logits"}
SAMPLING_ONLY = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.5},
    "all_warpers": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.98,
        "epsilon_cutoff": 0.001,
        "eta_cutoff": 0.001,
    },
}


def check(make_arguments, family="qwen3_5", min_accepted=1.4):
    plain, tree = plain_and_tree(make_model(family, "sdpa"), make_arguments)
    assert_equal(plain, tree)
    if plain.sequences.shape[1] == PROMPT_LENGTH + NEW_TOKENS:
        assert tree.ddtree_stats.tokens_per_forward > min_accepted
    return plain, tree


@pytest.mark.core
@pytest.mark.parametrize("name", ANY_MODE)
def test_greedy(name):
    check(lambda: ANY_MODE[name])


@pytest.mark.parametrize("name", ANY_MODE | SAMPLING_ONLY)
def test_sampling(name):
    check(lambda: {"do_sample": True, "top_k": 0} | (ANY_MODE | SAMPLING_ONLY)[name])


@pytest.mark.parametrize("name", sorted(set(ANY_MODE) - IDLE))
def test_the_arguments_make_a_difference(name):
    """The cases above would be idle otherwise."""
    model = make_model("qwen3_5", "sdpa")
    base = {"inputs": make_prompt(), "do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS}
    base |= {key: value for key, value in ANY_MODE[name].items() if key in (*EOS, "inputs")}

    def sample(seed, **arguments):
        torch.manual_seed(seed)
        return model.generate(**base | arguments).tolist()

    assert any(sample(seed, **ANY_MODE[name]) != sample(seed) for seed in range(20))


def test_processors_that_run_at_once_know_nothing_but_their_row():
    """On all nodes at once they give each node what they give it alone."""
    arguments = {
        "EpsilonLogitsWarper": (0.02,),
        "EtaLogitsWarper": (0.02,),
        "MinPLogitsWarper": (0.1,),
        "SuppressTokensLogitsProcessor": ([1, 2],),
        "TemperatureLogitsWarper": (0.7,),
        "TopKLogitsWarper": (5,),
        "TopPLogitsWarper": (0.7,),
        "TypicalLogitsWarper": (0.7,),
    }
    logits = 3 * torch.randn(30, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[7, 3] = torch.nan
    for kind in PER_TOKEN_PROCESSORS:
        rows = logits if kind is logits_process.InfNanRemoveLogitsProcessor else logits.nan_to_num()
        processor = kind(*arguments.get(kind.__name__, ()))
        alone = torch.cat([processor(make_prompt(), row[None].clone()) for row in rows])
        before = rows.clone()
        torch.testing.assert_close(processor(make_prompt().expand(30, -1), rows), alone, rtol=0, atol=0)
        torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


# --- written by the user --------------------------------------------------------------------------------------------


class Recorder(LogitsProcessor):
    """Changes nothing; keeps every `input_ids` and `scores` that it sees."""

    def __init__(self):
        self.seen, self.scores = [], []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1 and scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        self.scores.append(scores.clone())
        return scores


class Counter(LogitsProcessor):
    """Forbids tokens by the number of times that it was called, so one call more or less changes the output."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 7 :: 7] = -torch.inf
        return scores


class Automaton(LogitsProcessor):
    """Advances a state with each new token, as grammar-constrained decoding does, and fails if any is left out."""

    def __init__(self):
        self.state, self.length = 0, None

    def __call__(self, input_ids, scores):
        assert self.length is None or input_ids.shape[1] == self.length + 1
        self.length = input_ids.shape[1]
        self.state = (5 * self.state + int(input_ids[0, -1])) % 11
        mask = torch.full_like(scores, -torch.inf)
        mask[:, self.state :: 11] = 0
        mask[:, (self.state + 4) % 11 :: 11] = 0
        return scores + mask


class InPlace(LogitsProcessor):
    """Writes into the scores that it gets."""

    def __call__(self, input_ids, scores):
        scores[:, int(input_ids[0, -1])] -= 4.0
        return scores


class Warped(logits_process.TemperatureLogitsWarper):
    """Derived from a processor that looks at single rows, but does look back."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores) + 3.0 * (torch.arange(VOCAB_SIZE) % 5 == int(input_ids[0, -1]) % 5)


@pytest.mark.core
@pytest.mark.parametrize("do_sample", [False, True])
def test_each_call_sees_the_emitted_sequence_grow_by_one_token(do_sample):
    recorders = []

    def arguments():
        recorders.append(Recorder())
        return {"do_sample": do_sample, "logits_processor": LogitsProcessorList([recorders[-1]])}

    plain, tree = check(arguments)
    sequence = plain.sequences[0].tolist()
    expected = [sequence[:end] for end in range(PROMPT_LENGTH, len(sequence))]
    assert recorders[0].seen == expected
    assert recorders[1].seen == expected
    for got, wanted in zip(recorders[1].scores, recorders[0].scores):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", [Counter, Automaton])
def test_stateful_processors(kind, do_sample):
    check(lambda: {"do_sample": do_sample, "logits_processor": [kind()]})


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_that_write_in_place(do_sample):
    # Standard decoding returns the written-to scores as logits, so these are not compared.
    model = make_model("qwen3_5", "sdpa")
    arguments = {"do_sample": do_sample, "logits_processor": [InPlace()], "output_logits": False}
    plain, tree = plain_and_tree(model, lambda: arguments)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.cat(tree.scores), torch.cat(plain.scores), rtol=1e-4, atol=1e-4)


def test_processors_derived_from_those_that_run_at_once_are_asked_one_by_one():
    check(lambda: {"logits_processor": [Warped(0.5)]})


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_other_families(family):
    check(lambda: {"do_sample": True, "logits_processor": [Counter()], **ANY_MODE["several"]}, family)


def test_user_written_and_built_in_processors_keep_their_order():
    arguments = {**BIAS, "renormalize_logits": True, "output_logits": False}
    check(lambda: {"logits_processor": [InPlace(), Counter()], **arguments})
