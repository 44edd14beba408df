"""Tree attention by itself, against each node's own path, and under every `attn_implementation`."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from helpers.attention_stand_ins import IMPLEMENTATIONS, running_with
from helpers.families import FAMILIES, VOCAB_SIZE, first_implementation, make_model
from helpers.random_trees import random_path, random_tree
from test_tree_attention import Decoding, check_round, random_tokens
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ddtree.attention import attention_dispatch, dispatch, tree_attention
from hf_ddtree.attention.packed_mask import PackedMasks
from hf_ddtree.interop import attention_functions
from hf_ddtree.target.layers import num_attention_layers
from hf_ddtree.target.past_recording import recording_past
from hf_ddtree.testing import OracleTreeCandidateGenerator

# Families whose eager attention is left to itself.
LEFT_ALONE: tuple[str, ...] = ()


@pytest.fixture
def in_parts(monkeypatch):
    """Attention in two parts, as on CUDA."""
    monkeypatch.setitem(attention_dispatch.FEWEST_KEYS_IN_PARTS, "cpu", 0)


# --- by itself ------------------------------------------------------------------------------------------------------


def attention_of_node(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """`(d_v,)`, what a query `(d_k,)` gets from the keys that it sees, in double precision."""
    scores = keys.double() @ query.double() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat((scores, sink.double()[None]))
    return scores.softmax(0)[: len(keys)] @ values.double()


@pytest.mark.core
@pytest.mark.parametrize("in_parts", [False, True], ids=["one mask", "in parts"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "heads, key_heads, key_dim, value_dim, dtype",
    [
        (4, 4, 8, 8, torch.float32),
        (8, 2, 8, 8, torch.float32),
        (6, 1, 12, 8, torch.float32),
        (8, 2, 16, 16, torch.bfloat16),
        (4, 2, 8, 8, torch.float64),
    ],
)
def test_every_node_attends_to_what_it_sees(
    in_parts, softcap, has_sinks, heads, key_heads, key_dim, value_dim, dtype, monkeypatch
):
    monkeypatch.setattr(tree_attention, "MOST_SCORES", 2000)
    generator = torch.Generator().manual_seed(heads + key_dim)
    rng = random.Random(heads)
    rows, num_cached = 2, 37
    trees = [random_tree(rng, shape, 1, VOCAB_SIZE, 11) for shape in ("bushy", "deep")]
    num_keys = num_cached + 11
    query = torch.randn((rows, heads, 11, key_dim), generator=generator).to(dtype)
    key = torch.randn((rows, key_heads, num_keys, key_dim), generator=generator).to(dtype)
    value = torch.randn((rows, key_heads, num_keys, value_dim), generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    mask = torch.ones((rows, 1, 11, num_keys), dtype=torch.bool)
    mask[:, 0, :, num_cached:] = torch.stack([tree.ancestor_mask for tree in trees])
    if not in_parts:
        mask[1, :, :, :5] = False
    masks = PackedMasks(11, [mask] if in_parts else [])
    packed = masks.of(mask, heads // key_heads, dtype, in_parts)
    assert packed.num_open == (num_cached if in_parts else 0)
    assert masks.of(mask, heads // key_heads, dtype, in_parts) is packed

    output = tree_attention.tree_attention(query, key, value, packed, 0.4, softcap, sinks)
    assert output.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    for row in range(rows):
        for head in range(heads):
            of_head = (states[row, head // (heads // key_heads)] for states in (key, value))
            keys, values = of_head
            for node in range(11):
                seen = mask[row, 0, node]
                sink = None if sinks is None else sinks[head]
                expected = attention_of_node(query[row, head, node], keys[seen], values[seen], 0.4, softcap, sink)
                assert (output[row, head, node] - expected).abs().max() <= tolerance


@pytest.mark.core
def test_masks_that_are_added_are_packed_as_those_of_true_and_false():
    visible = torch.rand(2, 1, 3, 17) < 0.5
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    of_bool, of_float = (PackedMasks(3, []).of(mask, 2, torch.bfloat16, False) for mask in (visible, added))
    assert torch.equal(of_bool.scores, of_float.scores)
    assert of_bool.scores.shape == (2, 1, 6, 17) and of_bool.scores.stride(-2) % 8 == 0


# --- in models ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_of_every_family_goes_through_tree_attention(family, attention):
    model = make_model(family, attention if attention == "eager" else first_implementation(family))
    decoding = Decoding(model, [random_tokens(random.Random(0), 20)])
    with recording_past(decoding.cache):
        decoding.verify([random_tree(random.Random(0), "bushy", 1, VOCAB_SIZE, 9)])
    num_layers = num_attention_layers(model.config.get_text_config())
    assert decoding.verification.tree_pass.num_attended == (0 if family in LEFT_ALONE else num_layers)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_two_parts_give_what_forwards_over_each_path_give(family, in_parts):
    rng = random.Random(f"{family} in parts")
    model = make_model(family, first_implementation(family))
    for length, shape, padding in ((1, "deep", None), (13, "bushy", None), (6, "chain", None), (12, "deep", 5)):
        check_round(model, rng, length, shape, padding)


# Transformers refuses chunks of the sequence in FlashAttention, and sinks in FlexAttention on a CPU.
WITH_KERNELS = [(family, "flash_attention_2") for family in FAMILIES if family != "llama4"]
WITH_KERNELS += [(family, "flex_attention") for family in ("llama", "gemma2", "qwen3_5", "mistral", "llama4")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@torch.no_grad()
@pytest.mark.parametrize("family, implementation", WITH_KERNELS)
def test_kernels_that_mask_no_tree_are_replaced_while_there_is_one(family, implementation):
    """Rounds with and without padding, within and beyond a window."""
    rng = random.Random(f"{family} kernels")
    with running_with(make_model(family, first_implementation(family)), implementation) as model:
        for length, shape, padding in ((3, "deep", None), (13, "bushy", None), (12, "deep", 5)):
            check_round(model, rng, length, shape, padding)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "qwen3_5", "mistral"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whole_calls_with_kernels_that_mask_no_tree(family, implementation):
    """A batch with padding whose rows accept paths of their own; tokens are those of standard decoding."""
    if implementation == "flex_attention" and family == "gpt_oss":
        pytest.skip("Transformers has no sinks in FlexAttention on a CPU")
    with running_with(make_model(family, first_implementation(family)), implementation) as model:
        prompt = torch.randint(1, VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(11) >= torch.tensor([0, 6, 3])[:, None]).long()
        call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
        expected = model.generate(prompt * mask, **call)
        oracle = OracleTreeCandidateGenerator(expected, VOCAB_SIZE)
        tokens = model.generate(
            prompt * mask, **call, generation_strategy="ddtree", candidate_generator=oracle, tree_budget=12
        )
    assert torch.equal(tokens, expected)


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama4"])
@pytest.mark.parametrize("parts", [False, True], ids=["one mask", "in parts"])
def test_half_precision_is_as_noisy_as_the_original(family, parts, monkeypatch):
    """Differences from float32 of the tree's logits, and of those of a forward over the same nodes as a chain."""
    if parts:
        monkeypatch.setitem(attention_dispatch.FEWEST_KEYS_IN_PARTS, "cpu", 0)
    exact = make_model(family, first_implementation(family))
    model = copy.deepcopy(exact).to(torch.bfloat16)
    rng = random.Random(family)
    noise = {"tree": 0.0, "original": 0.0}
    for _ in range(4):
        context, tree = random_tokens(rng, 30), random_tree(rng, "chain", 1, VOCAB_SIZE, 12)
        logits = exact(torch.tensor([context + tree.token_ids.tolist()])).logits[0, 30:]
        original = model(torch.tensor([context + tree.token_ids.tolist()])).logits[0, 30:]
        decoding = Decoding(model, [context])
        with recording_past(decoding.cache):
            by_tree = decoding.verify([tree])[0]
        noise["tree"] += (by_tree.float() - logits).square().mean().item()
        noise["original"] += (original.float() - logits).square().mean().item()
    assert noise["tree"] <= 1.5 * noise["original"]


