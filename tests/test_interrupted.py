"""Whatever ends a call early, a cache that was passed in can be continued, or says that it cannot."""

from __future__ import annotations

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from transformers import DynamicCache

from hf_ddtree import BudgetPolicy
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.testing import OracleTreeCandidateGenerator

FAMILIES = ["llama", "gemma3", "qwen3_5", "falcon_h1", "nemotron_h", "lfm2"]
NEW_TOKENS = 24


class Emitted:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        pass


class InterruptAt:
    """Raises `KeyboardInterrupt` in the middle of a model's forward number `number`."""

    def __init__(self, model, number):
        self._left = number
        layers = model.get_decoder().layers
        self._hook = layers[len(layers) // 2].register_forward_hook(self._count)

    def _count(self, *_):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self._hook.remove()
        return kind is KeyboardInterrupt


class NothingDrafted(BudgetPolicy):
    """Decodes one token per round."""

    def nodes_to_draft(self, num_cached, num_rows):
        return 0


def make_prompt(rows=1, length=13):
    return torch.randint(1, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(length))


def generate(model, input_ids, **kwargs):
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)


def by_tree(sequences, accuracy=0.7):
    oracle = OracleTreeCandidateGenerator(sequences, VOCAB_SIZE, accuracy=accuracy, max_depth=4)
    return {"generation_strategy": "ddtree", "candidate_generator": oracle, "tree_budget": 8}


@pytest.mark.core
@pytest.mark.parametrize("accuracy", [0.7, 0.0], ids=["trees", "roots"])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_that_is_interrupted(family, number, accuracy):
    """In the prefill, in the first round and in a later one; at accuracy 0 with a policy that drafts nothing."""
    model = make_model(family, first_implementation(family))
    prompt = make_prompt()
    expected = generate(model, prompt)
    cache, streamer = DynamicCache(config=model.config), Emitted()
    drafting = by_tree(expected, accuracy) | ({} if accuracy else {"tree_budget": NothingDrafted()})
    with InterruptAt(model, number):
        generate(model, prompt, streamer=streamer, **{CACHE_KEY: cache}, **drafting)
    emitted = torch.tensor([streamer.tokens])
    assert cache.get_seq_length() == (0 if number == 1 else emitted.shape[1] - 1)
    left = prompt.shape[1] + NEW_TOKENS - emitted.shape[1]
    got = generate(model, emitted, max_new_tokens=left, **{CACHE_KEY: cache})
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_interrupted_turn_that_continues_a_cache(family):
    model = make_model(family, first_implementation(family))
    first = generate(model, make_prompt(), return_dict_in_generate=True)
    second_prompt = torch.cat((first.sequences, make_prompt(length=5)), dim=1)
    expected = generate(model, second_prompt)
    cache, streamer = first[CACHE_KEY], Emitted()
    with InterruptAt(model, 1):
        generate(model, second_prompt, **{CACHE_KEY: cache}, **by_tree(expected))
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    with InterruptAt(model, 3):
        generate(model, second_prompt, streamer=streamer, **{CACHE_KEY: cache}, **by_tree(expected))
    emitted = torch.tensor([streamer.tokens])
    left = second_prompt.shape[1] + NEW_TOKENS - emitted.shape[1]
    assert torch.equal(generate(model, emitted, max_new_tokens=left, **{CACHE_KEY: cache}), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_independent_rows_of_different_lengths_cannot_be_continued(family):
    model = make_model(family, first_implementation(family))
    prompt = make_prompt(rows=2)
    expected = generate(model, prompt)
    spoiled = expected.clone()
    spoiled[1, prompt.shape[1] + 1 :] = (spoiled[1, prompt.shape[1] + 1 :] + 1) % VOCAB_SIZE  # never right in row 1
    cache = DynamicCache(config=model.config)
    with InterruptAt(model, 4):
        generate(model, prompt, **{CACHE_KEY: cache}, **by_tree(spoiled, accuracy=1.0))
    with pytest.raises(RuntimeError, match="interrupted while its rows had different lengths"):
        generate(model, expected[:, : prompt.shape[1] + 10], **{CACHE_KEY: cache})
    assert torch.equal(generate(model, prompt), expected)
