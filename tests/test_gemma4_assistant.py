"""Gemma 4's assistants: chains as in Transformers' own loop, trees against their forward, and the same tokens."""

from __future__ import annotations

import heapq
import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import VOCAB_SIZE, WINDOW, make_config, make_model
from helpers.generator_grid import CALLS, check_call, random_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import candidate_generator
from transformers.generation import utils as generation_utils

import hf_ddtree
from hf_ddtree.candidate_generators.gemma4_assistant import Gemma4AssistantTreeCandidateGenerator
from hf_ddtree.drafter_kinds import checkpoint_kind
from hf_ddtree.interop.versions import CACHE_KEY

HIDDEN = 32
Pair = tuple[PreTrainedModel, PreTrainedModel]


@cache
def make_pair(
    seed: int = 0, ordered: bool = False, noise: float = 2.0, window: int = WINDOW, attention: str = "sdpa"
) -> Pair:
    """A target that mostly follows a fixed map from token to token, and an assistant that has learnt it in part.

    Args:
        seed: Seeds all weights.
        ordered: Whether the assistant scores the tokens of the likeliest clusters alone.
        noise: How much the layers of both add to it.
        window: The target's sliding window.
        attention: The attention function of both.
    """
    layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    own = {
        **{"layer_types": layer_types, "num_kv_shared_layers": 4, "tie_word_embeddings": True},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    }
    text_config = make_config("gemma4", sliding_window=window, **own)
    config = transformers.Gemma4AssistantConfig(
        text_config=text_config.to_dict(),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=6,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = transformers.AutoModelForCausalLM.from_config(
            make_config("gemma4", sliding_window=window), attn_implementation=attention, dtype=torch.float32
        )
        assistant = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
        follower, embeddings = torch.randperm(VOCAB_SIZE), torch.randn(VOCAB_SIZE, HIDDEN)
        for model in (target, assistant):
            for name, parameter in model.eval().requires_grad_(False).named_parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                elif "post_" in name:
                    torch.nn.init.constant_(parameter, noise)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        target.model.embed_tokens.weight.copy_(embeddings)
        target.lm_head.weight[follower] = embeddings
        assistant.model.embed_tokens.weight[follower] = embeddings
        assistant.pre_projection.weight[:, :HIDDEN] += 2 * torch.eye(HIDDEN)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    return target, assistant


def of_committed_tokens(shared: dict[str, tuple[Tensor, Tensor]], length: int, window: int) -> dict[str, Any]:
    """The first `length` tokens of the target's keys and values; through a window those that the target sees."""
    behind = shared["full_attention"][0].shape[2] - length
    cut = {}
    for kind, entries in shared.items():
        kept = [entry[:, :, : entry.shape[2] - behind] for entry in entries]
        cut[kind] = tuple(entry[:, :, 1 - window :] for entry in kept) if kind == "sliding_attention" else tuple(kept)
    return cut


class Count:
    """Counts the forwards of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls = 0
        self.hook = model.register_forward_hook(self.add)

    def add(self, *args: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("window", [WINDOW, 64])
@pytest.mark.parametrize("seed", range(3))
def test_chains_are_those_of_transformers(
    ordered: bool, window: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' loop, shown the keys of no rejected token and of no token beyond the window: the same tokens from
    as many forwards of both models."""
    theirs = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    if issubclass(theirs, candidate_generator.AssistedCandidateGenerator):
        pytest.skip("this version of Transformers takes the state of the prompt's first token for that of its last")

    class OfCommittedTokens(theirs):  # type: ignore[misc, valid-type]
        def get_candidates(self, input_ids: Tensor, model_kwargs: Any, model_outputs: Any, *args: Any, **kwargs: Any):
            if model_outputs is not None:
                shared = dict(model_outputs.shared_kv_states.items())
                model_outputs.shared_kv_states = of_committed_tokens(shared, input_ids.shape[1] - 1, window)
            return super().get_candidates(input_ids, model_kwargs, model_outputs, *args, **kwargs)

    monkeypatch.setattr(generation_utils, "SinglePositionMultiTokenCandidateGenerator", OfCommittedTokens)
    target, assistant = make_pair(seed, ordered, window=window)
    monkeypatch.setattr(assistant.generation_config, "num_assistant_tokens", 4)
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "assistant_model": assistant}
    of_target, of_assistant = Count(target), Count(assistant.model)
    prompt = random_tokens(seed, (1, 12), VOCAB_SIZE)
    try:
        expected = target.generate(prompt, **arguments).tolist()
        forwards = of_target.calls, of_assistant.calls
        of_target.calls = of_assistant.calls = 0
        output = target.generate(
            prompt, **arguments, generation_strategy="dflash", draft_length=4, return_dict_in_generate=True
        )
    finally:
        of_target.hook.remove()
        of_assistant.hook.remove()
    assert output.sequences.tolist() == expected
    assert (of_target.calls, of_assistant.calls) == forwards
    assert (output.ddtree_stats.target_forwards, output.ddtree_stats.draft_forwards) == forwards
    assert forwards[0] < 30


