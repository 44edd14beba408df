"""DSpark drafters with Gemma 4's layers in DeepSpec's layout, against plain equations."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dspark import HEADS, SETTINGS, Tensors, head_shapes, plain_tree, sharpen
from helpers.families import make_model
from helpers.generator_grid import CALLS, check_call
from helpers.heads import BLOCK, HEAD_DIM, KEY_HEADS, MASK, MLP, backbone_shapes, random_tensors, write_checkpoint
from helpers.heads import HEADS as QUERY_HEADS
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma4TextConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

import hf_ddtree
from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.sequential_head import SequentialHeadTreeCandidateGenerator
from hf_ddtree.drafters import DFlashContextCache
from hf_ddtree.drafters.gemma4_dspark import Gemma4DSparkDraftModel
from hf_ddtree.drafters.zlab.writing import save_drafter

EPS, THETA, ROTATED, CAP = 1e-6, 1e6, 0.5, 3.0
FULL_ATTENTION = {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": ROTATED}


@cache
def make_target() -> PreTrainedModel:
    """Gemma 4 without layers that share keys, as wide as a drafter that has a layer more than it reads."""
    return make_model("gemma4", "sdpa", num_kv_shared_layers=0)


def config_for(target: PreTrainedModel, shares: bool, **changes: Any) -> dict[str, Any]:
    """The contents of DeepSpec's `config.json`: the target's own, with the drafter's settings."""
    text = target.config.get_text_config()
    return {
        "architectures": ["Gemma4DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": shares,
        "block_size": BLOCK,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": CAP,
        "global_head_dim": HEAD_DIM,
        "head_dim": HEAD_DIM // 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": text.hidden_size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * 2,
        "mask_token_id": MASK,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_anchors": 512,
        "num_attention_heads": QUERY_HEADS,
        "num_experts": None,
        "num_global_key_value_heads": KEY_HEADS if shares else None,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2 if shares else KEY_HEADS,
        "num_kv_shared_layers": 0,
        "num_target_layers": text.num_hidden_layers,
        "pad_token_id": 0,
        "rms_norm_eps": EPS,
        "rope_parameters": {
            "full_attention": FULL_ATTENTION,
            "rope_theta": None,
            "rope_type": "default",
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "target_layer_ids": [0, text.num_hidden_layers - 1],
        "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text",
        "tie_word_embeddings": False,
        "top_k_experts": None,
        "transformers_version": "5.10.2",
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": text.vocab_size,
        "vocab_size_per_layer_input": text.vocab_size,
        **SETTINGS,
        **changes,
    }


def write(folder: Path, target: PreTrainedModel, shares: bool = True, head: str = "vanilla") -> Tensors:
    """Writes a drafter with random weights, and returns these."""
    config = config_for(target, shares, markov_head_type=head)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = backbone_shapes(config | {"head_dim": HEAD_DIM, "num_key_value_heads": KEY_HEADS})
    shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
        shapes |= {f"layers.{index}.layer_scalar": (1,)}
        if shares:
            del shapes[f"layers.{index}.self_attn.v_proj.weight"]
    tensors = random_tensors(shapes | head_shapes(config, hidden, vocab))
    sharpen(tensors)
    write_checkpoint(folder, config, tensors)
    return tensors


def norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of `(length, heads, head_dim)`, of whose pairs only the first are turned."""
    half = HEAD_DIM // 2
    turned = int(ROTATED * half)
    angles = torch.zeros(len(positions), 1, half)
    angles[:, 0, :turned] = positions[:, None] * THETA ** (-torch.arange(turned) / half)
    first, second = x.split(half, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


@torch.no_grad()
def plain_block(tensors: Tensors, features: Tensor, token_ids: Tensor) -> Tensor:
    """Hidden states `(block, hidden_size)` of a block right behind a context of features `(length, 2 hidden_size)`."""
    hidden = tensors["embed_tokens.weight"][token_ids] * tensors["embed_tokens.weight"].shape[1] ** 0.5
    context = norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    positions = torch.arange(len(context) + len(hidden))
    for index in range(2):
        own = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in tensors.items()}
        normed = norm(hidden, own["input_layernorm.weight"])
        source = torch.cat((context, normed))
        query = (normed @ own["self_attn.q_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))
        key = (source @ own["self_attn.k_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))
        value = key
        if "self_attn.v_proj.weight" in own:
            value = (source @ own["self_attn.v_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))
        query = rotated(norm(query, own["self_attn.q_norm.weight"]), positions[len(context) :])
        key, value = rotated(norm(key, own["self_attn.k_norm.weight"]), positions), norm(value)
        weights = torch.einsum("qhd,kd->hqk", query, key[:, 0]).softmax(-1)
        attended = torch.einsum("hqk,kd->qhd", weights, value[:, 0]).flatten(1)
        hidden = hidden + norm(attended @ own["self_attn.o_proj.weight"].T, own["post_attention_layernorm.weight"])
        normed = norm(hidden, own["pre_feedforward_layernorm.weight"])
        gated = F.gelu(normed @ own["mlp.gate_proj.weight"].T, approximate="tanh") * (
            normed @ own["mlp.up_proj.weight"].T
        )
        hidden = hidden + norm(gated @ own["mlp.down_proj.weight"].T, own["post_feedforward_layernorm.weight"])
        hidden = hidden * own["layer_scalar"]
    return norm(hidden, tensors["norm.weight"])


def plain_logits(tensors: Tensors, hidden: Tensor) -> Tensor:
    return CAP * torch.tanh(hidden @ tensors["lm_head.weight"].T / CAP)


@pytest.mark.parametrize("shares", [True, False])
@torch.no_grad()
def test_hidden_states_over_rounds(shares: bool, tmp_path: Path) -> None:
    """Hidden states and logits over several rounds, of which one goes back to a shorter context."""
    target = make_target()
    tensors = write(tmp_path, target, shares)
    drafter = load_drafter(tmp_path, target_model=target)
    assert type(drafter) is Gemma4DSparkDraftModel
    features = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(1, 60, (41,), generator=torch.Generator().manual_seed(2))
    cache = DFlashContextCache()
    for root in (3, 4, 9, 30, 12, 13, 40):
        seen = min(cache.get_seq_length(), root)
        cache.crop(seen)
        block = torch.tensor([tokens[root].item()] + [MASK] * (BLOCK - 1))
        embedded = drafter.embed(block[None], target.get_input_embeddings())
        hidden = drafter(embedded, features[None, seen:root], cache=cache)[0]
        expected = plain_block(tensors, features[:root], block)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        logits = drafter.compute_logits(hidden, target.get_output_embeddings())
        torch.testing.assert_close(logits, plain_logits(tensors, expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shares", [True, False])
@torch.no_grad()
def test_layers_are_those_of_transformers(shares: bool, tmp_path: Path) -> None:
    """Without a context a layer is Gemma 4's own, of which every token sees every other."""
    target = make_target()
    tensors = write(tmp_path, target, shares)
    drafter = load_drafter(tmp_path, target_model=target)
    given = config_for(target, shares) | {"rope_parameters": {"full_attention": FULL_ATTENTION}}
    config = Gemma4TextConfig(**given)
    config._attn_implementation = "eager"
    theirs = Gemma4TextDecoderLayer(config, 1).eval()
    own = {name.removeprefix("layers.1."): tensor for name, tensor in tensors.items() if name.startswith("layers.1.")}
    theirs.load_state_dict(own)
    hidden, positions = torch.randn(1, BLOCK, target.config.hidden_size), torch.arange(BLOCK)[None]
    rotary = Gemma4TextRotaryEmbedding(config)(hidden, positions, layer_type="full_attention")
    expected = theirs(hidden.clone(), position_embeddings=rotary, attention_mask=None, shared_kv_states={})
    ours = drafter.layers[1](hidden, None, drafter._rotary(hidden, positions), None, None, None, {})
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_trees_over_rounds(head: str, tmp_path: Path) -> None:
    """Every node, and its probability, is what the equations give."""
    target = make_target()
    tensors = write(tmp_path, target, head=head)
    drafter = load_drafter(tmp_path, target_model=target)
    generator = SequentialHeadTreeCandidateGenerator(drafter, target, DDTreeConfig(tree_budget=12))
    features = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(1, 60, (21,), generator=torch.Generator().manual_seed(4))
    deepest, seen = 0, 0
    for place in (7, 8, 10, 13, 18, 20):
        news = generator.reduce_features(features[None, seen:place])
        context = DraftContext(tokens[None, : place + 1], [place], news, [place - seen])
        (tree,) = generator.propose(context, 12)
        root = int(tokens[place])
        hidden = plain_block(tensors, features[:place], torch.tensor([root] + [MASK] * (BLOCK - 1)))
        expected = plain_tree(tensors, head, hidden, plain_logits(tensors, hidden), root, 12)
        found = {
            tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item() for node in range(1, len(tree))
        }
        assert found.keys() == expected.keys()
        assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
        deepest, seen = max(deepest, *map(len, found)), place
    assert deepest > 2


@pytest.mark.parametrize("family_variation", [{}, {"num_kv_shared_layers": 0}, {"attention_k_eq_v": True}])
@pytest.mark.parametrize("call", CALLS)
def test_same_tokens(call: str, family_variation: dict[str, Any], tmp_path: Path) -> None:
    index = list(CALLS).index(call)

    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        write(tmp_path, model, index % 2 == 0, HEADS[index % 3])
        return {"assistant_model": load_drafter(tmp_path, target_model=model), "tree_budget": 20}

    check_call(make_model("gemma4", ("sdpa", "eager")[index % 2], **family_variation), call, make_drafts)


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = make_target()
    tensors = write(tmp_path, target, head="rnn")
    drafter = load_drafter(tmp_path, target_model=target)
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again", target_model=target)
    assert type(again) is Gemma4DSparkDraftModel and again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_it_is_not_written_as_what_it_is_not(tmp_path: Path) -> None:
    write(tmp_path, make_target())
    with pytest.raises(ValueError, match="has a `Gemma4DSparkConfig`, which z-lab's layout has no keys for"):
        save_drafter(load_drafter(tmp_path), tmp_path / "again")


def test_the_report_says_what_it_is(tmp_path: Path) -> None:
    target = make_target()
    write(tmp_path, target)
    report = hf_ddtree.check(target, tmp_path)
    assert (report.drafter_kind, report.drafter_fits) == ("DSpark for Gemma 4", True)
    assert str(hf_ddtree.check(tmp_path).reason).startswith("It is a drafter.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "has a config.json with 'enable_moe_block' True, which is not supported"),
        ({"hidden_size_per_layer_input": 8}, "'hidden_size_per_layer_input' 8, which is not supported; it may be 0"),
        ({"use_double_wide_mlp": True}, "'use_double_wide_mlp' True, which is not supported; it may be False"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "'layer_types' .*which is not supported"),
        ({"enable_d2_feature": True, "query_scale": 2.0}, "has 'enable_d2_feature', 'query_scale' in its config.json"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "has 'per_layer_config' in its config.json"),
        ({"global_head_dim": None}, r"is a DSpark drafter, but its config.json has no \['global_head_dim'\]"),
        ({"num_global_key_value_heads": None}, r"its config.json has no \['num_global_key_value_heads'\]"),
        ({"rope_parameters": {"rope_theta": 1e6}}, r"but its `rope_parameters` has no \['full_attention'\]"),
        ({"markov_head_type": "fir"}, "`markov_head_type` is 'fir', but must be one of"),
        ({"target_layer_ids": [-1, 2]}, "`target_layer_ids` holds -1"),
        ({"hidden_size": 64}, "`hidden_size` 64, but the target"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_target()
    config = copy.deepcopy(config_for(target, shares=True)) | changes
    write_checkpoint(tmp_path, config, {})
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)
