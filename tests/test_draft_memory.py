"""Successor tables and the memory across calls: what they learn, how they are bounded, and that no token changes."""

import copy
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.generator_grid import CALLS, check_call
from helpers.side_by_side import make_prompt
from safetensors.numpy import load_file, save_file

import hf_ddtree
from hf_ddtree import DraftMemory
from hf_ddtree.draft_memory import successor_tables
from hf_ddtree.draft_memory.memory import BYTES_PER_TOKEN, LEAST_BYTES
from hf_ddtree.draft_memory.successor_tables import (
    DECAY,
    LATELY_SHARE,
    PRIOR_WEIGHT,
    SKIP_PRIOR_WEIGHT,
    SKIP_SHARE,
    SuccessorTables,
)


def teach(tables, context, following, probs):
    tables.teach(np.array([context]), np.array([following]), np.array([probs], dtype=np.float32))


def by_token(found):
    return {token: prob for token, prob in zip(*found) if prob > 0}


class Tokenizer:
    def __init__(self, *words):
        self._vocab = {word: place for place, word in enumerate(words)}

    def get_vocab(self):
        return self._vocab


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_context_moves_from_the_shorter_ones_to_what_was_said():
    tables = SuccessorTables()
    teach(tables, (1, 2, 3), (10, 11), (0.8, 0.2))
    share = 1 / (1 + PRIOR_WEIGHT)
    assert by_token(tables.successors((1, 2, 3)))[10] == pytest.approx(0.8 * share)
    # A new context begins with what the shorter one says.
    teach(tables, (4, 2, 3), (12,), (1.0,))
    of_longer, of_shorter = (by_token(tables.successors(context)) for context in ((4, 2, 3), (9, 2, 3)))
    assert of_longer[12] == pytest.approx(share)
    assert of_longer[10] == pytest.approx(0.8 * share * (1 - share))
    assert of_shorter[10] > of_longer[10]
    # Of an unknown token, what followed the one before it, and what was said lately.
    assert by_token(tables.successors((9, 2, 9)))[10] > by_token(tables.successors((9, 9, 9)))[10] > 0


@pytest.mark.core
def test_later_observations_count_more():
    tables = SuccessorTables(longest_context=1)
    for token in (10,) * 5 + (11,) * 5:
        teach(tables, (-1, -1, 3), (token,), (1.0,))
    seen = by_token(tables.successors((-1, -1, 3)))
    old, new = sum(DECAY**age for age in range(5, 10)), sum(DECAY**age for age in range(5))
    assert 1.3 < seen[11] / seen[10] <= new / old


@pytest.mark.core
@pytest.mark.parametrize("seed", range(10))
def test_probabilities_fall_and_sum_to_at_most_one(seed):
    draw = np.random.default_rng(seed)
    tables = SuccessorTables()
    for _ in range(20):
        contexts = draw.integers(-1, 6, (draw.integers(1, 30), 3))
        probs = -np.sort(-draw.dirichlet(np.ones(5), len(contexts)), axis=1).astype(np.float32)
        tokens = draw.permuted(np.tile(np.arange(20), (len(contexts), 1)), axis=1)[:, :5]
        tables.teach(contexts, tokens, probs)
        for context in draw.integers(-1, 7, (10, 3)):
            tokens, probs = tables.successors(context.tolist())
            assert all(one >= other for one, other in zip(probs, probs[1:]))
            assert sum(probs) <= 1 + 1e-4
            kept = [token for token, prob in zip(tokens, probs) if prob > 0]
            assert len(set(kept)) == len(kept)


