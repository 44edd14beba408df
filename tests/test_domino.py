"""Domino drafters in SpecForge's layout, against plain equations."""

from __future__ import annotations

import heapq
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.generator_grid import GRID, check_case
from helpers.heads import MASK, backbone_shapes, random_tensors, write_checkpoint, zlab_config
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.sequential_head import SequentialHeadTreeCandidateGenerator
from hf_ddtree.drafters.domino import DominoDraftModel

GRU, WIDTH = 10, 12
Tensors = dict[str, Tensor]


def write(folder: Path, target: PreTrainedModel, architecture: str = "DominoDraftModel", **settings: Any) -> Tensors:
    """Writes a drafter with random weights, and returns these."""
    nested = {"projector_type": "domino", "emb_dim": WIDTH, "gru_hidden_dim": GRU, **settings}
    config = zlab_config(target, architecture, nested)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = backbone_shapes(config) | {
        "prefix_gru.weight_ih_l0": (3 * GRU, hidden),
        "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
        "embed_proj.0.weight": (WIDTH, hidden + GRU),
        "embed_proj.2.weight": (vocab, WIDTH),
    }
    tensors = random_tensors(shapes)
    # Sharp distributions make deep trees.
    tensors["embed_proj.2.weight"] *= 4
    tensors["norm.weight"] *= 8
    write_checkpoint(folder, config, tensors)
    return tensors


def gru_step(tensors: Tensors, x: Tensor, state: Tensor) -> Tensor:
    """r = s(Wr x + Ur h), z = s(Wz x + Uz h), n = tanh(Wn x + r (Un h)), h' = (1 - z) n + z h."""
    of_input = (tensors["prefix_gru.weight_ih_l0"] @ x).split(GRU)
    of_state = (tensors["prefix_gru.weight_hh_l0"] @ state).split(GRU)
    reset, update = (torch.sigmoid(of_input[part] + of_state[part]) for part in (0, 1))
    new = torch.tanh(of_input[2] + reset * of_state[2])
    return (1 - update) * new + update * state


@torch.no_grad()
def plain_tree(
    tensors: Tensors, embeddings: Tensor, hidden: Tensor, logits: Tensor, root: int, prefix_len: int, budget: int
) -> dict[tuple[int, ...], float]:
    """The most probable prefixes, with log-probabilities."""
    order = count()

    def children(prefix: tuple[int, ...], log_prob: float, state: Tensor) -> list[tuple[Any, ...]]:
        depth = len(prefix)
        if depth == len(hidden):
            return []
        state = gru_step(tensors, embeddings[([root, *prefix])[-1]], state)
        corrected = logits[depth]
        if depth >= prefix_len:
            inner = F.silu(tensors["embed_proj.0.weight"] @ torch.cat((hidden[depth], state)))
            corrected = corrected + tensors["embed_proj.2.weight"] @ inner
        return [
            (-(log_prob + p), next(order), (*prefix, token), state)
            for token, p in enumerate(corrected.log_softmax(-1).tolist())
        ]

    heap = children((), 0.0, torch.zeros(GRU))
    heapq.heapify(heap)
    found: dict[tuple[int, ...], float] = {}
    while len(found) < budget:
        cost, _, prefix, state = heapq.heappop(heap)
        found[prefix] = -cost
        for child in children(prefix, -cost, state):
            heapq.heappush(heap, child)
    return found


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str], tmp_path: Path) -> None:
    index = GRID.index(case)

    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        architecture = ("DominoDraftModel", "DFlashDraftModel")[index % 2]
        write(tmp_path, model, architecture, shift_label=index % 3 == 0, pure_draft_prefix_len=index % 4)
        return {"assistant_model": load_drafter(tmp_path, target_model=model), "tree_budget": 20}

    check_case(case, make_drafts)


@pytest.mark.parametrize("prefix_len", [0, 1, 3])
@pytest.mark.parametrize("shift_label", [False, True])
@torch.no_grad()
def test_trees_over_rounds(shift_label: bool, prefix_len: int, tmp_path: Path) -> None:
    """Every node, and its probability, is what the equations give, in two rows that are at different places."""
    target = make_model("llama", "sdpa")
    tensors = write(tmp_path, target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    drafter = load_drafter(tmp_path, target_model=target)
    assert type(drafter) is DominoDraftModel
    generator = SequentialHeadTreeCandidateGenerator(drafter, target, DDTreeConfig())
    embeddings, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    seen = [torch.zeros(1, 0, 64), torch.zeros(1, 0, 64)]
    tokens = torch.randint(1, 60, (2, 30), generator=torch.Generator().manual_seed(1))
    places, deepest = [0, 0], 0
    for new in ((7, 5), (1, 4), (4, 1), (2, 6)):
        features = torch.randn(2, max(new), 64)
        places = [place + count for place, count in zip(places, new)]
        seen = [torch.cat((old, features[row, : new[row]][None]), dim=1) for row, old in enumerate(seen)]
        behind = [max(places) - place for place in places]
        input_ids = torch.stack([F.pad(tokens[row, : places[row] + 1], (behind[row], 0)) for row in range(2)])
        context = DraftContext(input_ids, places, generator.reduce_features(features), list(new))
        for row, tree in enumerate(generator.propose(context, 14)):
            root = int(tokens[row, places[row]])
            hidden = drafter(embeddings[torch.tensor([root] + [MASK] * 5)][None], seen[row])[0]
            hidden = hidden if shift_label else hidden[1:]
            expected = plain_tree(tensors, embeddings, hidden, hidden @ lm_head.T, root, prefix_len, 14)
            found = {
                tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item() for node in range(1, len(tree))
            }
            deepest = max(deepest, *map(len, found))
            assert found.keys() == expected.keys()
            assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
    assert deepest > prefix_len


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    write(tmp_path, target, shift_label=True, pure_draft_prefix_len=2)
    drafter = load_drafter(tmp_path, target_model=target)
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again", target_model=target)
    assert type(again) is DominoDraftModel and again.config.to_diff_dict() == drafter.config.to_diff_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"emb_dim": None}, r"Domino drafter, but its config.json has no \['emb_dim'\]"),
        ({"gru_hidden_dim": 0}, "`gru_hidden_dim` is 0"),
        ({"gru_layers": 2}, "has 'gru_layers' in its config.json"),
        ({"projector_type": "dspine"}, "no drafter that can be loaded"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    nested = {"projector_type": "domino", "emb_dim": WIDTH, "gru_hidden_dim": GRU, **settings}
    write_checkpoint(tmp_path, zlab_config(target, "DominoDraftModel", nested), {})
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)
