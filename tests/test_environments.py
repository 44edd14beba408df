"""The surroundings of a call: gradients, autocast, default devices and dtypes, dtypes of target and drafter."""

import contextlib

import pytest
import torch
from helpers.families import make_model
from helpers.side_by_side import NEW_TOKENS, make_oracle, make_prompt

import hf_ddtree
from hf_ddtree import DFlashTreeCandidateGenerator, DraftContext

FAMILIES = ["llama", "mistral", "qwen3_5"]
PROMPT = "def parse(text):\n    "


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast switched off": lambda: torch.autocast("cpu", enabled=False),
    "default device cpu": lambda: torch.device("cpu"),
    "default device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.fixture(scope="module")
def pair():
    return hf_ddtree.load_demo()


def decode_both(model, inputs, surroundings, make_drafting, **kwargs):
    """What standard decoding and decoding by tree return, both in the surroundings."""
    arguments = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    with surroundings():
        plain = model.generate(**arguments)
    drafting = make_drafting(plain.sequences)
    with surroundings():
        tree = model.generate(**arguments, **drafting, generation_strategy="ddtree")
    return plain, tree


def assert_same(plain, tree, name):
    """The same tokens; in half precision the same scores up to rounding, as long as the tokens before them agree.

    There, rounding depends on how many tokens per forward is fed, so that near ties may go either way.
    """
    if name != "autocast":
        assert tree.sequences.tolist() == plain.sequences.tolist()
        return
    start = plain.sequences.shape[1] - len(plain.scores)
    for row, (expected, got) in enumerate(zip(plain.sequences.tolist(), tree.sequences.tolist())):
        agreeing = next((i for i, (one, other) in enumerate(zip(expected, got)) if one != other), len(expected) - 1)
        assert agreeing > start
        for step in range(agreeing - start + 1):
            torch.testing.assert_close(tree.scores[step][row], plain.scores[step][row], rtol=0.1, atol=0.3)


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_with_an_oracle(family, name):
    if (family, name) == ("mistral", "default device meta"):
        pytest.skip("Transformers' sliding layers do not work here")
    model = make_model(family, "sdpa")
    plain, tree = decode_both(
        model, {"inputs": make_prompt()}, SURROUNDINGS[name], lambda plain: {"candidate_generator": make_oracle(plain)}
    )
    assert_same(plain, tree, name)
    assert tree.sequences.device == plain.sequences.device
    assert name == "autocast" or tree.ddtree_stats.tokens_per_forward > 1.4
    assert not tree.sequences.requires_grad


@pytest.mark.core
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_with_the_shipped_drafter(pair, name, batch):
    model, drafter, tokenizer = pair
    inputs = tokenizer(
        [PROMPT, "x = 1\n", "import os\n"][:batch], return_tensors="pt", padding=True, padding_side="left"
    )
    plain, tree = decode_both(model, inputs, SURROUNDINGS[name], lambda _: {"assistant_model": drafter})
    assert tree.ddtree_stats.draft_forwards > 0
    assert_same(plain, tree, name)
    assert tree.ddtree_stats.tokens_per_forward > 1.2


def test_no_graph_is_built_when_gradients_are_on(pair):
    """Neither by decoding nor by a generator that is asked by itself."""
    model, drafter, tokenizer = pair
    inputs = tokenizer(PROMPT, return_tensors="pt")
    for module in (model, drafter):
        module.requires_grad_(True)
    try:
        output = model.generate(
            **inputs,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_scores=True,
            generation_strategy="ddtree",
            assistant_model=drafter,
        )
        generator = DFlashTreeCandidateGenerator(drafter, model)
        with_graph = []
        hook = drafter.register_forward_hook(lambda _, __, output: with_graph.append(output.requires_grad))
        features = torch.randn(1, 7, drafter.fc.in_features, requires_grad=True)
        (tree,) = generator.propose(DraftContext(inputs.input_ids, [7], generator.reduce_features(features), [7]), 8)
    finally:
        hook.remove()
        for module in (model, drafter):
            module.requires_grad_(False)
    assert not any(step.requires_grad for step in output.scores)
    assert tree.num_drafted == 8 and not tree.log_probs.requires_grad
    assert with_graph == [False]
    assert all(parameter.grad is None for parameter in model.parameters())


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_of_the_target(family, dtype, attention):
    """Exactly in double precision; in half precision, as many tokens, drafted ones accepted among them."""
    model = make_model(family, attention)
    twin = type(model)(model.config).eval().to(dtype)
    twin.load_state_dict(model.state_dict())
    plain, tree = decode_both(
        twin,
        {"inputs": make_prompt()},
        contextlib.nullcontext,
        lambda plain: {"candidate_generator": make_oracle(plain, accuracy=0.9)},
    )
    assert tree.sequences.shape == plain.sequences.shape
    assert tree.scores[-1].dtype == plain.scores[-1].dtype
    if dtype == torch.float64:
        assert tree.sequences.tolist() == plain.sequences.tolist()
        assert tree.ddtree_stats.tokens_per_forward > 1.4
    torch.testing.assert_close(tree.scores[0], plain.scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drafter_dtype", [torch.bfloat16, torch.float64])
def test_a_drafter_of_another_dtype_than_the_target(drafter_dtype):
    model, drafter, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer([PROMPT, "x = 1\n"], return_tensors="pt", padding=True, padding_side="left")
    drafter.to(drafter_dtype)
    plain, tree = decode_both(model, inputs, contextlib.nullcontext, lambda _: {"assistant_model": drafter})
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert tree.ddtree_stats.tokens_per_forward > 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_shipped_pair_in_half_precision(dtype):
    model, drafter, tokenizer = hf_ddtree.load_demo(dtype=dtype)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain, tree = decode_both(model, inputs, contextlib.nullcontext, lambda _: {"assistant_model": drafter})
    assert tree.sequences.shape[1] <= plain.sequences.shape[1] + NEW_TOKENS
    assert tree.ddtree_stats.tokens_per_forward > 1.2
