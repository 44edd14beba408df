"""EAGLE-3 drafters: against the speculators library, in its layout and in that of SafeAILab and SpecForge."""

from __future__ import annotations

import heapq
import json
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.generator_grid import GRID, check_case
from helpers.heads import random_tensors, write_checkpoint
from helpers.speculators_reference import (
    AUX_LAYERS,
    HIDDEN,
    SIZES,
    VOCAB,
    import_speculators,
    make_reference,
    make_target,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.eagle3 import Eagle3TreeCandidateGenerator
from hf_ddtree.drafters.eagle3 import Eagle3Config, Eagle3DraftModel

LLAMA = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, rope_theta=5000.0)
QWEN = Qwen3Config(**SIZES | {"num_hidden_layers": 1})
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen": (QWEN, {"draft_vocab_size": VOCAB}),
    "two layers": (Qwen3Config(**SIZES), {"norm_before_residual": True}),
    "normalised features": (LLAMA, {"norm_before_fc": True, "norm_before_residual": True}),
    "normalised layers and outputs": (LLAMA, {"fc_norm": True, "norm_output": True}),
    "windows": (Qwen3Config(**SIZES, **WINDOWS), {}),
    "windows in llama": (LlamaConfig(**SIZES, **WINDOWS), {"norm_output": True}),
    "own embeddings": (QWEN, {"embed_requires_grad": True}),
}
LAYERS = [0, 1, 2]


def write(folder: Path, target: PreTrainedModel, **changes: Any) -> dict[str, Tensor]:
    """Writes a drafter in the layout of SafeAILab and SpecForge, with random weights, and returns these."""
    text = target.config.get_text_config()
    hidden, mlp, heads, keys, head_dim, vocab = text.hidden_size, 40, 4, 2, 8, 40
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 2048,
        "max_window_layers": 36,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": keys,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "sliding_window": None,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": text.vocab_size,
        **changes,
    }
    tensors = random_tensors(
        {
            "fc.weight": (hidden, 3 * hidden),
            "lm_head.weight": (vocab, hidden),
            "norm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (keys * head_dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (keys * head_dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
            "midlayer.mlp.gate_proj.weight": (mlp, hidden),
            "midlayer.mlp.up_proj.weight": (mlp, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, mlp),
        }
    )
    kept = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(2))[:vocab].sort().values
    tensors["d2t"] = kept - torch.arange(vocab)
    tensors["t2d"] = torch.zeros(text.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    write_checkpoint(folder, {key: value for key, value in config.items() if value is not None}, tensors)
    return tensors


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str], tmp_path: Path) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        write(tmp_path, model)
        return {"assistant_model": load_drafter(tmp_path, target_model=model), "tree_budget": 11}

    check_case(case, make_drafts)


# --- the speculators library ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return import_speculators()


@torch.no_grad()
def reference_log_probs(theirs: nn.Module, features: Tensor, tokens: list[int], drafted: tuple[int, ...]) -> Tensor:
    """`(draft vocabulary,)`: the library's distribution after `drafted`, which follows `tokens`.

    The library runs a chain from every place at once, fed with the tokens that follow it.
    """
    logits: list[Tensor] = []
    hook = theirs.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    length = len(tokens) - 1 + len(drafted)
    input_ids = torch.tensor([[*tokens[1:], *drafted]])
    padded = torch.cat((features, torch.zeros(1, len(drafted), features.shape[2])), dim=1)
    try:
        theirs(padded, input_ids, torch.zeros(1, length, dtype=torch.long), ttt_steps=len(drafted) + 1)
    finally:
        hook.remove()
    return logits[-1][0, len(tokens) - 2].log_softmax(-1)


