"""Loading drafters: every format, every way in which a checkpoint can fail to load or to fit its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from hf_ddtree import load_drafter
from hf_ddtree.drafters import DFlashConfig, DFlashDraftModel, check_drafter_fits

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_target(**settings: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_hidden_layers": 4, **settings})).eval()


def make_drafter(**settings: Any) -> DFlashDraftModel:
    defaults = {"num_hidden_layers": 2, "block_size": 6, "target_layer_ids": [0, 3], "mask_token_id": 5}
    return DFlashDraftModel(DFlashConfig(**{**SIZES, **defaults, "num_target_layers": 4, **settings})).eval()


def write_checkpoint(folder: Path, drafter: DFlashDraftModel, **changes: Any) -> dict[str, Any]:
    """Writes a drafter in the published layout. `changes` overwrite the config, and None removes a key."""
    config = {
        **SIZES,
        "num_hidden_layers": 2,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "rope_theta": 5000.0,
        "num_target_layers": 4,
        "block_size": 6,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 3]},
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return config


def same_weights(one: DFlashDraftModel, other: DFlashDraftModel) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_published_layout(tmp_path: Path) -> None:
    drafter = make_drafter()
    write_checkpoint(tmp_path, drafter)
    loaded = load_drafter(tmp_path, target_model=make_target())
    assert same_weights(drafter, loaded)
    assert not loaded.training
    config = loaded.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (6, 5, [0, 3])
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.model_type == "hf_ddtree_dflash"


def test_newer_published_layout(tmp_path: Path) -> None:
    settings = {
        "block_size": 8,
        "mask_token_id": 9,
        "target_layer_ids": [1, 2],
        "is_causal": False,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 30.0,
    }
    write_checkpoint(tmp_path, make_drafter(), block_size=None, dflash_config=settings)
    config = load_drafter(str(tmp_path)).config
    assert {key: getattr(config, key) for key in settings} == settings


def test_settings_in_dflash_config_win(tmp_path: Path) -> None:
    settings = {"mask_token_id": 5, "target_layer_ids": [0, 3], "block_size": 9}
    write_checkpoint(tmp_path, make_drafter(), block_size=6, output_multiplier=3.0, dflash_config=settings)
    config = load_drafter(tmp_path).config
    assert (config.block_size, config.output_multiplier) == (9, 3.0)


def test_save_and_load(tmp_path: Path) -> None:
    drafter = make_drafter(is_causal=True, input_embedding_scale=1.5)
    drafter.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
    for loaded in (
        load_drafter(tmp_path),
        DFlashDraftModel.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path),
    ):
        assert type(loaded) is DFlashDraftModel
        assert same_weights(drafter, loaded)
        assert loaded.config.to_diff_dict() == AutoConfig.from_pretrained(tmp_path).to_diff_dict()
        assert (loaded.config.is_causal, loaded.config.input_embedding_scale) == (True, 1.5)
        assert loaded.config.target_layer_ids == [0, 3]


def test_dtype_follows_the_target_unless_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_drafter())
    target = make_target().to(torch.bfloat16)
    assert load_drafter(tmp_path, target_model=target).dtype == torch.bfloat16
    assert load_drafter(tmp_path, target_model=target, dtype=torch.float32).dtype == torch.float32
    assert load_drafter(tmp_path, target_model=target).device == target.device


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_drafter())
    (tmp_path / "dflash.py").write_text("raise RuntimeError('remote code ran')\n")
    assert type(load_drafter(tmp_path, trust_remote_code=True)) is DFlashDraftModel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "xpress"}, "speculators format with `speculators_model_type` 'xpress'"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafter, but its config.json has no"),
        ({"dflash_config": {"selector_rank": 8, "mask_token_id": 5}}, "DFlash 2 drafter, but"),
        ({"architectures": ["Qwen3Model"]}, r"no drafter.*\['Qwen3Model'\].*'qwen3'"),
        ({"architectures": None, "model_type": "llama"}, r"no drafter.*\[\].*'llama'"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 4]}}, "`target_layer_ids` holds 4"),
        ({"dflash_config": {"mask_token_id": 64}}, "`mask_token_id` is 64"),
        ({"dflash_config": {"mask_token_id": 5, "use_gate": True}}, "has 'use_gate' in its config.json, which may"),
        ({"query_scale": 2.0, "qk_clip": False}, "has 'qk_clip', 'query_scale' in its config.json"),
        ({"markov_rank": 8}, "has 'markov_rank' in its config.json"),
        ({"dflash_config": {"mask_token_id": 5, "attention_mode": "mla"}}, "'attention_mode' 'mla', which is not"),
        ({"target_hidden_size": 64}, "`hidden_size` 32, but `target_hidden_size` 64"),
    ],
)
def test_formats_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, make_drafter(), **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=make_target())


def test_missing_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_drafter())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the drafter's weights, e.g. 'fc.weight'"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("allowed", [False, True])
def test_weights_of_another_size(allowed: bool, tmp_path: Path) -> None:
    """They are never replaced by random ones."""
    write_checkpoint(tmp_path, make_drafter())
    weights = load_file(tmp_path / "model.safetensors")
    weights["norm.weight"] = weights["norm.weight"][1:].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds 1 weights of another size .* e.g. 'norm.weight' of \(31,\) instead"):
        load_drafter(tmp_path, ignore_mismatched_sizes=allowed)


def test_keys_that_change_nothing(tmp_path: Path) -> None:
    harmless = {"num_anchors": 512, "query_scale": None, "linear_num_key_heads": 16, "pad_token_id": 0}
    nested = {"mask_token_id": 5, "target_layer_ids": [0, 3], "confidence_head_alpha": 1.0, "attention_mode": "gqa"}
    write_checkpoint(tmp_path, make_drafter(), **harmless, target_hidden_size=32, dflash_config=nested)
    assert load_drafter(tmp_path).config.target_layer_ids == [0, 3]


def test_weights_of_another_kind(tmp_path: Path) -> None:
    drafter = make_drafter()
    write_checkpoint(tmp_path, drafter)
    weights = drafter.state_dict() | {"markov_head.markov_w1.weight": torch.zeros(64, 4)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds 1 weights .* e.g. 'markov_head.markov_w1.weight'"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "../nowhere", "a/folder/nowhere", Path("nowhere")])
def test_no_such_folder(name: str | Path) -> None:
    with pytest.raises(OSError, match="^The folder '.*nowhere' does not exist, so no drafter can be loaded from it.$"):
        load_drafter(name)


def test_no_such_repository() -> None:
    with pytest.raises(OSError, match="^'nobody/nowhere' is no folder, nor could it be had from the Hub: "):
        load_drafter("nobody/nowhere", local_files_only=True)


@pytest.mark.parametrize(
    ("target_settings", "message"),
    [
        ({"hidden_size": 40}, "the drafter has `hidden_size` 32, but the target, a Qwen3ForCausalLM, has .* 40"),
        ({"vocab_size": 65}, "the drafter has `vocab_size` 64, but the target, .* 65"),
        ({"num_hidden_layers": 5}, "the drafter has `num_target_layers` 4, but the target, .* `num_hidden_layers` 5"),
    ],
)
def test_drafter_that_does_not_fit(tmp_path: Path, target_settings: dict[str, Any], message: str) -> None:
    target = make_target(**target_settings)
    with pytest.raises(ValueError, match=message):
        check_drafter_fits(make_drafter(), target)
    write_checkpoint(tmp_path, make_drafter())
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target_model=target)


def test_layers_beyond_a_target_of_unknown_depth() -> None:
    drafter = make_drafter(num_target_layers=None, target_layer_ids=[1, 4])
    with pytest.raises(ValueError, match=r"`target_layer_ids` hold \[4\], but .* layers 0 to 3"):
        check_drafter_fits(drafter, make_target())


def test_drafter_without_a_mask_token() -> None:
    with pytest.raises(ValueError, match="has no `mask_token_id`"):
        check_drafter_fits(make_drafter(mask_token_id=None), make_target())


def test_target_without_an_output_head() -> None:
    headless = Qwen3Model(make_target().config)
    with pytest.raises(ValueError, match="a Qwen3Model, has no output head"):
        check_drafter_fits(make_drafter(), headless)


def test_multimodal_target() -> None:
    """Sizes are those of the text model."""
    text = {
        **SIZES,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    target: PreTrainedModel = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    check_drafter_fits(make_drafter(), target)
    with pytest.raises(ValueError, match="`hidden_size` 16"):
        check_drafter_fits(make_drafter(hidden_size=16), target)
