"""The drafter against the `dflash` package (0.1.0): same weights, same inputs, same hidden states over many rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config

from hf_ddtree.drafters import DFlashContextCache, DFlashDraftModel
from hf_ddtree.drafters.checkpoint import Checkpoint
from hf_ddtree.drafters.dflash.checkpoint import read_dflash_config
from hf_ddtree.drafters.domino import DominoDraftModel
from hf_ddtree.drafters.domino.checkpoint import read_domino_config
from hf_ddtree.drafters.dspark import DSparkDraftModel
from hf_ddtree.drafters.dspark.checkpoint import read_dspark_config

reference = pytest.importorskip("dflash.model", reason="the parity tests need `pip install --no-deps dflash==0.1.0`")

TOLERANCE = 1e-5
HIDDEN, VOCAB, BLOCK, WINDOW = 32, 64, 6, 9
TARGET_LAYERS = [1, 4, 2]
# Tokens committed in each round, the prompt first: shorter and longer than the block and the window, and enough of
# them for every buffer to grow and for sliding layers to forget.
COMMITTED = [7, 1, 3, 6, 2, 1, 1, 5, 90, 5, 3, 2, 60, 6, 6, 6]
LAYER_TYPES = {
    "full": ["full_attention", "full_attention"],
    "mixed": ["sliding_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
}


def checkpoint_config(layout: str, **settings: Any) -> dict[str, Any]:
    """The contents of a published `config.json`; the layouts differ in where `block_size` stands."""
    dflash = {"mask_token_id": 3, "target_layer_ids": TARGET_LAYERS}
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "head_dim": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 6,
        "rope_theta": 10000,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "vocab_size": VOCAB,
        "dflash_config": dflash,
        **settings,
    }
    (config if layout == "old" else dflash)["block_size"] = BLOCK
    return config


def make_pair(config: dict[str, Any]) -> tuple[nn.Module, DFlashDraftModel]:
    """The reference's drafter and ours with the same random weights, norms included."""
    torch.manual_seed(0)
    theirs = reference.DFlashDraftModel(Qwen3Config(**config)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = DFlashDraftModel(read_dflash_config(Checkpoint("test", raw_config=config))).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rounds(theirs: nn.Module, committed: list[int]) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Random features and blocks, and the reference's answer: (committed, root position, features, block, hidden)."""
    cache = DynamicCache(config=theirs.config)
    cache.activate_past_recording()
    root = 0
    for count in committed:
        root += count
        features = torch.randn(1, count, len(TARGET_LAYERS) * HIDDEN)
        block = torch.randn(1, BLOCK, HIDDEN)
        positions = torch.arange(root - count, root + BLOCK)[None]
        with torch.no_grad():
            hidden = theirs(
                position_ids=positions,
                noise_embedding=block,
                target_hidden=features,
                past_key_values=cache,
                use_cache=True,
            )
        cache.crop(root - cache.get_seq_length())
        yield count, root, features, block, hidden


@torch.no_grad()
def test_jetspec() -> None:
    """`causal_head` in `dflash_config` is `is_causal`, which is all that sets JetSpec apart."""
    config = checkpoint_config("new")
    theirs, _ = make_pair(config | {"is_causal": True})
    config["dflash_config"]["causal_head"] = True
    ours = DFlashDraftModel(read_dflash_config(Checkpoint("test", raw_config=config))).eval()
    ours.load_state_dict(theirs.state_dict())
    cache = DFlashContextCache()
    for count, root, features, block, expected in rounds(theirs, COMMITTED):
        hidden = ours(block, features, torch.arange(root - count, root + BLOCK)[None], cache)
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("layer_types", LAYER_TYPES)
@torch.no_grad()
def test_hidden_states_over_rounds(layout: str, is_causal: bool | None, layer_types: str) -> None:
    settings = {} if is_causal is None else {"is_causal": is_causal}
    theirs, ours = make_pair(checkpoint_config(layout, layer_types=LAYER_TYPES[layer_types], **settings))
    assert ours.config.block_size == BLOCK
    cache = DFlashContextCache()
    for count, root, features, block, expected in rounds(theirs, COMMITTED):
        hidden = ours(block, features, torch.arange(root - count, root + BLOCK)[None], cache)
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert cache.get_seq_length() == root


HEADS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "DSparkDraftModel": (read_dspark_config, DSparkDraftModel, {"markov_rank": 4, "enable_confidence_head": True}),
    "DominoDraftModel": (read_domino_config, DominoDraftModel, {"emb_dim": 4, "gru_hidden_dim": 4}),
}