@torch.no_grad()
def best_prefixes(
    target: PreTrainedModel, assistant: PreTrainedModel, tokens: Tensor, depth: int, budget: int
) -> dict[tuple[int, ...], float]:
    """The most probable prefixes after tokens `(1, length)`, by the assistant's own forward for a token at a time."""
    seen = {"output_hidden_states": True, "return_shared_kv_states": True, "logits_to_keep": 0}
    outputs = target(tokens[:, :-1], **seen)
    length = tokens.shape[1] - 1
    window = target.config.get_text_config().sliding_window
    shared = of_committed_tokens(dict(outputs.shared_kv_states.items()), length, window)
    order = count()
    heap: list[tuple[float, int, tuple[int, ...], Tensor]] = []
    found: dict[tuple[int, ...], float] = {}

    def expand(prefix: tuple[int, ...], token: Tensor, state: Tensor, cost: float) -> None:
        if len(prefix) == depth:
            return
        step = assistant(
            inputs_embeds=torch.cat((target.get_input_embeddings()(token), state), dim=-1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states=shared,
        )
        logits = step.logits[0, -1]
        if assistant.masked_embedding is not None:  # tokens of other clusters share the lowest score
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        for number, log_prob in enumerate(logits.log_softmax(-1).tolist()):
            if log_prob > -torch.inf:
                heapq.heappush(heap, (cost - log_prob, next(order), (*prefix, number), step.last_hidden_state))

    expand((), tokens[:, -1:], outputs.hidden_states[-1][:, -1:], 0.0)
    while len(found) < budget:
        cost, _, prefix, state = heapq.heappop(heap)
        found[prefix] = -cost
        expand(prefix, torch.tensor([prefix[-1:]]), state, cost)
    return found


@pytest.mark.core
@pytest.mark.parametrize(("ordered", "attention"), [(False, "sdpa"), (True, "sdpa"), (False, "eager")])
def test_trees_over_rounds(ordered: bool, attention: str) -> None:
    """In two rows, one of them padded, every round's tree is the best-first one under the assistant's distributions
    after the committed tokens."""
    target, assistant = make_pair(5, ordered, attention=attention)
    pads = torch.tensor([0, 4])
    prompt = random_tokens(3, (2, 12), VOCAB_SIZE)
    mask = (torch.arange(12) >= pads[:, None]).long()
    output = target.generate(
        prompt * mask,
        **{"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None},
        **{"assistant_model": assistant, "generation_strategy": "ddtree", "tree_shape": "best_first"},
        **{"tree_budget": 9, "draft_length": 3, "return_trees": True, "return_dict_in_generate": True},
    )
    stats, deepest = output.ddtree_stats, 0
    assert stats.trees is not None and stats.accepted_paths is not None
    lengths = [13, 13]
    for trees, paths in zip(stats.trees, stats.accepted_paths):
        for row, (tree, path) in enumerate(zip(trees, paths)):
            if path and lengths[row] + 4 <= output.sequences.shape[1]:  # deeper nodes could not be emitted
                so_far = output.sequences[row : row + 1, pads[row] : lengths[row]]
                expected = best_prefixes(target, assistant, so_far, 3, 9)
                found = {
                    tuple(tree.tokens_of(tree.path(node))[1:]): tree.log_probs[node].item()
                    for node in range(1, len(tree))
                }
                assert found.keys() == expected.keys()
                assert all(abs(found[prefix] - expected[prefix]) < 1e-5 * max(1.0, -found[prefix]) for prefix in found)
                deepest = max(deepest, *map(len, found))
            lengths[row] += len(path)
    assert deepest == 3 and lengths[0] > 16


VARIANTS: dict[str, dict[str, Any]] = {
    "full vocabulary": {},
    "clusters": {"ordered": True, "seed": 1},
    "eager, random": {"attention": "eager", "noise": 9.0, "seed": 2},
}


@pytest.mark.core
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", CALLS)
def test_same_tokens(call: str, variant: str) -> None:
    target, assistant = make_pair(**VARIANTS[variant])
    check_call(target, call, lambda model: {"assistant_model": assistant, "tree_budget": 11})


@pytest.mark.parametrize(
    "cache",
    [
        *(pytest.param(cache, marks=pytest.mark.core) for cache in ("without windows", "static")),
        # The oldest supported Transformers fails on such a cache in standard decoding.
        "with its past",
    ],
)
def test_drafts_do_not_depend_on_how_the_cache_is_kept(cache: str) -> None:
    target, assistant = make_pair()
    prompt = random_tokens(1, (1, 14), VOCAB_SIZE)
    arguments: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    plain = target.generate(prompt, **arguments).tolist()
    arguments |= {"assistant_model": assistant, "generation_strategy": "ddtree", "tree_budget": 8}
    arguments |= {"return_dict_in_generate": True, "return_trees": True}
    expected = target.generate(prompt, **arguments)
    if cache == "without windows":
        arguments[CACHE_KEY] = DynamicCache()
    elif cache == "with its past":
        arguments[CACHE_KEY] = DynamicCache(config=target.config)
        arguments[CACHE_KEY].activate_past_recording()
    elif cache == "static":
        arguments["cache_implementation"] = "static"
    output = target.generate(prompt, **arguments)
    assert output.sequences.tolist() == plain
    assert output.ddtree_stats.tokens_per_forward > 1.2
    for (tree,), (expected_tree,) in zip(output.ddtree_stats.trees, expected.ddtree_stats.trees, strict=True):
        assert tree.token_ids.tolist() == expected_tree.token_ids.tolist()
        torch.testing.assert_close(tree.log_probs, expected_tree.log_probs, atol=1e-4, rtol=1e-4)


@pytest.mark.core
def test_with_a_lookup_and_in_one_precision_or_another() -> None:
    target, assistant = make_pair()
    prompt = random_tokens(2, (1, 12), VOCAB_SIZE)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = target.generate(prompt, **arguments).tolist()
    arguments |= {"generation_strategy": "ddtree", "tree_budget": 8}
    assert target.generate(prompt, **arguments, assistant_model=assistant, tree_lookup=True).tolist() == plain
    with torch.random.fork_rng():
        other = type(assistant)(assistant.config).eval()
    other.load_state_dict(assistant.state_dict())
    other = other.to(torch.bfloat16)
    output = target.generate(prompt, **arguments, assistant_model=other, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain and output.ddtree_stats.tokens_per_forward > 1.2


@pytest.mark.core
def test_loaded_and_checked(tmp_path: Path) -> None:
    target, assistant = make_pair()
    assistant.save_pretrained(tmp_path)
    assert checkpoint_kind(tmp_path).name == "assistant of Gemma 4"
    loaded = hf_ddtree.load_drafter(tmp_path, target_model=target)
    assert type(loaded) is type(assistant)
    report = hf_ddtree.check(target, tmp_path)
    assert (report.drafter_kind, report.drafter_fits) == ("assistant of Gemma 4", True)
    assert str(hf_ddtree.check(tmp_path).reason).startswith("It is a drafter.")
    with pytest.raises(ValueError, match="drafts for Gemma 4, but the target is a LlamaForCausalLM"):
        hf_ddtree.load_drafter(tmp_path, target_model=make_model("llama", "sdpa"))


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "text_changes", "message"),
    [
        ({"backbone_hidden_size": 48}, {}, "has backbone_hidden_size 48, but the target, a Gemma4ForCausalLM, has 32"),
        ({}, {"vocab_size": 65}, "has vocab_size 65, but the target, a Gemma4ForCausalLM, has 64"),
        ({}, {"head_dim": 16}, r"has keys for sliding_attention of \(heads, size\) \(2, 16\), but .* has \(2, 8\)"),
        ({}, {"num_key_value_heads": 4}, r"has keys for sliding_attention of \(heads, size\) \(4, 8\), but"),
        ({"use_ordered_embeddings": True, "num_centroids": 15}, {}, "`num_centroids` 15, but .* `vocab_size` .64"),
        ({}, {"global_head_dim": 32}, r"has keys for full_attention of \(heads, size\) \(2, 32\), but"),
    ],
)
def test_assistants_that_do_not_fit(
    changes: dict[str, Any], text_changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target, assistant = make_pair()
    text = {
        **{"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "num_kv_shared_layers": 2},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **text_changes},
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=make_config("gemma4", **text).to_dict(), **{"backbone_hidden_size": HIDDEN, **changes}
    )
    config.architectures = ["Gemma4AssistantForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf_ddtree.load_drafter(tmp_path, target_model=target)
    assert hf_ddtree.check(target, tmp_path).drafter_fits is False
    other = type(assistant)(config).eval()
    with pytest.raises(ValueError, match=message):
        target.generate(
            torch.arange(1, 5)[None], max_new_tokens=4, assistant_model=other, generation_strategy="ddtree"
        )


@pytest.mark.core
def test_clusters_that_do_not_hold_every_token_are_refused(tmp_path: Path) -> None:
    target, assistant = make_pair(1, ordered=True)
    assistant.save_pretrained(tmp_path)
    assert torch.equal(
        hf_ddtree.load_drafter(tmp_path, target_model=target).masked_embedding.token_ordering,
        assistant.masked_embedding.token_ordering,
    )
    weights = load_file(tmp_path / "model.safetensors")
    weights["masked_embedding.token_ordering"][0] = VOCAB_SIZE
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="token_ordering` that does not hold each of the 64 tokens once"):
        hf_ddtree.load_drafter(tmp_path, target_model=target)


@pytest.mark.core
def test_refusals(tmp_path: Path) -> None:
    target, assistant = make_pair()
    other = type(assistant)(assistant.config)
    with pytest.raises(ValueError, match="is in training mode"):
        Gemma4AssistantTreeCandidateGenerator(other.train(), target)
    other.eval().config.get_text_config()._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation='flex_attention', which takes no mask"):
        Gemma4AssistantTreeCandidateGenerator(other, target)
    other.config.get_text_config()._attn_implementation = "sdpa"
    with pytest.raises(TypeError, match="keeps no state. Leave it out"):
        Gemma4AssistantTreeCandidateGenerator(other, target, state=object())  # type: ignore[arg-type]
    assistant.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds 12 weights of another size than its config.json says, e.g. 'model"):
        hf_ddtree.load_drafter(tmp_path, target_model=target)
