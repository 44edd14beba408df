"""What the drafter promises beyond parity: padded rows, its cache, masks for training, and clear errors."""

from __future__ import annotations

import pytest
import torch

from hf_ddtree.drafters import DFlashConfig, DFlashContextCache, DFlashDraftModel
from hf_ddtree.drafters.dflash import model as dflash_model
from hf_ddtree.drafters.dflash.model import _block_mask
from hf_ddtree.target.preallocation import LEAST_ROOM

HIDDEN, BLOCK, WINDOW = 16, 4, 5
LAYER_TYPES = [["full_attention", "full_attention"], ["sliding_attention", "full_attention"]]


def make_drafter(**settings: object) -> DFlashDraftModel:
    torch.manual_seed(0)
    config = DFlashConfig(
        **{
            "vocab_size": 32,
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "initializer_range": 0.3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "block_size": BLOCK,
            "target_layer_ids": [0, 2],
            "mask_token_id": 1,
            "num_target_layers": 4,
            **settings,
        }
    )
    return DFlashDraftModel(config).eval()


@pytest.mark.parametrize("layer_types", LAYER_TYPES)
@pytest.mark.parametrize("is_causal", [None, False])
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(layer_types: list[str], is_causal: bool | None) -> None:
    """Left padding in the prompt, and rows that commit different numbers of tokens, padded in the middle."""
    drafter = make_drafter(layer_types=layer_types, is_causal=is_causal)
    committed = [[9, 2, 1, 4, 3], [3, 4, 1, 1, 4]]  # per row
    widths = [max(counts) for counts in zip(*committed)]
    features = torch.randn(2, sum(widths), 2 * HIDDEN)
    alone = [DFlashContextCache(), DFlashContextCache()]
    together, seen, roots = DFlashContextCache(), torch.zeros(2, 0, dtype=torch.bool), [0, 0]
    for i, width in enumerate(widths):
        start = sum(widths[:i])
        new = features[:, start : start + width]
        real = torch.stack([torch.arange(width) >= width - row[i] for row in committed])
        seen = torch.cat((seen, real), dim=1)
        block = torch.randn(2, BLOCK, HIDDEN)
        expected, positions = [], []
        for row in range(2):
            count = committed[row][i]
            roots[row] += count
            positions.append(torch.arange(roots[row] - width, roots[row] + BLOCK).clamp(min=0))
            expected.append(
                drafter(
                    block[row, None],
                    new[row, None, width - count :],
                    torch.arange(roots[row] - count, roots[row] + BLOCK)[None],
                    alone[row],
                )
            )
        hidden = drafter(block, new, torch.stack(positions), together, context_mask=seen)
        torch.testing.assert_close(hidden, torch.cat(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cropped_context_is_as_if_never_seen() -> None:
    drafter = make_drafter()
    features, block = torch.randn(1, 12, 2 * HIDDEN), torch.randn(1, BLOCK, HIDDEN)
    cache = DFlashContextCache()
    drafter(block, features, cache=cache)
    cache.crop(7)
    assert cache.get_seq_length() == 7
    again = drafter(torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 2, 2 * HIDDEN), cache=cache)
    cache.crop(7)
    assert again.shape == (1, BLOCK, HIDDEN)
    expected = drafter(block, features[:, :7], cache=None)
    torch.testing.assert_close(drafter(block, cache=cache), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_context_that_comes_in_parts() -> None:
    drafter = make_drafter(layer_types=LAYER_TYPES[1])
    features, block = torch.randn(1, 300, 2 * HIDDEN), torch.randn(1, BLOCK, HIDDEN)
    cache = DFlashContextCache()
    for part in features.split(7, dim=1):
        hidden = drafter(block, part, cache=cache)
    torch.testing.assert_close(hidden, drafter(block, features), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layer_types", [*LAYER_TYPES, ["sliding_attention"] * 2])
@pytest.mark.parametrize("is_projected", [False, True])
def test_a_long_context_enters_part_by_part(
    layer_types: list[str], is_projected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row alone and rows with padding, followed by another pass; as with all of it at once."""
    drafter = make_drafter(layer_types=layer_types)
    features, block = torch.randn(2, 33, 2 * HIDDEN), torch.randn(2, BLOCK, HIDDEN)
    padded = torch.arange(30) < torch.tensor([[30], [17]])
    for rows, context_mask in ((1, None), (2, None), (2, padded)):
        outputs = []
        for at_once in (1000, 7):
            monkeypatch.setattr(dflash_model, "CONTEXT_AT_ONCE", at_once)
            cache = DFlashContextCache()
            first, second = features[:rows].split((30, 3), dim=1)
            masks = (
                (None, None)
                if context_mask is None
                else (context_mask, torch.nn.functional.pad(padded, (0, 3), value=True))
            )
            for new, mask in zip((first, second), masks):
                entering = {"context": drafter.project(new)} if is_projected else {"context_features": new}
                outputs.append(drafter(block[:rows], cache=cache, context_mask=mask, **entering))
        torch.testing.assert_close(outputs[2:], outputs[:2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sliding_layers_forget_and_say_so() -> None:
    drafter = make_drafter(layer_types=["sliding_attention", "sliding_attention"])
    cache = DFlashContextCache()
    for _ in range(60):
        drafter(torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 10, 2 * HIDDEN), cache=cache)
    assert cache.get_seq_length() == 600
    assert all(layer.length <= WINDOW + LEAST_ROOM for layer in cache._layers)
    with pytest.raises(ValueError, match="has dropped tokens"):
        cache.crop(3)


@pytest.mark.parametrize("from_root", [True, False])
@pytest.mark.parametrize("is_causal", [None, False])
@torch.no_grad()
def test_context_beyond_all_windows_costs_nothing(is_causal: bool | None, from_root: bool) -> None:
    settings = {"layer_types": ["sliding_attention"] * 2, "is_causal": is_causal, "window_from_root": from_root}
    drafter = make_drafter(**settings)
    lengths: list[int] = []
    drafter.fc.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    features, cache, seen = torch.randn(1, 40, 2 * HIDDEN), DFlashContextCache(), 0
    for count in (3, 20, 2, 15):
        block = torch.randn(1, BLOCK, HIDDEN)
        positions = torch.arange(seen, seen + count + BLOCK)[None]
        hidden = drafter(block, features[:, seen : seen + count], positions, cache)
        seen += count
        assert cache.get_seq_length() == seen and lengths[-1] <= WINDOW
        # A given mask makes the drafter look at everything.
        mask = _block_mask(BLOCK, seen, WINDOW, from_root, is_causal is None, None, torch.device("cpu"))
        expected = drafter(block, features[:, :seen], attention_mask=mask)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_that_are_padded_behind_a_long_context() -> None:
    drafter = make_drafter(layer_types=["sliding_attention"] * 2)
    features, cache, counts = torch.randn(2, 23, 2 * HIDDEN), DFlashContextCache(), (22, 23)
    drafter(torch.randn(2, BLOCK, HIDDEN), features[:, :20], cache=cache)
    seen = torch.arange(23) < torch.tensor(counts)[:, None]
    positions = torch.stack([torch.arange(count - 3, count + BLOCK) for count in counts])
    positions[0, :3] += 1
    block = torch.randn(2, BLOCK, HIDDEN)
    hidden = drafter(block, features[:, 20:], positions, cache, context_mask=seen)
    alone = [drafter(block[row, None], features[row, None, :count]) for row, count in enumerate(counts)]
    torch.testing.assert_close(hidden, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [-1, 5])
@torch.no_grad()
def test_crop_rejects_what_is_not_there(length: int) -> None:
    drafter, cache = make_drafter(), DFlashContextCache()
    drafter(torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 4, 2 * HIDDEN), cache=cache)
    with pytest.raises(ValueError, match=f"`length` is {length}, but must be between 0 and 4"):
        cache.crop(length)
    assert cache.get_seq_length() == 4


@torch.no_grad()
def test_many_blocks_in_one_pass() -> None:
    """The mask for training gives each block what it gets alone."""
    drafter = make_drafter()
    features, blocks = torch.randn(1, 10, 2 * HIDDEN), torch.randn(1, 2 * BLOCK, HIDDEN)
    roots = [4, 9]
    mask = torch.zeros(1, 1, 2 * BLOCK, 10 + 2 * BLOCK, dtype=torch.bool)
    for i, root in enumerate(roots):
        slots = slice(i * BLOCK, (i + 1) * BLOCK)
        mask[..., slots, :root] = True
        mask[..., slots, 10 + i * BLOCK : 10 + (i + 1) * BLOCK] = True
    positions = torch.cat([torch.arange(10), *(torch.arange(root, root + BLOCK) for root in roots)])[None]
    hidden = drafter(blocks, features, positions, attention_mask=mask)
    for i, root in enumerate(roots):
        slots = slice(i * BLOCK, (i + 1) * BLOCK)
        torch.testing.assert_close(hidden[:, slots], drafter(blocks[:, slots], features[:, :root]))


def test_forward_rejects_positions_and_masks_that_do_not_fit() -> None:
    drafter = make_drafter()
    block, features = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 3, 2 * HIDDEN)
    with pytest.raises(ValueError, match=r"`position_ids` has 4 positions.*3 \+ 4"):
        drafter(block, features, torch.arange(4)[None])
    with pytest.raises(ValueError, match="`context_mask` has 2 columns"):
        drafter(block, features, context_mask=torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "`block_size` is 1"),
        ({"mask_token_id": 32}, r"`mask_token_id` is 32.*\(31\)"),
        ({"target_layer_ids": [0, 4]}, r"`target_layer_ids` holds 4.*\(3\)"),
        ({"target_layer_ids": [-1]}, "`target_layer_ids` holds -1"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "`layer_types` holds"),
        ({"target_layer_ids": None, "num_target_layers": None}, "`target_layer_ids` is not set"),
    ],
)
def test_config_rejects(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(**settings)


@pytest.mark.parametrize("call", ["append", "drop_padding"])
def test_a_context_of_inference_mode_goes_on_outside(call: str) -> None:
    cache, mask = DFlashContextCache(), torch.tensor([[True, False, True], [False, True, True]])
    new = torch.randn(2, 2, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache._append(0, new, 3, None)
    if call == "drop_padding":
        assert cache.drop_padding(mask, 2).all()
        new = torch.stack((new[:, 0][:, :, [0, 2]], new[:, 1][:, :, [1, 2]]), dim=1)
    assert torch.equal(cache._append(0, new[..., :1, :], 0, None), torch.cat((new, new[..., :1, :]), dim=3))


@pytest.mark.core
@pytest.mark.parametrize("from_root", [False, True])
def test_there_is_no_mask_only_where_a_window_hides_nothing(from_root):
    """Slot `i` sees key `j`, `-context` to `block - 1`, if it is near enough to the slot, or to the root."""
    block, context = 4, 6
    for window in range(1, 14):
        mask = _block_mask(block, context, window, from_root, False, None, torch.device("cpu"))
        expected = [
            [(j >= 0 or -j <= window) if from_root else abs(i - j) < window for j in range(-context, block)]
            for i in range(block)
        ]
        assert (mask is None) == all(map(all, expected))
        if mask is not None:
            assert mask[0, 0].tolist() == expected
