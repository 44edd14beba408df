"""Checkpoints that are broken or hostile: each is refused with the reason, runs no code, and takes no memory."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.native_pair import make_native_drafter
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

import hf_ddtree
from hf_ddtree.demo import demo_folders
from hf_ddtree.drafters.checkpoint import Checkpoint
from hf_ddtree.drafters.eagle3 import Eagle3Config
from hf_ddtree.drafters.layer_config import LayerConfig
from hf_ddtree.drafters.mtp.checkpoint import read_mtp_tensors
from hf_ddtree.drafters.weight_files import check_finite


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of a checkpoint ran')",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the drafter that ships."""
    return Path(shutil.copytree(demo_folders()[1], tmp_path / "drafter"))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_ddtree.load_drafter(folder)


def test_the_copy_loads(folder):
    assert hf_ddtree.load_drafter(folder).num_parameters() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(folder, bad):
    def spoil(weights):
        weights["norm.weight"][3] = bad

    change_weights(folder, spoil)
    refused(folder, "holds NaN or infinity in 'norm.weight'")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_not_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    refused(folder, f"has its weights in '{name}'. Reading a pickled file can run any code")


def test_pickled_weights_beside_safetensors_are_not_opened(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    hf_ddtree.load_drafter(folder)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", "", 7],
)
def test_a_path_in_the_name_of_a_file(folder, name):
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    shutil.copy(weights, folder.parent / "outside.safetensors")
    weights.unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "names the file .* Only files beside the index")


def test_the_index_of_a_target_with_layers_that_draft(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"mtp.fc.weight": "../outside.safetensors", "norm.weight": "model.safetensors"}})
    )
    with pytest.raises(ValueError, match="names the file '../outside.safetensors'"):
        read_mtp_tensors(Checkpoint(folder))


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', "{", '{"weight_map": null}'])
def test_an_index_that_is_none(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "The index of the checkpoint .* cannot be read")


@pytest.mark.parametrize(
    "size, value",
    [
        ("num_hidden_layers", 10**6),
        ("hidden_size", 10**6),
        ("intermediate_size", 10**10),
        ("vocab_size", 10**11),
        ("intermediate_size", 2**62),
    ],
)
def test_a_giant_size_in_the_config(folder, size, value):
    """More than any machine has: it would be noticed."""
    layers = {"layer_types": None} if size == "num_hidden_layers" else {}
    change_config(folder, **{size: value}, **layers)
    refused(folder, "declares .*, but its weights are")


@pytest.mark.parametrize("length", [2**62, 10**9])
def test_a_giant_size_in_the_header_of_the_weights(folder, length):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    refused(folder, "is no valid safetensors file")


def test_a_tensor_that_declares_more_than_there_is(folder):
    entry = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    header = json.dumps({"norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    refused(folder, "is no valid safetensors file")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04\x95"])
def test_weights_that_are_something_else(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "is no valid safetensors file")


def test_weights_of_another_shape(folder):
    def transpose(weights):
        weights["fc.weight"] = weights["fc.weight"].T.contiguous()

    change_weights(folder, transpose)
    refused(folder, r"of another size than its config.json says, e.g. 'fc.weight'")


def test_code_beside_the_weights_is_not_run(folder):
    for module in ("configuration_drafter", "modeling_drafter"):
        (folder / f"{module}.py").write_text("raise SystemExit('code of a checkpoint ran')\n")
    names = {"AutoConfig": "configuration_drafter.Config", "AutoModel": "modeling_drafter.Model"}
    change_config(folder, auto_map=names)
    hf_ddtree.load_drafter(folder, trust_remote_code=True)


def test_a_drafter_in_a_class_of_transformers(tmp_path):
    drafter = make_native_drafter()
    drafter.save_pretrained(tmp_path)
    hf_ddtree.load_drafter(tmp_path)
    with torch.no_grad():
        next(drafter.parameters()).fill_(float("nan"))
    drafter.save_pretrained(tmp_path)
    refused(tmp_path, "holds NaN or infinity")


def test_weights_that_are_not_in_memory_or_quantized_are_left_alone():
    layer = torch.nn.Linear(2, 2, device="meta")
    check_finite("name", layer)
    quantized = torch.nn.Linear(2, 2).requires_grad_(False)
    quantized.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
    check_finite("name", quantized)
    quantized.bias.fill_(float("inf"))
    with pytest.raises(ValueError, match="'name' holds NaN or infinity in 'bias'"):
        check_finite("name", quantized)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [5]},
        {"dflash_config": "text"},
        {"speculators_model_type": ["peagle"]},
        {"hidden_act": "nope"},
        {"head_dim": 0},
        {"num_hidden_layers": 0},
        {"rms_norm_eps": "x"},
        {"target_layer_ids": ["a"], "dflash_config": None},
        {"block_size": 10**9},
    ],
)
def test_settings_of_another_kind(folder, changes):
    change_config(folder, **changes)
    refused(folder, "config|block_size|checkpoint")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": "x"}, "'final_logit_softcapping' with value 'x'"),
        ({"block_size": 6.5}, "'block_size' expected int, got float"),
        ({"num_target_layers": "12"}, "'num_target_layers' with value '12'"),
        ({"input_embedding_scale": float("nan")}, "`input_embedding_scale` is nan, but must be a finite number"),
        ({"sliding_window": -4, "use_sliding_window": True}, "`sliding_window` is -4, but must be at least 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "`rope_theta` is 'x', but must be"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "`rope_theta` is 0, but must be a number"),
    ],
)
def test_a_value_that_would_fail_in_use(folder, change, message):
    change_config(folder, **change)
    refused(folder, message)


def config_classes(base: type[LayerConfig] = LayerConfig) -> Iterator[type[LayerConfig]]:
    for config_class in base.__subclasses__():
        yield config_class
        yield from config_classes(config_class)


@pytest.mark.parametrize("config_class", [*config_classes()], ids=lambda config_class: config_class.__name__)
def test_values_are_checked_against_the_declared_types(config_class):
    own = {field.name for field in fields(config_class)} - {field.name for field in fields(Qwen3Config)}
    assert own
    for name in own:
        with pytest.raises(StrictDataclassFieldValidationError, match=name):
            config_class(**{name: object()})


def test_a_window_that_is_missing():
    with pytest.raises(ValueError, match="there is no `sliding_window`"):
        Eagle3Config(num_hidden_layers=1, layer_types=["sliding_attention"])


@pytest.mark.parametrize("content", ["[]", "5", "null", "[" * 10**5])
def test_configs_that_hold_no_object(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises((ValueError, OSError), match="config"):
        hf_ddtree.load_drafter(folder)


def test_a_file_in_place_of_a_folder(folder):
    refused(folder / "config.json", "is a file. Name the folder")


@pytest.mark.parametrize("weight_map", [{}, {"norm.weight": "elsewhere.safetensors"}])
def test_an_index_hides_no_weights(folder, weight_map):
    """Transformers takes the whole file where there is one, so that is what is looked at."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    change_config(folder, intermediate_size=10**8)
    refused(folder, "declares")