# --- in front of the functions --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_mask_is_packed_once_a_round(family):
    model = make_model(family, "sdpa")
    decoding = Decoding(model, [random_tokens(random.Random(0), 20)])
    with recording_past(decoding.cache):
        decoding.verify([random_tree(random.Random(0), "bushy", 1, VOCAB_SIZE, 9)])
    assert len(decoding.verification.tree_pass.masks._entries) == 1


@torch.no_grad()
@pytest.mark.core
def test_functions_are_put_back_and_unknown_ones_left_alone():
    dispatch.uninstall()
    before = dict(ALL_ATTENTION_FUNCTIONS)
    model = copy.deepcopy(make_model("llama", "sdpa"))

    def own(*args, **kwargs):
        return before["sdpa"](*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("own_attention", own)
    try:
        dispatch.install(model)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before["sdpa"]
        model.config._attn_implementation_internal = "own_attention"
        dispatch.install(model)
        assert ALL_ATTENTION_FUNCTIONS["own_attention"] is own
        assert not attention_functions.is_known("own_attention")
        dispatch.uninstall()
        assert dict(ALL_ATTENTION_FUNCTIONS) == before | {"own_attention": own}
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["own_attention"]


@torch.no_grad()
def test_weights_of_attention_are_those_of_the_original():
    """Asked for, the eager function itself runs, which returns them."""
    model = make_model("llama", "eager")
    prompt = torch.tensor([random_tokens(random.Random(1), 9)])
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(prompt, **call, output_attentions=True)
    oracle = OracleTreeCandidateGenerator(expected.sequences, VOCAB_SIZE)
    output = model.generate(
        prompt, **call, output_attentions=True, generation_strategy="ddtree", candidate_generator=oracle
    )
    for step, expected_step in zip(output.attentions, expected.attentions, strict=True):
        for weights, expected_weights in zip(step, expected_step, strict=True):
            assert torch.allclose(weights, expected_weights, atol=1e-5)


@torch.no_grad()
@pytest.mark.core
def test_twenty_rounds_in_two_parts(in_parts):
    rng = random.Random(20)
    for family in ("llama", "gemma3"):
        if family not in FAMILIES:
            continue
        decoding = Decoding(make_model(family, first_implementation(family)), [random_tokens(rng, 3)])
        with recording_past(decoding.cache):
            for _ in range(20):
                tree = random_tree(rng, "bushy", rng.randrange(VOCAB_SIZE), VOCAB_SIZE, 10)
                decoding.verify([tree])
                decoding.commit([random_path(rng, tree)])
        committed = decoding.committed[0]
        expected = make_model(family, first_implementation(family))(torch.tensor([[*committed, 7]])).logits[:, -1]
        assert (decoding.next_logits([[7]])[:, -1] - expected).abs().max() <= 1e-4
