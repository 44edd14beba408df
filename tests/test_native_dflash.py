"""DFlash drafters of Transformers' own classes: the same hidden states, drafts, tokens and forwards as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generator_grid import CALLS, check_call
from helpers.native_pair import DEPTH, HIDDEN, make_native_drafter, make_native_target
from transformers import PreTrainedModel
from transformers.generation import candidate_generator

from hf_ddtree import load_drafter
from hf_ddtree.drafters import DFlashContextCache, view_native
from hf_ddtree.interop.versions import CACHE_KEY

PROMPT = 9


def prompt(vocab_size: int, seed: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(1, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


class Counter:
    """Counts a target's forwards."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.forwards = 0
        self._hook = target.get_decoder().layers[0].register_forward_pre_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.forwards += 1

    def close(self) -> int:
        self._hook.remove()
        return self.forwards


@pytest.mark.core
@pytest.mark.parametrize("layer_types", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
@torch.no_grad()
def test_hidden_states_over_rounds(layer_types: list[str]) -> None:
    """Rounds that commit more and less than block and window, the prompt first."""
    from transformers.cache_utils import DFlashCache

    native = make_native_drafter(layer_types=layer_types)
    ours = view_native(native, make_native_target())
    block_size, num_layers = native.config.block_size, len(native.config.target_layer_ids)
    native_cache, our_cache = DFlashCache(config=native.config), DFlashContextCache()
    native_cache.activate_past_recording()
    generator = torch.Generator().manual_seed(0)
    root = 0
    for count in (5, 1, 3, 6, 2, 1, 30, 4, 4, 1, 6):
        features = torch.randn(1, count, num_layers * HIDDEN, generator=generator)
        block = torch.randn(1, block_size, HIDDEN, generator=generator)
        native_cache.set_previous_accepted_tokens(count)
        if root:
            native_cache.crop(-block_size)
        positions = torch.arange(root, root + count + block_size)[None]
        expected = native(block, features, position_ids=positions, **{CACHE_KEY: native_cache}).last_hidden_state
        torch.testing.assert_close(ours(block, features, positions, our_cache), expected, rtol=1e-5, atol=1e-5)
        root += count


@pytest.mark.core
@pytest.mark.parametrize("vocab_size", [4, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_chain_is_what_transformers_drafts(vocab_size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, the same forwards of the target, and in every round the same drafts."""
    target, drafter = make_native_target(vocab_size), make_native_drafter(seed)
    drafts = []
    generator_class = candidate_generator.DFlashTokenCandidateGenerator
    get_candidates = generator_class.get_candidates

    def recording(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        drafts.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(generator_class, "get_candidates", recording)
    call: dict[str, Any] = {
        "inputs": prompt(vocab_size, seed),
        "max_new_tokens": 40,
        "do_sample": False,
        "assistant_model": drafter,
    }
    counter = Counter(target)
    expected = target.generate(**call, speculation_type="dflash")
    forwards = counter.close()
    counter = Counter(target)
    call |= {"tree_budget": 8, "generation_strategy": "dflash", "return_dict_in_generate": True, "return_trees": True}
    output = target.generate(**call)
    assert counter.close() == forwards == output.ddtree_stats.target_forwards
    assert output.sequences.tolist() == expected.tolist()
    chains = [tree.token_ids[1:].tolist() for (tree,) in output.ddtree_stats.trees]
    # The last rounds may not draft beyond the length limit.
    assert drafts[0] == [] and len(chains) == len(drafts) - 1
    assert all(chain == draft[: len(chain)] for chain, draft in zip(chains, drafts[1:]))
    assert chains[0] == drafts[1] and len(chains[0]) == drafter.config.block_size - 1
    assert vocab_size > 4 or output.ddtree_stats.tokens_per_forward > 1.1


@pytest.mark.core
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("call", CALLS)
def test_same_tokens(call: str, kind: str, attention: str) -> None:
    drafts = {"assistant_model": make_native_drafter(layer_types=[kind] * 2), "tree_budget": 20}
    check_call(make_native_target(attention=attention), call, lambda model: drafts)


@pytest.mark.core
def test_view_shares_weights_and_draws_no_random_numbers() -> None:
    native, target = make_native_drafter(), make_native_target()
    state = torch.random.get_rng_state()
    view = view_native(native.train(), target)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in native.modules())
    theirs = {parameter.data_ptr() for parameter in native.parameters()}
    assert {parameter.data_ptr() for parameter in view.parameters()} == theirs
    assert view.config.output_multiplier == 0.7 and view.config.final_logit_softcapping == 20.0


@pytest.mark.core
def test_saved_and_loaded(tmp_path: Path) -> None:
    native, target = make_native_drafter(), make_native_target()
    native.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target_model=target)
    assert type(loaded) is type(native) and not loaded.training
    call = {"inputs": prompt(64, 0), "max_new_tokens": 12, "do_sample": False}
    output = target.generate(**call, assistant_model=loaded, generation_strategy="ddtree")
    assert output.tolist() == target.generate(**call).tolist()
    assert load_drafter(tmp_path).config.target_layer_ids == [0, 2, 1]


@pytest.mark.core
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 16}, "`hidden_size` 16"),
        ({"target_layer_ids": [0, DEPTH]}, rf"`target_layer_ids` hold \[{DEPTH}\]"),
        ({"mask_token_id": 64}, "`mask_token_id` is 64"),
    ],
)
def test_drafter_that_does_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    native, target = make_native_drafter(**settings), make_native_target()
    native.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(64, 0), assistant_model=native, generation_strategy="ddtree", max_new_tokens=4)