class PlainTables:
    """What `SuccessorTables` computes, one context at a time."""

    def __init__(self):
        self.counts, self.probs, self.lately = {}, {}, {}

    def begun(self, contexts):
        """The distribution of the longest known of some contexts, given from the longest on."""
        for context in contexts[:-1]:
            if context in self.probs:
                return dict(self.probs[context])
        if (skip := contexts[-1]) in self.probs:
            return {token: SKIP_SHARE * prob for token, prob in self.probs[skip].items()}
        return {token: LATELY_SHARE * prob for token, prob in self.lately.items()}

    def teach(self, contexts, token_ids, probs):
        before, observed = copy.deepcopy(self), {}
        for context, tokens, of_tokens in zip(contexts, token_ids, probs):
            kinds = [tuple(context), tuple(context[1:]), tuple(context[2:]), ("skip", context[1])]
            for place, kind in enumerate(kinds):
                chain, seen = observed.setdefault(kind, (kinds[place:], []))
                seen.append(dict(zip(tokens, of_tokens)))
        for kind, (chain, seen) in observed.items():
            is_skip = kind[0] == "skip"
            if kind not in self.probs:
                self.counts[kind], self.probs[kind] = 0.0, {} if is_skip else before.begun(chain)
            old, prior = self.probs[kind], SKIP_PRIOR_WEIGHT if is_skip else PRIOR_WEIGHT
            faded = DECAY ** len(seen) * self.counts[kind]
            self.counts[kind] = faded + sum(DECAY**age for age in range(len(seen)))
            kept = (faded + prior) / (self.counts[kind] + prior)
            self.probs[kind] = {
                token: kept * old.get(token, 0.0) + (1 - kept) * sum(one.get(token, 0.0) for one in seen) / len(seen)
                for token in {*old, *itertools.chain(*seen)}
            }
        kept = DECAY ** len(probs)
        self.lately = {token: kept * prob for token, prob in self.lately.items()}
        for token, prob in zip(token_ids.ravel(), probs.ravel()):
            self.lately[token] = self.lately.get(token, 0.0) + (1 - kept) * prob / len(probs)


@pytest.mark.core
@pytest.mark.parametrize("seed", range(10))
def test_tables_are_those_of_a_plain_computation(seed):
    draw = np.random.default_rng(seed)
    tables, plain = SuccessorTables(), PlainTables()
    for _ in range(8):
        contexts = draw.integers(-1, 5, (draw.integers(1, 25), 3))
        probs = -np.sort(-draw.dirichlet(np.ones(4), len(contexts)), axis=1).astype(np.float32)
        tokens = draw.permuted(np.tile(np.arange(10), (len(contexts), 1)), axis=1)[:, :4]
        tables.teach(contexts, tokens, probs)
        plain.teach(contexts.tolist(), tokens, probs)
        for context in draw.integers(-1, 5, (20, 3)).tolist():
            found = by_token(tables.successors(context))
            for known in filter(plain.probs.get, (tuple(context[first:]) for first in range(3))):
                expected = {token: prob for token, prob in plain.probs[known].items() if prob > 0}
                assert found == pytest.approx(expected, abs=1e-5)
                break


def test_what_gives_no_distribution_teaches_nothing():
    tables = SuccessorTables()
    teach(tables, (1, 2, 3), (10, 11), (0.0, 0.0))
    assert len(tables) == 0 and not by_token(tables.successors((1, 2, 3)))


def test_tables_are_bounded(monkeypatch):
    """The contexts that were used last are kept."""
    monkeypatch.setattr(successor_tables, "FIRST_CAPACITY", 16)
    tables = SuccessorTables(most_slots=100)
    teach(tables, (1, 2, 3), (10,), (0.9,))
    for token in range(1000, 1100):
        teach(tables, (token, token + 1, token + 2), (11,), (0.9,))
        assert by_token(tables.successors((1, 2, 3)))[10] > 0.5
        assert len(tables) <= 100
    assert 11 in by_token(tables.successors((1099, 1100, 1101)))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_past_texts_are_bounded_and_the_used_ones_are_kept():
    memory = DraftMemory(max_bytes=LEAST_BYTES)
    first = list(range(20))
    memory.add_text(first)
    for start in range(100, 10000, 50):
        memory.add_text(range(start, start + 50))
        texts, found = memory.matches(first[:10], 3)
        assert [texts[one.end + 1] for one in found] == [10]
        assert memory.num_bytes <= LEAST_BYTES
    assert len(memory._index.tokens) * BYTES_PER_TOKEN <= LEAST_BYTES


