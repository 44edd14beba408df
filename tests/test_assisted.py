"""The package's generators inside Transformers' own assisted decoding, through `get_candidates`."""

import functools
import itertools

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import NEW_TOKENS, PROMPT_LENGTH, make_oracle, make_prompt

import hf_ddtree
from hf_ddtree import DFlashTreeCandidateGenerator, DraftTree
from hf_ddtree.drafters import DFlashDraftModel
from hf_ddtree.drafters.dflash import DFlashConfig
from hf_ddtree.target.features import FeatureRecorder

# Models whose state Transformers can roll back by itself.
FAMILIES = ["llama", "mistral", "gemma3", "qwen3_moe"]


def make_drafter(model):
    config = DFlashConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        block_size=5,
        target_layer_ids=[1, 0],
        mask_token_id=VOCAB_SIZE - 1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return DFlashDraftModel(config).eval()


class Seeing(hf_ddtree.TreeCandidateGenerator):
    """Drafts what an oracle drafts, and keeps the features that it gets."""

    feature_layers = (1, 0)

    def __init__(self, oracle):
        super().__init__()
        self.oracle, self.features, self.positions = oracle, [], []

    def propose(self, context, budget):
        assert context.features.shape[:2] == (1, context.num_features[0])
        self.features.append(context.features)
        self.positions.append(context.root_positions[0])
        return self.oracle.propose(context, budget)


@pytest.fixture
def assisted(monkeypatch):
    """Generates by Transformers' assisted decoding with a generator of the package; counts the target's forwards."""

    def generate(model, generator, **kwargs):
        forwards = 0
        forward = type(model).forward

        @functools.wraps(forward)
        def counted(*args, **kwargs):
            nonlocal forwards
            forwards += 1
            return forward(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(model), "_get_candidate_generator", lambda self, **_: generator, raising=False)
            patch.setattr(type(model), "forward", counted)
            # The argument sends `generate()` into assisted decoding; the generator that it asks for is never made.
            output = model.generate(**kwargs, prompt_lookup_num_tokens=1)
        return output, forwards

    return generate


def padded_prompt():
    prompt = torch.nn.functional.pad(make_prompt(), (5, 0))
    return {"inputs": prompt, "attention_mask": (prompt != 0).long()}


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "how"),
    [(family, {}) for family in FAMILIES]
    + [("llama", how) for how in ({"repetition_penalty": 1.3}, {"max_new_tokens": 7}, padded_prompt())],
)
def test_greedy(assisted, family, how):
    model = make_model(family, "sdpa")
    arguments = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False, **how}
    plain = model.generate(**arguments)
    for generator in (make_oracle(plain), Seeing(make_oracle(plain))):
        output, forwards = assisted(model, generator, **arguments)
        assert output.tolist() == plain.tolist()
        assert forwards < arguments["max_new_tokens"]
    generator = DFlashTreeCandidateGenerator(make_drafter(model), model)
    for _ in range(2):  # what it knows of the first sequence must not reach the second
        output, forwards = assisted(model, generator, **arguments)
        assert output.tolist() == plain.tolist()
        assert generator.num_forwards == forwards - 1
        assert PROMPT_LENGTH < generator.state.cache.get_seq_length() < PROMPT_LENGTH + arguments["max_new_tokens"]


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("how", [{}, padded_prompt()])
def test_features_are_what_the_layers_gave(assisted, family, how):
    """Those of every token before the root, each once, and none of padding."""
    model = make_model(family, "sdpa")
    arguments = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False, **how}
    plain = model.generate(**arguments)
    generator = Seeing(make_oracle(plain))
    assisted(model, generator, **arguments)
    recorder = FeatureRecorder(model, generator.feature_layers)
    with recorder.recording(), torch.no_grad():
        model(plain[:, -PROMPT_LENGTH - NEW_TOKENS :])
    recorder.close()
    expected = recorder.take()
    features = torch.cat(generator.features, dim=1)
    assert features.shape[1] > PROMPT_LENGTH + NEW_TOKENS // 2
    torch.testing.assert_close(features, expected[:, : features.shape[1]], rtol=1e-4, atol=1e-4)
    padding = arguments["inputs"].shape[1] - PROMPT_LENGTH
    seen = itertools.accumulate(step.shape[1] for step in generator.features)
    assert generator.positions == [padding + count for count in seen]


def quantile(probabilities, num_samples):
    """In place of `torch.multinomial`: a draw that nothing but the distribution decides, so that runs compare."""
    where = probabilities.argmax(dim=-1, keepdim=True) * 0.618 % 1
    return (probabilities.cumsum(dim=-1) < where).sum(dim=-1, keepdim=True)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sampling(assisted, family, monkeypatch):
    model = make_model(family, "sdpa")
    arguments = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 1.1}
    greedy = model.generate(**arguments | {"do_sample": False})
    monkeypatch.setattr(torch, "multinomial", quantile)
    plain = model.generate(**arguments)
    assert plain.tolist() != greedy.tolist()
    for generator in (make_oracle(plain), DFlashTreeCandidateGenerator(make_drafter(model), model)):
        assert assisted(model, generator, **arguments)[0].tolist() == plain.tolist()


@pytest.mark.core
@pytest.mark.parametrize("at", [2, 5, 11])
def test_end_tokens_in_the_middle_of_a_chain(assisted, at):
    model = make_model("llama", "sdpa")
    arguments = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    continuation = model.generate(**arguments)
    eos = int(continuation[0, PROMPT_LENGTH + at])
    plain = model.generate(**arguments, eos_token_id=eos)
    assert plain.shape[1] <= PROMPT_LENGTH + at + 1
    for seed in range(3):
        oracle = make_oracle(continuation, seed=seed, accuracy=1.0)
        oracle.end_tokens = frozenset({eos})
        assert assisted(model, oracle, **arguments, eos_token_id=eos)[0].tolist() == plain.tolist()


def test_end_tokens_of_a_drafter_are_the_target_s(monkeypatch):
    model = make_model("llama", "sdpa")
    for eos, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        monkeypatch.setattr(model.generation_config, "eos_token_id", eos)
        assert DFlashTreeCandidateGenerator(make_drafter(model), model).end_tokens == expected


def test_streamers_and_scores(assisted):
    """Assisted decoding's own outputs, and the rest of its arguments, work with the package's generators."""
    model = make_model("llama", "sdpa")
    arguments = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**arguments)
    output, _ = assisted(model, Seeing(make_oracle(plain.sequences)), **arguments)
    assert output.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.cat(output.scores), torch.cat(plain.scores), rtol=1e-4, atol=1e-4)


class Fixed(hf_ddtree.TreeCandidateGenerator):
    def __init__(self, tree):
        super().__init__()
        self.tree = tree

    def propose(self, context, budget):
        return [self.tree]


@pytest.mark.core
def test_the_chain_follows_the_most_probable_children():
    tree = DraftTree.from_parents([4, 1, 2, 3, 5], [-1, 0, 0, 2, 1], [0.0, -2.0, -0.5, -3.0, -2.5])
    ids = torch.tensor([[9, 4]], dtype=torch.int32)
    candidates, logits = Fixed(tree).get_candidates(ids)
    assert candidates.tolist() == [[9, 4, 2, 3]] and candidates.dtype == ids.dtype
    assert logits is None
    assert Fixed(DraftTree.root_only(4)).get_candidates(ids)[0].tolist() == ids.tolist()
    ending = Fixed(tree)
    ending.end_tokens = frozenset({2})
    assert ending.get_candidates(ids)[0].tolist() == [[9, 4, 2]]
