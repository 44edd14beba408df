"""DSpark drafters: every Markov head in every layout, against the speculators library and against plain equations."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.dspark import HEADS, RANK, SETTINGS, Tensors, head_shapes, plain_tree, sharpen
from helpers.families import make_model
from helpers.generator_grid import GRID, check_case
from helpers.heads import MASK, backbone_shapes, random_tensors, write_checkpoint, zlab_config
from helpers.speculators_reference import (
    BLOCK,
    DRAFT_VOCAB,
    HIDDEN,
    SIZES,
    VOCAB,
    import_speculators,
    make_reference,
    make_target,
    reference_block,
)
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config

from hf_ddtree import DDTreeConfig, DraftContext, load_drafter
from hf_ddtree.candidate_generators.sequential_head import SequentialHeadTreeCandidateGenerator
from hf_ddtree.drafters import DFlashContextCache, DSparkConfig, DSparkDraftModel

LAYOUTS = ("deepspec", "specforge")


def write(folder: Path, target: PreTrainedModel, layout: str, head: str, **settings: Any) -> Tensors:
    """Writes a drafter with random weights, and returns these."""
    own = SETTINGS | {"markov_head_type": head, **settings}
    if layout == "deepspec":
        last = target.config.get_text_config().num_hidden_layers - 1
        beside = own | {"mask_token_id": MASK, "target_layer_ids": [0, last], "num_anchors": 64}
        config = zlab_config(target, "Qwen3DSparkModel", {}, **beside)
        del config["dflash_config"], config["auto_map"]
    else:
        nested = own | {"projector_type": "dspark", "confidence_head_alpha": 1.0}
        config = zlab_config(target, "DSparkDraftModel", nested)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = backbone_shapes(config)
    if layout == "deepspec":
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    tensors = random_tensors(shapes | head_shapes(own, hidden, vocab))
    sharpen(tensors)
    write_checkpoint(folder, config, tensors)
    return tensors


# --- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case: tuple[str, str], tmp_path: Path) -> None:
    index = GRID.index(case)

    def make_drafts(model: PreTrainedModel) -> dict[str, Any]:
        write(tmp_path, model, LAYOUTS[index % 2], HEADS[index % 3])
        return {"assistant_model": load_drafter(tmp_path, target_model=model), "tree_budget": 20}

    check_case(case, make_drafts)


# --- the plain equations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_trees_over_rounds(layout: str, head: str, tmp_path: Path) -> None:
    """Every node, and its probability, is what the equations give, in two rows that are at different places."""
    target = make_model("llama", "sdpa")
    tensors = write(tmp_path, target, layout, head)
    drafter = load_drafter(tmp_path, target_model=target)
    config = DDTreeConfig(tree_budget=12)
    generator = SequentialHeadTreeCandidateGenerator(drafter, target, config)
    embeddings = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
    lm_head = tensors.get("lm_head.weight", target.get_output_embeddings().weight)
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
        for row, tree in enumerate(generator.propose(context, 12)):
            root = int(tokens[row, places[row]])
            block = embeddings[torch.tensor([root] + [MASK] * 5)][None]
            hidden = drafter(block, seen[row])[0]
            expected = plain_tree(tensors, head, hidden, hidden @ lm_head.T, root, 12)
            found = {
                tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item() for node in range(1, len(tree))
            }
            deepest = max(deepest, *map(len, found))
            assert found.keys() == expected.keys()
            assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
    assert deepest > 2


def test_without_a_markov_head_or_without_confidence(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    prompt = torch.arange(1, 12)[None]
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    for index, settings in enumerate(
        (
            {"markov_rank": 0, "confidence_head_with_markov": False},
            {"markov_rank": 0, "enable_confidence_head": False},
            {"enable_confidence_head": False},
            {"confidence_head_with_markov": False},
        )
    ):
        write(tmp_path / str(index), target, "specforge", "vanilla", **settings)
        drafter = load_drafter(tmp_path / str(index), target_model=target)
        assert (drafter.markov_head is None) == (drafter.config.markov_rank == 0)
        for probabilities in ("conditional", "marginal"):
            tree = target.generate(
                prompt,
                max_new_tokens=20,
                do_sample=False,
                assistant_model=drafter,
                generation_strategy="ddtree",
                tree_budget=9,
                tree_probabilities=probabilities,
            )
            assert tree.tolist() == plain.tolist()


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    tensors = write(tmp_path, target, "deepspec", "rnn")
    drafter = load_drafter(tmp_path, target_model=target)
    drafter.save_pretrained(tmp_path / "again")
    again = load_drafter(tmp_path / "again", target_model=target)
    assert type(again) is DSparkDraftModel and again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"markov_head_type": "fir"}, "`markov_head_type` is 'fir', but must be one of 'vanilla'"),
        ({"markov_rank": -1}, "`markov_rank` is -1"),
        ({"markov_rank": 0}, "`confidence_head_with_markov` is True, but `markov_rank` is 0"),
        ({"markov_rank": None}, r"DSpark drafter, but its config.json has no \['markov_rank'\]"),
        ({"dspark_backbone_conv_enabled": True}, "'dspark_backbone_conv_enabled' True, which is not supported"),
        ({"head_temperature": 2.0}, "has 'head_temperature' in its config.json"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    write(tmp_path, target, "specforge", "vanilla")
    config = zlab_config(target, "DSparkDraftModel", {"markov_rank": RANK, "enable_confidence_head": True, **settings})
    write_checkpoint(tmp_path, config, {})
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)


def test_a_vocabulary_that_is_owned_and_reduced() -> None:
    with pytest.raises(ValueError, match="`owns_vocabulary` is True, but `draft_vocab_size` is set"):
        DSparkConfig(owns_vocabulary=True, draft_vocab_size=10)


# --- the speculators library ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return import_speculators()


@pytest.mark.parametrize("vocabulary", [DRAFT_VOCAB, VOCAB])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_speculators(reference: ModuleType, tmp_path: Path, head: str, from_anchor: bool, vocabulary: int) -> None:
    """Hidden states, logits, biases and confidence over several rounds."""
    theirs = make_reference(
        reference,
        Qwen3Config(**SIZES),
        "dspark",
        draft_vocab_size=vocabulary,
        markov_rank=RANK,
        markov_head_type=head,
        sample_from_anchor=from_anchor,
    )
    theirs.save_pretrained(tmp_path)
    target = make_target(theirs)
    ours = load_drafter(tmp_path, target_model=target)
    features, token_ids = torch.randn(1, 60, 3 * HIDDEN), torch.randint(1, VOCAB, (60,))
    cache, seen = DFlashContextCache(), 0
    for root in (3, 4, 9, 30, 31, 40):
        expected_hidden, expected_logits = reference_block(theirs, features, token_ids, root)
        block = torch.full((1, BLOCK), ours.config.mask_token_id)
        block[0, 0] = token_ids[root]
        hidden = ours(ours.embed(block, target.get_input_embeddings()), features[:, seen:root], cache=cache)[0]
        torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=1e-5)
        logits = ours.compute_logits(hidden, target.get_output_embeddings())
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)
        # The library runs the heads on a whole block of true tokens at once.
        first = ours.config.first_slot
        before = token_ids[root : root + BLOCK - first]
        slots = hidden[first:]
        expected_bias = theirs.markov_head.block_bias(prev_token_ids=before[None], hidden_states=slots[None])[0]
        features_of_slots = torch.cat((slots, theirs.markov_head.prev_embeddings(before)), dim=-1)
        expected_confidence = F.logsigmoid(theirs.confidence_head(features_of_slots))
        states = ours.start_states(1)
        for depth in range(len(slots)):
            bias, confidence, states = ours.correct(
                slots[depth : depth + 1], before[depth : depth + 1], states, depth, target.get_input_embeddings()
            )
            torch.testing.assert_close(bias[0], expected_bias[depth], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(confidence[0], expected_confidence[depth], atol=1e-5, rtol=1e-5)
        seen = root
    prompt = torch.arange(1, 9)[None]
    plain = target.generate(prompt, max_new_tokens=16, do_sample=False)
    tree = target.generate(
        prompt, max_new_tokens=16, do_sample=False, assistant_model=ours, generation_strategy="ddtree", tree_budget=9
    )
    assert tree.tolist() == plain.tolist()
