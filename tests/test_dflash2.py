"""DFlash 2: its checkpoints, its probabilities against a plain computation, and decoding with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_prompt
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file
from test_differential import Case, cases, check
from test_multi_turn import CHATS, FORMS, MIXES, chat, make_turns, without_cache
from torch import Tensor
from transformers import AutoModel

from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.dflash2 import DFlash2TreeCandidateGenerator, factors_along
from hf_ddtree.drafters import DFlash2Config, DFlash2DraftModel
from hf_ddtree.drafters.mixture import Powers
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import best_tokens, conditional_candidates

TARGET = "qwen3_5"
SETTINGS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@pytest.fixture
def drafter() -> DFlash2DraftModel:
    return make_drafter(make_model(TARGET, "sdpa"), version=2)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def write_published(folder: Path, drafter: DFlash2DraftModel, **changes: Any) -> None:
    """In the layout of published checkpoints; `changes` overwrite `dflash_config`, and None removes a key."""
    config = drafter.config
    nested = {name: getattr(config, name) for name in (*SETTINGS, "block_size", "target_layer_ids", "mask_token_id")}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "num_target_layers", "layer_types")
    published = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in names},
        "dflash_config": {name: value for name, value in {**nested, **changes}.items() if value is not None},
    }
    (folder / "config.json").write_text(json.dumps(published))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_weights(one: DFlash2DraftModel, other: DFlash2DraftModel) -> None:
    expected = other.state_dict()
    assert type(one) is type(other) is DFlash2DraftModel
    assert one.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in one.state_dict().items())


def test_published_layout(drafter: DFlash2DraftModel, tmp_path: Path) -> None:
    write_published(tmp_path, drafter)
    loaded = load_drafter(tmp_path, target_model=make_model(TARGET, "sdpa"))
    assert_same_weights(loaded, drafter)
    assert isinstance(loaded.config, DFlash2Config)
    assert all(getattr(loaded.config, name) == getattr(drafter.config, name) for name in SETTINGS)


def test_save_and_load(drafter: DFlash2DraftModel, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"candidate_selector.successor_codebook", "layers.1.mlp_conv.base_kernel"} <= names
    assert {"candidate_selector.hidden_projection.weight", "layers.0.attention_conv.kernel_projection.weight"} <= names
    for loaded in (load_drafter(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert_same_weights(loaded, drafter)
        assert loaded.config.selector_top_k == drafter.config.selector_top_k


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_rank": None, "conv_group_size": None}, r"has no \['conv_group_size', 'selector_rank'\]"),
        ({"conv_group_size": 5}, r"`conv_group_size` is 5, but must divide `hidden_size` \(32\)"),
        ({"selector_top_k": VOCAB_SIZE + 1}, "`selector_top_k` is 65, but must be at most"),
        ({"conv_kernel_size": 0}, "`conv_kernel_size` is 0"),
    ],
)
def test_settings_that_cannot_be(
    drafter: DFlash2DraftModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_published(tmp_path, drafter, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)


def test_missing_weights(drafter: DFlash2DraftModel, tmp_path: Path) -> None:
    write_published(tmp_path, drafter)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["candidate_selector.successor_codebook"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the drafter's weights, e.g. 'candidate_selector.succ"):
        load_drafter(tmp_path)


@torch.no_grad()
def test_a_new_one_drafts_as_dflash_does() -> None:
    target = make_model(TARGET, "sdpa")
    first = make_drafter(target)
    second = DFlash2DraftModel(DFlash2Config(**{**first.config.to_dict(), "selector_top_k": 8}))
    missing = second.load_state_dict(first.state_dict(), strict=False)
    assert not missing.unexpected_keys
    block, features = torch.randn(1, 6, 32), torch.randn(1, 9, 64)
    assert torch.equal(second(block, features), first(block, features))
    assert (second.pair_scores(block, torch.tensor([3]), torch.randint(64, (1, 6, 8))) == 0).all()


@torch.no_grad()
def test_many_blocks_in_one_pass(drafter: DFlash2DraftModel) -> None:
    """Convolutions do not reach from one block into the next."""
    generator = torch.Generator().manual_seed(0)
    features, blocks = torch.randn(1, 10, 64, generator=generator), torch.randn(1, 12, 32, generator=generator)
    mask = torch.ones(1, 1, 12, 22, dtype=torch.bool)
    mask[..., :6, 16:] = mask[..., 6:, 10:16] = False
    positions = torch.cat([torch.arange(10), torch.arange(10, 16), torch.arange(10, 16)])[None]
    hidden = drafter(blocks, features, positions, attention_mask=mask)
    for slots in (slice(6), slice(6, 12)):
        torch.testing.assert_close(hidden[:, slots], drafter(blocks[:, slots], features), atol=1e-4, rtol=1e-4)


# --- probabilities --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_conditional_probabilities(drafter: DFlash2DraftModel) -> None:
    """Every edge against one softmax over the whole vocabulary, with the pair's score added to the candidates."""
    generator = torch.Generator().manual_seed(0)
    top_k, selector = drafter.config.selector_top_k, drafter.candidate_selector
    hidden, logits = torch.randn(2, 4, 32, generator=generator), 2 * torch.randn(2, 4, VOCAB_SIZE, generator=generator)
    roots = torch.tensor([5, 9])
    log_probs, token_ids = best_tokens(logits, top_k)
    pair_scores = drafter.pair_scores(hidden, roots, token_ids)
    conditional, tokens, next_state = conditional_candidates(log_probs, token_ids, pair_scores)
    assert conditional.shape == tokens.shape == next_state.shape == (2, 4, top_k, top_k)
    for row in range(2):
        for depth in range(4):
            kept = token_ids[row, depth]
            for state in range(top_k):
                before = int(roots[row] if depth == 0 else token_ids[row, depth - 1, state])
                scores = logits[row, depth].clone()
                for token in kept.tolist():
                    product = selector.predecessor_codebook[before] * selector.hidden_projection(hidden[row, depth])
                    scores[token] += product @ selector.successor_codebook[token]
                expected = scores.log_softmax(-1)[tokens[row, depth, state]]
                torch.testing.assert_close(conditional[row, depth, state], expected, atol=1e-5, rtol=1e-5)
                assert torch.equal(kept[next_state[row, depth, state]], tokens[row, depth, state])
    assert (conditional.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("true_power", [0.6, 1.0, 1.8])
def test_the_power_that_tokens_are_drawn_with_is_learned(true_power: float) -> None:
    generator = torch.Generator().manual_seed(3)
    powers, depth, top_k = Powers((1.0,)), 6, 5
    for _ in range(400):
        logits = 2 * torch.randn(depth, VOCAB_SIZE, generator=generator)
        stated = best_tokens(logits, top_k)
        pair_scores = torch.randn(depth, top_k, top_k, generator=generator)
        drawn_from, power = conditional_candidates(*stated, pair_scores, true_power), powers.values[0]
        emitted: list[int] = []
        state = 0
        for probs, tokens, next_state in zip(drawn_from[0].exp(), *drawn_from[1:]):
            outside = (1 - probs[state].sum()).clamp(min=0)
            place = int(torch.multinomial(torch.cat((probs[state], outside[None])), 1, generator=generator))
            emitted.append(int(tokens[state, place]) if place < top_k else -1)
            if place == top_k:
                break
            state = int(next_state[state, place])
        candidates = conditional_candidates(*stated, pair_scores, power)
        factors, chosen = factors_along([one.numpy() for one in candidates], emitted, power)
        assert len(chosen) == len(emitted)
        powers.learn([[0]] * len(chosen), factors, chosen)
    assert powers.values[0] == pytest.approx(true_power, rel=0.15)


def test_the_power_is_learned_in_calls_that_calibrate(drafter: DFlash2DraftModel) -> None:
    model = make_model(TARGET, "sdpa")
    options = {"max_new_tokens": 12, "do_sample": False, "generation_strategy": "ddtree", "assistant_model": drafter}
    powers = drafter.calibration.selector_powers
    for arguments in ({"calibrate": False}, {"tree_probabilities": "marginal"}):
        model.generate(make_prompt(), **options, **arguments)
        assert powers[False].values == powers[True].values == (1.0,)
    model.generate(make_prompt(), **options)
    assert powers[False].values != (1.0,) == powers[True].values


def test_nothing_is_drafted_where_there_is_no_distribution() -> None:
    logits = torch.randn(2, 3, 8)
    logits[:, 1] = torch.nan
    log_probs, token_ids = best_tokens(logits, 4)
    candidates = conditional_candidates(log_probs, token_ids, torch.randn(2, 3, 4, 4))
    for log_probs, token_ids, next_state in zip(*candidates):
        assert build_tree(log_probs, token_ids, 0, 50, next_state=next_state).depths.max() == 1


def propose(drafter: DFlash2DraftModel, budget: int, **knobs: Any) -> Any:
    generator = DFlash2TreeCandidateGenerator(drafter, make_model(TARGET, "sdpa"), DDTreeConfig(**knobs))
    input_ids = torch.tensor([[3, 4, 5], [7, 8, 9]])
    features = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    return generator.propose(DraftContext(input_ids, [2, 2], generator.reduce_features(features), [2, 2]), budget)


def test_the_generator_builds_on_pairs_unless_told_not_to(drafter: DFlash2DraftModel) -> None:
    trees = {name: propose(drafter, 12, tree_probabilities=name) for name in ("conditional", "marginal")}
    for row in range(2):
        one, other = (trees[name][row].token_ids.tolist() for name in trees)
        assert one != other and len(one) == len(other) == 13
    by_default = propose(drafter, 12)
    assert [tree.token_ids.tolist() for tree in by_default] == [t.token_ids.tolist() for t in trees["conditional"]]


def test_top_k_bounds_the_children(drafter: DFlash2DraftModel) -> None:
    for tree in propose(drafter, 40, tree_top_k=2):
        assert max(len(tree.children(node)) for node in range(len(tree))) == 2


# --- decoding: a wrong drafter never changes a token ----------------------------------------------------------------


# Transformers warns of what these calls ask for, in standard decoding as well.
@pytest.mark.filterwarnings("ignore:Passing `.*` with `inputs_embeds` and without `input_ids`")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_any_call_gives_what_plain_decoding_gives(family: str) -> None:
    count = 0

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=cases(family))
    def run(case: Case) -> None:
        nonlocal count
        kind = "sliding_attention" if case["seed"] % 2 else "full_attention"
        check(family, case | {"drafts": ("dflash2", kind)})
        count += 1

    run()
    assert count >= 20


@pytest.mark.parametrize(("mix", "form"), CHATS)
def test_chats(mix: str, form: str) -> None:
    model = make_model(TARGET, first_implementation(TARGET))
    turns = make_turns()
    history, _ = chat(model, turns, make_drafter(model, version=2), MIXES[mix], forms=FORMS[form])
    assert history.tolist() == without_cache(model, turns).tolist()


def test_a_chain_is_the_selector_s() -> None:
    model = make_model(TARGET, "sdpa")
    drafter = make_drafter(model, version=2)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "return_trees": True}
    output: Any = model.generate(make_prompt(), **options, assistant_model=drafter, generation_strategy="dflash")
    plain: Tensor = model.generate(make_prompt(), max_new_tokens=12, do_sample=False)
    assert output.sequences.tolist() == plain.tolist()
    assert all(tree.is_chain for row in output.ddtree_stats.trees for tree in row)
