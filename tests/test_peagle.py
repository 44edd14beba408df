"""P-EAGLE drafters, against the speculators library."""

from __future__ import annotations

import heapq
import json
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.generator_grid import GRID, check_case
from helpers.speculators_reference import HIDDEN, SIZES, VOCAB, import_speculators, make_reference, make_target
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

import hf_ddtree
from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.peagle import PEagleTreeCandidateGenerator
from hf_ddtree.drafters.peagle import PEagleConfig, PEagleDraftModel

DEPTH = 4
ONE_LAYER = SIZES | {"num_hidden_layers": 1}
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA, QWEN = LlamaConfig(**ONE_LAYER, rope_theta=5000.0), Qwen3Config(**ONE_LAYER)
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen": (QWEN, {"draft_vocab_size": VOCAB}),
    "the target's embeddings": (QWEN, {"embed_requires_grad": False, "draft_vocab_size": VOCAB}),
    "layers of two kinds": (Qwen3Config(**SIZES, **WINDOWS), {"norm_before_residual": True}),
    "windows in llama": (LlamaConfig(**SIZES, **WINDOWS), {}),
    "normalised features": (LLAMA, {"norm_before_fc": True}),
    "normalised layers and outputs": (LLAMA, {"fc_norm": True, "norm_output": True}),
}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return import_speculators()


def make_theirs(reference: ModuleType, variant: str) -> nn.Module:
    layers, settings = VARIANTS[variant]
    theirs = make_reference(reference, layers, "peagle", mask_token_id=3, **settings)
    theirs.norm.weight.data *= 6  # sharp distributions make deep trees
    return theirs


@torch.no_grad()
def reference_logits(
    theirs: nn.Module, features: Tensor, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """`(depth, draft vocabulary)`: what the library predicts after `tokens`.

    Its forward, which is made for training, gets every token and one chain of masks behind the last.
    """
    from speculators.models.peagle import core

    place = len(tokens) - 2
    anchors = torch.cat((torch.arange(place + 1), torch.full((DEPTH - 1,), place)))
    depths = torch.cat((torch.zeros(place + 1, dtype=torch.long), torch.arange(1, DEPTH)))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **kwargs: (anchors, depths))
    monkeypatch.setattr(core, "compute_metrics", lambda **kwargs: (None, {}))
    length = place + DEPTH
    logits: list[Tensor] = []
    hook = theirs.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    try:
        theirs(
            F.pad(features, (0, 0, 0, length - features.shape[1])),
            F.pad(torch.tensor([tokens[1:]]), (0, DEPTH - 1)),
            torch.zeros(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, HIDDEN),
        )
    finally:
        hook.remove()
    return logits[0][0, place:]


def best_prefixes(theirs: nn.Module, logits: Tensor, budget: int) -> dict[tuple[int, ...], float]:
    """The most probable prefixes of independent tokens, with log-probabilities."""
    order = count()
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def expand(prefix: tuple[int, ...], log_prob: float) -> None:
        if len(prefix) < DEPTH:
            for own, more in enumerate(logits[len(prefix)].log_softmax(-1).tolist()):
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
def test_logits_over_rounds(
    reference: ModuleType, tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two rows at different places, logits are the library's, and trees the best-first ones under them."""
    theirs = make_theirs(reference, variant)
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    assert type(ours) is PEagleDraftModel
    generator = PEagleTreeCandidateGenerator(ours, target, DDTreeConfig(calibrate=False))
    assert ours.config.draft_length == DEPTH
    logits: list[Tensor] = []
    ours.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    tokens = torch.randint(1, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    seen = [torch.zeros(1, 0, 3 * HIDDEN)] * 2
    places, deepest = [0, 0], 0
    for new in ((7, 5), (1, 4), (4, 1), (1, 1), (3, 2)):
        features = torch.randn(2, max(new), 3 * HIDDEN)
        places = [place + more for place, more in zip(places, new)]
        seen = [torch.cat((old, features[row, : new[row]][None]), dim=1) for row, old in enumerate(seen)]
        behind = [max(places) - place for place in places]
        input_ids = torch.stack([F.pad(tokens[row, : places[row] + 1], (behind[row], 0)) for row in range(2)])
        context = DraftContext(input_ids, places, generator.reduce_features(features), list(new))
        for row, tree in enumerate(generator.propose(context, 12)):
            so_far = tokens[row, : places[row] + 1].tolist()
            expected_logits = reference_logits(theirs, seen[row], so_far, monkeypatch)
            torch.testing.assert_close(logits[-1][row], expected_logits, atol=1e-5, rtol=1e-5)
            expected = best_prefixes(theirs, expected_logits, 12)
            found = {
                tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item() for node in range(1, len(tree))
            }
            deepest = max(deepest, *map(len, found))
            assert found.keys() == expected.keys()
            assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
    assert deepest > 2


def make_drafter(target: PreTrainedModel, **changes: Any) -> PEagleDraftModel:
    """A drafter with random weights that reads the first and the last layer."""
    config = target.config.get_text_config()
    settings = {
        **{"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": 40},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"target_layer_ids": [0, config.num_hidden_layers - 1], "mask_token_id": 5, "draft_length": 6},
        **WINDOWS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = PEagleDraftModel(PEagleConfig(**settings | changes))
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str]) -> None:
    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        return {"assistant_model": make_drafter(model), "tree_budget": 11}

    check_case(case, make_drafts)


