"""Room behind keys and values: the same cache, without copying it each round."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.families import make_model
from helpers.side_by_side import make_oracle, make_prompt
from torch import Tensor
from transformers import DynamicCache

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.preallocation import LEAST_ROOM, GrowingTensor, growing


def random_entries(length: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, length, 4, generator=torch.Generator().manual_seed(seed))


def test_a_growing_tensor_is_a_concatenation() -> None:
    grower, entries, expected = GrowingTensor(), random_entries(700), random_entries(700)
    moved = 0
    for step in range(300):
        new = random_entries(1 + step % 5, seed=step)
        before = entries.data_ptr()
        entries, expected = grower.extended(entries, new), torch.cat((expected, new), dim=-2)
        moved += entries.data_ptr() != before
        if step % 7 == 0:  # cut at the end, as after a commit
            entries, expected = entries[..., :-2, :], expected[..., :-2, :]
        if step % 11 == 0:  # changed in place
            entries[..., -1, :] = expected[..., -1, :] = step
        assert torch.equal(entries, expected)
    assert moved == 1 + (len(expected[0, 0]) - 700) // (LEAST_ROOM + 1)


def test_what_is_not_its_own_is_copied() -> None:
    grower = GrowingTensor()
    entries = grower.extended(random_entries(5), random_entries(2, seed=1))
    kept = entries.clone()
    for other in (entries[:1], entries[:, [0, 2]], entries[..., 1:, :], entries.double(), entries.clone()):
        extended = grower.extended(other, torch.zeros_like(other[..., :1, :]))
        assert torch.equal(extended[..., :-1, :], other) and extended.dtype == other.dtype
        assert torch.equal(entries, kept)


def test_room_is_small() -> None:
    """What 128k tokens need at most, and that one layer at a time is copied while it grows."""
    for length in (20_000, 131_072):
        entries = torch.empty(1, 1, length, 1)
        extended = GrowingTensor().extended(entries, entries[..., :1, :])
        assert extended.untyped_storage().nbytes() <= 1.02 * entries.untyped_storage().nbytes()


def test_what_was_made_in_inference_mode_is_copied_outside() -> None:
    grower, entries, new = GrowingTensor(), random_entries(5), random_entries(2, seed=1)
    with torch.inference_mode():
        entries = grower.extended(entries, new)
    extended = grower.extended(entries, new)
    assert torch.equal(extended, torch.cat((random_entries(5), new, new), dim=-2)) and not extended.is_inference()


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_the_cache_of_a_call_is_stock_and_can_be_gone_on_with(family: str) -> None:
    model = make_model(family, "sdpa")
    arguments = {"do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(make_prompt(), max_new_tokens=60, **arguments)
    cache = DynamicCache(config=model.config)
    layers = list(cache.layers)
    tree = model.generate(
        make_prompt(),
        max_new_tokens=30,
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain.sequences),
        **{CACHE_KEY: cache},
        **arguments,
    )
    assert tree[CACHE_KEY] is cache and all(now is before for now, before in zip(cache.layers, layers, strict=True))
    assert not any("update" in vars(layer) for layer in cache.layers)
    copied = copy.deepcopy(cache)
    for going_on in (cache, copied):
        rest = model.generate(tree.sequences, max_new_tokens=30, **{CACHE_KEY: going_on}, **arguments)
        assert rest.sequences.tolist() == plain.sequences.tolist()


def test_layers_are_given_back_when_a_round_fails() -> None:
    model = make_model("llama", "sdpa")
    cache = DynamicCache(config=model.config)
    model(make_prompt(), **{CACHE_KEY: cache})
    with pytest.raises(KeyboardInterrupt), growing(cache):
        assert all("update" in vars(layer) for layer in cache.layers)
        raise KeyboardInterrupt
    assert not any("update" in vars(layer) for layer in cache.layers)
