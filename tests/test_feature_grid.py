"""Every family of targets with every kind of drafter that reads features of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.every_kind import MAKERS, ONLY_FOR, make
from helpers.families import FAMILIES, first_implementation, make_model

import hf_ddtree
from hf_ddtree import DraftContext
from hf_ddtree.drafter_kinds import DRAFTER_KINDS

# Their layers give several hidden states per token.
WITHOUT_FEATURES = {"gemma3n"}


PROMPT = torch.arange(1, 10)[None]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}


@cache
def by_standard_decoding(family: str) -> list[list[int]]:
    return make_model(family, first_implementation(family)).generate(PROMPT, **ARGUMENTS).tolist()


def test_the_grid_has_every_kind() -> None:
    assert {kind.name for kind in DRAFTER_KINDS} == set(MAKERS) - {"JetSpec"} | {"causal language model"}


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in FAMILIES for kind in MAKERS if family in ONLY_FOR.get(kind, FAMILIES)],
)
def test_same_tokens(family: str, kind: str) -> None:
    target = make_model(family, first_implementation(family))
    drafts = {"assistant_model": make(kind, target), "generation_strategy": "ddtree", "tree_budget": 7}
    if family in WITHOUT_FEATURES:
        with pytest.raises(ValueError, match="give several hidden states per token"):
            target.generate(PROMPT, **ARGUMENTS, **drafts)
        return
    assert target.generate(PROMPT, **ARGUMENTS, **drafts).tolist() == by_standard_decoding(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_that_draft_for_some_families_alone(family: str) -> None:
    target = make_model(family, first_implementation(family))
    if family not in ONLY_FOR["multi-token-prediction layers"]:
        with pytest.raises(ValueError, match="MTP layers"):
            hf_ddtree.load_drafter("mtp", target_model=target)
    if family not in ONLY_FOR["assistant of Gemma 4"]:
        assistant = make("assistant of Gemma 4", target)
        with pytest.raises(ValueError, match="drafts for Gemma 4, but the target is a"):
            target.generate(PROMPT, **ARGUMENTS, assistant_model=assistant, generation_strategy="ddtree")


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