@pytest.mark.parametrize("architecture", HEADS)
@torch.no_grad()
def test_layers_below_a_head(architecture: str) -> None:
    """The layers of DSpark's and Domino's drafters are those of DFlash."""
    read_config, model_class, settings = HEADS[architecture]
    config = checkpoint_config("new", architectures=[architecture])
    theirs, _ = make_pair(config)
    config["dflash_config"] |= settings
    ours = model_class(read_config(Checkpoint("test", raw_config=config))).eval()
    assert not ours.load_state_dict(theirs.state_dict(), strict=False).unexpected_keys
    cache = DFlashContextCache()
    for count, root, features, block, expected in rounds(theirs, COMMITTED):
        hidden = ours(block, features, torch.arange(root - count, root + BLOCK)[None], cache)
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_window_and_causality_change_the_result() -> None:
    """The parity tests would catch a drafter that ignores either."""
    outputs = []
    for layer_types, is_causal in (("full", None), ("full", True), ("sliding", None), ("sliding", False)):
        config = checkpoint_config("new", layer_types=LAYER_TYPES[layer_types], is_causal=is_causal)
        theirs, _ = make_pair(config)
        torch.manual_seed(1)
        outputs.append([hidden for *_, hidden in rounds(theirs, [20, 3])][-1])
    for i, output in enumerate(outputs):
        assert all((output - other).abs().max() > 0.01 for other in outputs[:i])


@torch.no_grad()
def test_window_needs_the_switch() -> None:
    """As in Qwen3, `sliding_window` counts only with `use_sliding_window`; the layer stays causal."""
    config = checkpoint_config("old", layer_types=LAYER_TYPES["sliding"], use_sliding_window=False)
    theirs, ours = make_pair(config)
    features, block = torch.randn(1, 30, len(TARGET_LAYERS) * HIDDEN), torch.randn(1, BLOCK, HIDDEN)
    positions = torch.arange(30 + BLOCK)[None]
    expected = theirs(position_ids=positions, noise_embedding=block, target_hidden=features)
    torch.testing.assert_close(ours(block, features, positions), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_layers_of_a_checkpoint_that_names_none() -> None:
    for depth, layers in ((36, 5), (12, 3), (64, 6), (28, 1), (8, 2)):
        config = checkpoint_config("old", num_target_layers=depth, num_hidden_layers=layers)
        del config["dflash_config"]["target_layer_ids"]
        expected = reference.build_target_layer_ids(depth, layers)
        assert read_dflash_config(Checkpoint("test", raw_config=config)).target_layer_ids == expected


@torch.no_grad()
def test_logits_factor_and_bound() -> None:
    config = checkpoint_config("new", output_multiplier=0.5)
    config["dflash_config"]["final_logit_softcapping"] = 2.0
    theirs, ours = make_pair(config)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    hidden = torch.randn(1, BLOCK, HIDDEN) * 5
    expected = theirs.compute_logits(hidden, head)
    torch.testing.assert_close(ours.compute_logits(hidden, head), expected)
    assert (expected - head(hidden)).abs().max() > 0.1


@torch.no_grad()
def test_embeddings_are_raw_weights_with_the_drafters_scale() -> None:
    """A target that scales its embeddings, as Gemma does, does not scale the drafter's."""

    class ScaledEmbedding(nn.Embedding):
        def forward(self, token_ids: Tensor) -> Tensor:
            return super().forward(token_ids) * 7

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = ScaledEmbedding(VOCAB, HIDDEN)

        def get_input_embeddings(self) -> nn.Module:
            return self.embeddings

    config = checkpoint_config("new")
    config["dflash_config"]["input_embedding_scale"] = 1.5
    _, ours = make_pair(config)
    target, token_ids = Target(), torch.tensor([[5, 3, 3]])
    expected = reference._raw_input_embeddings(target, token_ids, 1.5)
    torch.testing.assert_close(ours.embed(token_ids, target.embeddings), expected)
