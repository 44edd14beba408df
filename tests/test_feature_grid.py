"""Every family of targets with every kind of drafter that reads features of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from helpers.families import FAMILIES, first_implementation, make_config, make_model
from helpers.native_pair import make_native_drafter
from helpers.random_drafter import make_drafter
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel

import hf_ddtree
from hf_ddtree import DraftContext
from hf_ddtree.drafter_kinds import DRAFTER_KINDS
from hf_ddtree.drafters import DSparkConfig, DSparkDraftModel
from hf_ddtree.drafters.domino import DominoConfig, DominoDraftModel
from hf_ddtree.drafters.eagle3 import Eagle3Config, Eagle3DraftModel
from hf_ddtree.drafters.gemma4_dspark import Gemma4DSparkConfig, Gemma4DSparkDraftModel
from hf_ddtree.drafters.mtp.checkpoint import MTP_FAMILIES
from hf_ddtree.drafters.mtp.model import MTPDrafter
from hf_ddtree.drafters.peagle import PEagleConfig, PEagleDraftModel
from hf_ddtree.target.layers import decoder_layers

# Their layers give several hidden states per token.
WITHOUT_FEATURES = {"gemma3n"}


PROMPT = torch.arange(1, 10)[None]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}


@cache
def by_standard_decoding(family: str) -> list[list[int]]:
    return make_model(family, first_implementation(family)).generate(PROMPT, **ARGUMENTS).tolist()


def sizes_for(target: PreTrainedModel) -> dict[str, Any]:
    """The configuration of one layer, which reads the target's first and last layer."""
    config = target.config.get_text_config()
    return {
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


def make_mtp_layer(target: PreTrainedModel) -> PreTrainedModel:
    if target.config.model_type not in MTP_FAMILIES:
        return MtpModel(target, 1)
    config = copy.deepcopy(target.config)
    config.layer_types = ["full_attention"]
    layer = MtpLayer(config, type(decoder_layers(target)[0]), type(target.get_decoder().norm), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return MTPDrafter(config, torch.nn.ModuleList([layer]))


def make_assistant(target: PreTrainedModel) -> PreTrainedModel:
    """Of Gemma 4, as wide as the target."""
    own = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = transformers.Gemma4AssistantConfig(
        text_config=make_config("gemma4", **own).to_dict(), backbone_hidden_size=target.config.hidden_size
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


BLOCK: dict[str, Any] = {"block_size": 5, "mask_token_id": 1}
MAKERS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "DFlash": make_drafter,
    "JetSpec": partial(make_drafter, is_causal=True),
    "DFlash 2": partial(make_drafter, version=2),
    "DFlash of Transformers": lambda target: make_native_drafter(target_layer_ids=[0, 1]),
    "DSpark": lambda target: DSparkDraftModel(DSparkConfig(**sizes_for(target), **BLOCK, markov_rank=8)),
    "DSpark for Gemma 4": lambda target: Gemma4DSparkDraftModel(
        Gemma4DSparkConfig(**sizes_for(target), **BLOCK, markov_rank=8, attention_k_eq_v=True, owns_vocabulary=True)
    ),
    "Domino": lambda target: DominoDraftModel(DominoConfig(**sizes_for(target), **BLOCK, emb_dim=8, gru_hidden_dim=8)),
    "EAGLE-3": lambda target: Eagle3DraftModel(Eagle3Config(**sizes_for(target), draft_vocab_size=None)),
    "P-EAGLE": lambda target: PEagleDraftModel(PEagleConfig(**sizes_for(target), draft_length=5, mask_token_id=1)),
    "multi-token-prediction layers": make_mtp_layer,
    "assistant of Gemma 4": make_assistant,
}
# The families that these kinds draft for; the others draft for any.
ONLY_FOR = {
    "multi-token-prediction layers": ("deepseek_v3", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "assistant of Gemma 4": ("gemma4",),
}


def make(kind: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MAKERS[kind](target).eval().requires_grad_(False)


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