@pytest.mark.core
def test_save_and_load(tmp_path):
    memory = DraftMemory(tokenizer=Tokenizer("a", "b"))
    memory.check_vocabulary(100)
    memory.add_text(range(20))
    teach(memory.tables, (1, 2, 3), (10, 11), (0.8, 0.2))
    memory.match_accuracy.observe(4, was_right=False)
    memory.save(tmp_path / "memory.safetensors")
    loaded = DraftMemory.load(tmp_path / "memory.safetensors", tokenizer=Tokenizer("a", "b"))
    assert loaded.match_accuracy(4) == memory.match_accuracy(4) < DraftMemory().match_accuracy(4)
    assert loaded.tables.successors((1, 2, 3)) == memory.tables.successors((1, 2, 3))
    texts, found = loaded.matches([3, 4, 5, 6], 3)
    assert [texts[one.end + 1] for one in found] == [7]
    with pytest.raises(ValueError, match="vocabulary of 100, but the model has 64"):
        loaded.check_vocabulary(64)
    with pytest.raises(ValueError, match="another tokenizer"):
        DraftMemory.load(tmp_path / "memory.safetensors", tokenizer=Tokenizer("a", "c"))


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path):
    path, model = tmp_path / "memory.safetensors", make_model("llama", "sdpa")
    call = {"generation_strategy": "ddtree", "tree_lookup": True, "max_new_tokens": 3, "do_sample": False}
    for name, vocab_size in (("texts", 0), ("tokens", 0), ("texts", VOCAB_SIZE), ("tokens", VOCAB_SIZE)):
        memory = DraftMemory()
        memory.add_text([1, 2, VOCAB_SIZE if name == "texts" else 3, 4, 5, 6])
        teach(memory.tables, (1, 2, 3), (VOCAB_SIZE if name == "tokens" else 10,), (0.8,))
        memory.save(path)
        save_file(
            load_file(path), path, metadata={"format": "hf_ddtree draft memory 1", "vocab_size": str(vocab_size)}
        )
        with pytest.raises(ValueError, match="vocabulary"):
            model.generate(make_prompt(), **call, draft_memory=DraftMemory.load(path))
    arrays = load_file(path)
    arrays["tokens"][...] = -1
    save_file(arrays, path, metadata={"format": "hf_ddtree draft memory 1", "vocab_size": "0"})
    with pytest.raises(ValueError, match="out of range"):
        DraftMemory.load(path)
    save_file(
        arrays | {"codes": np.array(3)}, path, metadata={"format": "hf_ddtree draft memory 1", "vocab_size": "0"}
    )
    with pytest.raises(ValueError, match="no file that"):
        DraftMemory.load(path)
    with pytest.raises(OSError, match="cannot be written"):
        DraftMemory().save(tmp_path / "missing" / "memory.safetensors")


def test_matches_in_past_texts_are_as_long_as_they_are_and_trusted_as_they_were_right():
    memory = DraftMemory()
    memory.add_text([90, 91, 3, 4, 5, 6, 7, 8, 50, 51])
    memory.add_text([92, 93, 94, 95, 5, 6, 7, 8, 60, 61])
    texts, found = memory.matches([1, 91, 3, 4, 5, 6, 7, 8], 3)
    assert [(texts[one.end + 1], one.length) for one in found] == [(50, 7), (60, 4)]
    accuracy = memory.match_accuracy
    before = [accuracy(length) for length in (4, 8, 16)]
    accuracy.observe_prediction(6, [1, 2, 3, 4, 5], [1, 2, 3, 9, 5])
    after = [accuracy(length) for length in (4, 8, 16)]
    # Right at lengths 6, 7 and 8, wrong at 9, and what follows is not looked at.
    assert after[0] > before[0] and after[2] == before[2]
    assert after[1] == pytest.approx((before[1] * 4 + 1) / 6)
    accuracy.observe_prediction(16, [7, -1, 7], [7, 7, 7])
    assert accuracy(16) == pytest.approx((before[2] * 4 + 1) / 5)


