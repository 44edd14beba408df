"""Every family of targets with every kind of drafter that reads features of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import FAMILIES, first_implementation, make_model
from helpers.random_drafter import make_drafter
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree import DraftContext
from hf_ddtree.drafters import DSparkConfig, DSparkDraftModel
from hf_ddtree.drafters.domino import DominoConfig, DominoDraftModel
from hf_ddtree.drafters.eagle3 import Eagle3Config, Eagle3DraftModel

# Their layers give several hidden states per token.
WITHOUT_FEATURES = {"gemma3n"}


def make(kind: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter with random weights that reads the first and the last layer."""
    if kind in ("DFlash", "DFlash 2"):
        return make_drafter(target, version=1 if kind == "DFlash" else 2)
    config = target.config.get_text_config()
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "target_layer_ids": [0, config.num_hidden_layers - 1],
        "initializer_range": 0.3,
    }
    block = {"block_size": 5, "mask_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "DSpark":
            drafter: PreTrainedModel = DSparkDraftModel(DSparkConfig(**settings, **block, markov_rank=8))
        elif kind == "Domino":
            drafter = DominoDraftModel(DominoConfig(**settings, **block, emb_dim=8, gru_hidden_dim=8))
        else:
            drafter = Eagle3DraftModel(Eagle3Config(**settings, draft_vocab_size=None))
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "DSpark", "Domino", "EAGLE-3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family: str, kind: str) -> None:
    target = make_model(family, first_implementation(family))
    prompt = torch.arange(1, 10)[None]
    arguments: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    drafts = {"assistant_model": make(kind, target), "generation_strategy": "ddtree", "tree_budget": 7}
    if family in WITHOUT_FEATURES:
        with pytest.raises(ValueError, match="give several hidden states per token"):
            target.generate(prompt, **arguments, **drafts)
        return
    plain = target.generate(prompt, **arguments)
    assert target.generate(prompt, **arguments, **drafts).tolist() == plain.tolist()


class Recorder(hf_ddtree.TreeCandidateGenerator):
    """Drafts nothing, and keeps the features that it gets."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.feature_layers = layers
        self.seen: list[torch.Tensor] = []

    def propose(self, context: DraftContext, budget: int) -> list[hf_ddtree.DraftTree]:
        assert context.features is not None
        self.seen.append(context.features)
        return [hf_ddtree.DraftTree.root_only(root) for root in context.roots]


@pytest.mark.core
@pytest.mark.parametrize("chunk", [None, 4])
@torch.no_grad()
def test_layers_that_share_keys_see_the_whole_prompt(chunk: int | None) -> None:
    """Gemma 4 passes only the last token of a prompt on to them where no one asks for more."""
    target = make_model("gemma4", "eager")
    assert target.config.get_text_config().num_kv_shared_layers
    prompt = torch.arange(1, 10)[None]
    layers = tuple(range(target.config.get_text_config().num_hidden_layers))
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *args: outputs.append(args[2])) for layer in target.model.layers]
    target(prompt, logits_to_keep=0)
    for hook in hooks:
        hook.remove()
    recorder = Recorder(layers)
    arguments: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": chunk}
    tree = target.generate(prompt, **arguments, candidate_generator=recorder, generation_strategy="ddtree")
    assert tree.tolist() == target.generate(prompt, **arguments).tolist()
    torch.testing.assert_close(recorder.seen[0], torch.cat(outputs, dim=-1), atol=1e-4, rtol=1e-4)