@torch.no_grad()
def test_one_forward_for_a_tree_and_what_it_learns() -> None:
    target = make_target(make_drafter_of_the_library())
    drafter = make_drafter(target)
    prompt = torch.arange(1, 9)[None]
    arguments: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    drafts = {"assistant_model": drafter, "generation_strategy": "ddtree", "tree_budget": 9}
    plain = target.generate(prompt, **arguments)
    for shape in ("best_first", "spine_first", "chain"):
        output = target.generate(prompt, **arguments, **drafts, tree_shape=shape, return_trees=True)
        assert output.sequences.tolist() == plain.sequences.tolist()
        stats = output.ddtree_stats
        assert stats.draft_forwards <= stats.target_forwards
        assert max(max(tree.depths.tolist()) for trees in stats.trees for tree in trees) <= 6
    assert not drafter.calibration.is_neutral


def test_the_report_says_what_it_is(reference: ModuleType, tmp_path: Path) -> None:
    theirs = make_theirs(reference, "llama")
    theirs.save_pretrained(tmp_path)
    report = hf_ddtree.check(make_target(theirs), tmp_path)
    assert (report.drafter_kind, report.drafter_fits) == ("P-EAGLE", True)


def make_drafter_of_the_library() -> nn.Module:
    """What `make_target` takes embeddings and a head of."""
    module = nn.Module()
    module.embed_tokens, module.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    module.use_draft_vocab = False
    return module


def test_saved_and_loaded(reference: ModuleType, tmp_path: Path) -> None:
    theirs = make_theirs(reference, "layers of two kinds")
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    drafter = load_drafter(tmp_path, target_model=target)
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again", target_model=target)
    assert type(again) is PEagleDraftModel and again.config.to_diff_dict() == drafter.config.to_diff_dict()
    own = drafter.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "`mask_token_id` is None, but must be between 0 and"),
        ({"mask_token_id": VOCAB}, f"`mask_token_id` is {VOCAB}, but must be between 0 and"),
        ({"mask_scale": 2.0}, "has 'mask_scale' in its config.json, which may change"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, "`draft_length` is 0"),
    ],
)
def test_settings_that_are_refused(
    reference: ModuleType, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    theirs = make_theirs(reference, "llama")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=make_target(theirs))


def test_a_learnt_state_that_is_missing(reference: ModuleType, tmp_path: Path) -> None:
    theirs = make_theirs(reference, "llama")
    theirs.save_pretrained(tmp_path, state_dict={k: v for k, v in theirs.state_dict().items() if k != "mask_hidden"})
    with pytest.raises(ValueError, match="lacks 1 of the drafter's weights, e.g. 'mask_hidden'"):
        load_drafter(tmp_path)