def best_prefixes(
    theirs: nn.Module, features: Tensor, tokens: list[int], depth: int, budget: int
) -> dict[tuple[int, ...], float]:
    """The most probable prefixes, with log-probabilities."""
    order = count()
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def expand(prefix: tuple[int, ...], log_prob: float) -> None:
        if len(prefix) < depth:
            log_probs = reference_log_probs(theirs, features, tokens, prefix)
            for own, more in enumerate(log_probs.tolist()):
                token = own + (int(theirs.d2t[own]) if theirs.use_draft_vocab else 0)
                heapq.heappush(heap, (-(log_prob + more), next(order), (*prefix, token)))

    expand((), 0.0)
    found: dict[tuple[int, ...], float] = {}
    while len(found) < budget:
        cost, _, prefix = heapq.heappop(heap)
        found[prefix] = -cost
        expand(prefix, -cost)
    return found


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # speculators uses it
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_trees_over_rounds(reference: ModuleType, tmp_path: Path, variant: str) -> None:
    """In two rows at different places, trees are the best-first ones under the library's distributions."""
    layers, settings = VARIANTS[variant]
    theirs = make_reference(reference, layers, "eagle3", **settings)
    theirs.norm.weight.data *= 6  # sharp distributions make deep trees
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    if settings.get("embed_requires_grad"):
        target.get_input_embeddings().weight.data.normal_()
    ours = load_drafter(tmp_path, target_model=target)
    assert type(ours) is Eagle3DraftModel
    generator = Eagle3TreeCandidateGenerator(ours, target, DDTreeConfig(draft_length=4))
    assert generator.feature_layers == tuple(layer - 1 for layer in AUX_LAYERS)
    tokens = torch.randint(1, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    seen = [torch.zeros(1, 0, 3 * HIDDEN)] * 2
    places, deepest = [0, 0], 0
    for new in ((7, 5), (1, 4), (4, 1), (2, 3)):
        features = torch.randn(2, max(new), 3 * HIDDEN)
        places = [place + more for place, more in zip(places, new)]
        seen = [torch.cat((old, features[row, : new[row]][None]), dim=1) for row, old in enumerate(seen)]
        behind = [max(places) - place for place in places]
        input_ids = torch.stack([F.pad(tokens[row, : places[row] + 1], (behind[row], 0)) for row in range(2)])
        context = DraftContext(input_ids, places, generator.reduce_features(features), list(new))
        for row, tree in enumerate(generator.propose(context, 9)):
            so_far = tokens[row, : places[row] + 1].tolist()
            expected = best_prefixes(theirs, seen[row], so_far, 4, 9)
            found = {
                tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item() for node in range(1, len(tree))
            }
            deepest = max(deepest, *map(len, found))
            assert found.keys() == expected.keys()
            assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
    assert deepest > 2
    prompt = torch.arange(1, 9)[None]
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafts = {"assistant_model": ours, "generation_strategy": "ddtree", "tree_budget": 9}
    assert target.generate(prompt, max_new_tokens=12, do_sample=False, **drafts).tolist() == plain.tolist()


# --- the layout of SafeAILab and SpecForge -------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_the_two_layouts_are_one_drafter(tmp_path: Path, architecture: str) -> None:
    """The library's names of the same weights give the same drafter."""
    target = make_model("llama", "sdpa")
    tensors = write(tmp_path / "one", target, architectures=[architecture])
    one = load_drafter(tmp_path / "one", target_model=target)
    layers = {
        key: value
        for key, value in json.loads((tmp_path / "one" / "config.json").read_text()).items()
        if key not in ("architectures", "draft_vocab_size", "eagle_config", "torch_dtype", "use_sliding_window")
        and key not in ("sliding_window", "max_window_layers", "use_cache")
    }
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "transformer_layer_config": layers,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    other = load_drafter(write_checkpoint(tmp_path / "other", config, named), target_model=target)
    assert one.config.layer_ids(3) == other.config.layer_ids(3) == tuple(LAYERS)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    same = ("head_dim", "hidden_size", "qk_norm", "rope_parameters", "norm_output", "rms_norm_eps", "layer_types")
    assert all(getattr(one.config, name) == getattr(other.config, name) for name in same)


def test_layers_that_are_not_named(tmp_path: Path) -> None:
    """A low, a middle and a high one: the inputs of layers 2, 4 and 5 of 8 are the outputs of 1, 3 and 4."""
    sizes = SIZES | {"num_hidden_layers": 8}
    target = LlamaForCausalLM(LlamaConfig(**sizes))
    write(tmp_path, target, eagle_config=None)
    drafter = load_drafter(tmp_path, target_model=target)
    assert Eagle3TreeCandidateGenerator(drafter, target).feature_layers == (1, 3, 4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    write(tmp_path, target)
    drafter = load_drafter(tmp_path, target_model=target)
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again", target_model=target)
    assert type(again) is Eagle3DraftModel and again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert torch.equal(again.target_token_ids, drafter.target_token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64, "target_hidden_size": 32}, "`hidden_size` 64, but `target_hidden_size` 32"),
        ({"vocab_size": 65}, "`vocab_size` 65, but the target.* 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"`target_layer_ids` hold \[3\]"),
        ({"eagle_config": None}, r"`target_layer_ids` hold \[-1\]"),
        ({"eagle_config": {"parallel_drafting": True}}, "has 'parallel_drafting' in its `eagle_config`"),
        ({"mask_token_id": 3}, "has 'mask_token_id' in its config.json"),
        ({"layer_types": ["sliding_attention"]}, r"'layer_types' \['sliding_attention'\], which is not supported"),
    ],
)
def test_drafters_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    write(tmp_path, target, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)


def test_maps_and_layers_that_are_refused(reference: ModuleType, tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    write(tmp_path, target)
    weights = load_file(tmp_path / "model.safetensors") | {"d2t": torch.full((40,), VOCAB)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has a map `d2t` from its 40 tokens"):
        load_drafter(tmp_path, target_model=target)
    make_reference(reference, LLAMA, "eagle3").save_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["transformer_layer_config"] = {"model_type": "olmo2"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="`model_type` 'olmo2', but only EAGLE-3 layers of llama and qwen3"):
        load_drafter(tmp_path / "other")


def test_state_of_another_kind() -> None:
    target = make_model("llama", "sdpa")
    config = Eagle3Config(hidden_size=32, vocab_size=64, num_hidden_layers=1, target_layer_ids=[0, 1, 2], head_dim=8)
    with pytest.raises(TypeError, match="`draft_state` must be a former output's"):
        Eagle3TreeCandidateGenerator(Eagle3DraftModel(config), target, state=object())  # type: ignore[arg-type]