def test_what_is_no_memory_is_refused(tmp_path):
    path = tmp_path / "memory.safetensors"
    path.write_bytes(b"no file of tensors")
    with pytest.raises(ValueError, match="no file that `DraftMemory.save` wrote"):
        DraftMemory.load(path)
    save_file({"texts": np.zeros(3, dtype=np.int32)}, path)
    with pytest.raises(ValueError, match="format"):
        DraftMemory.load(path)
    memory = DraftMemory()
    teach(memory.tables, (1, 2, 3), (10,), (0.8,))
    memory.save(path)
    arrays = load_file(path)
    wrongs = (
        ("probs", np.float32("nan")),
        ("counts", np.float32(-1)),
        ("tokens", np.int32(-7)),
        ("match_accuracy", np.nan),
    )
    for name, wrong in wrongs:
        bad = {key: value.copy() for key, value in arrays.items()}
        bad[name][...] = wrong
        save_file(bad, path, metadata={"format": "hf_ddtree draft memory 1", "vocab_size": "0"})
        with pytest.raises(ValueError, match="out of range|no counts"):
            DraftMemory.load(path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"draft_memory": "yes", "tree_lookup": True}, TypeError, "`draft_memory`"),
        ({"draft_memory": DraftMemory(), "candidate_generator": None, "tree_lookup": False}, ValueError, "assistant"),
    ],
)
def test_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        hf_ddtree.ddtree(**arguments)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="at least 1048576"):
        DraftMemory(max_bytes=100)


@pytest.mark.core
def test_the_same_prompt_again_takes_fewer_forwards():
    model = make_model("llama", "sdpa")
    memory = DraftMemory()
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(make_prompt(), **options).sequences.tolist()
    forwards = []
    for _ in range(2):
        out = model.generate(
            make_prompt(),
            **options,
            generation_strategy="ddtree",
            tree_lookup=True,
            tree_budget=12,
            draft_memory=memory,
        )
        assert out.sequences.tolist() == expected
        forwards.append(out.ddtree_stats.target_forwards)
    assert forwards[1] <= 8 < forwards[0]
    assert len(memory._texts) == 2


def poisoned(seed):
    """A memory that is sure of wrong tokens everywhere."""
    draw = np.random.default_rng(seed)
    memory = DraftMemory(max_bytes=1 << 22)
    contexts = draw.integers(-1, VOCAB_SIZE, (3000, 3))
    tokens = draw.integers(0, VOCAB_SIZE, (3000, 8))
    memory.tables.teach(contexts, tokens, np.full((3000, 8), 0.12, dtype=np.float32))
    memory.add_text(draw.integers(0, VOCAB_SIZE, 2000).tolist())
    return memory


@pytest.mark.core
@pytest.mark.parametrize("call", CALLS)
def test_grid_with_a_poisoned_memory(call):
    memory = poisoned(len(call))
    check_call(
        make_model("qwen3_5", "sdpa"),
        call,
        lambda model: {"tree_lookup": True, "tree_budget": 9, "draft_memory": memory},
    )


@pytest.mark.parametrize("seed", range(50))
def test_drawn_cases(seed):
    """Arguments, budgets, shapes, sources and memories at random."""
    draw = random.Random(seed)
    model = make_model(draw.choice(["llama", "qwen3_5", "mistral"]), "sdpa")
    drafts = {
        "tree_lookup": draw.choice([True, "text", "target"]),
        "tree_budget": draw.choice([1, 2, 5, 16, 40, "auto"]),
        "tree_shape": draw.choice([None, "best_first", "spine_first", "chain"]),
        "tree_top_k": draw.choice([None, None, 1, 3]),
        "draft_length": draw.choice([None, None, 2, 7]),
        "max_matching_ngram_size": draw.choice([None, None, 1, 2, 4, 9]),
        "draft_memory": draw.choice([None, DraftMemory(), poisoned(seed)]),
    }
    check_call(model, draw.choice(list(CALLS)), lambda model: drafts)


@pytest.mark.core
def test_threads_share_a_memory():
    model = make_model("llama", "sdpa")
    memory = poisoned(0)
    prompts = [make_prompt(seed=seed) for seed in range(4)]
    expected = [model.generate(prompt, max_new_tokens=20, do_sample=False).tolist() for prompt in prompts]
    found = [None] * len(prompts)
    decoding = hf_ddtree.ddtree(tree_lookup=True, tree_budget=8, draft_memory=memory)

    def run(place):
        with torch.no_grad():
            found[place] = model.generate(
                prompts[place], max_new_tokens=20, do_sample=False, custom_generate=decoding
            ).tolist()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
