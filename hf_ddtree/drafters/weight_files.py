"""A drafter's weight files, looked at before any is loaded: safetensors, in their folder, of the declared size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import cached_file

# Files that Python unpickles, which can run any code.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
# Weights that are shared count twice in what a config declares.
MOST_DECLARED_PER_HELD = 2


def find_weight_files(path: Any, location: dict[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, fetched from the Hub if need be; empty if it has none.

    Args:
        path: A folder or a repository of the Hub.
        location: Keywords of `from_pretrained` that say where files are.

    Raises:
        ValueError: If the index names a file outside of the checkpoint's folder, or none of the files is safetensors,
            but some are pickled.
    """
    index = _file(path, "model.safetensors.index.json", location)
    names = [] if index is None else names_in_index(path, index)
    whole = _file(path, "model.safetensors", location)
    # Transformers takes this one where there are both.
    files = [file for name in names if (file := _file(path, name, location)) is not None] if whole is None else [whole]
    folder = Path(path) / location.get("subfolder", "")
    pickled = [file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))]
    if not files and pickled:
        raise ValueError(
            f"The checkpoint {str(path)!r} has its weights in {pickled[0]!r}. Reading a pickled file can run any "
            "code, so it is not read. Save it again by `save_pretrained`, which writes safetensors."
        )
    return files


def names_in_index(path: Any, index: str, of_tensors: str = "") -> list[str]:
    """The files that an index names, all of them beside it.

    Args:
        path: The checkpoint, for messages.
        index: The index.
        of_tensors: Only files with tensors whose names begin like this.

    Raises:
        ValueError: If the index names a file elsewhere, or cannot be read.
    """
    try:
        places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items()
        names = sorted({name for tensor, name in places if tensor.startswith(of_tensors)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"The index of the checkpoint {str(path)!r} cannot be read: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or not name.strip("."):
            raise ValueError(
                f"The index of the checkpoint {str(path)!r} names the file {name!r}. Only files beside the index are "
                "read. Download the checkpoint again, from where you trust it."
            )
    return names


def check_declared_size(path: Any, files: Sequence[str], model_class: Any, config: PreTrainedConfig) -> None:
    """Refuses a config that declares far more weights than the files hold, before memory is taken for them.

    Args:
        path: The checkpoint, for messages.
        files: Its weights.
        model_class: A model class, or one of Transformers' auto classes.
        config: The configuration.

    Raises:
        ValueError: If it does, or a file is no safetensors.
    """
    tensors, held = 0, 0
    for name in files:
        for count in _elements(path, name):
            tensors, held = tensors + 1, held + count
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    too_many = f"{layers} layers" if layers > tensors else _too_many(model_class, config, held)
    if too_many:
        raise ValueError(
            f"The config.json of the checkpoint {str(path)!r} declares {too_many}, but its weights are {tensors} "
            f"tensors with {held} numbers. Download it again, or check that its config.json belongs to its weights."
        )


def _file(path: Any, name: str, location: dict[str, Any]) -> str | None:
    try:
        return cached_file(path, name, **location)
    except OSError:
        return None


def _too_many(model_class: Any, config: PreTrainedConfig, held: int) -> str | None:
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(model_class, "from_config", model_class)(config)
    except RuntimeError as error:  # more than PyTorch can count
        return f"sizes that no model can have ({error})"
    declared = sum(parameter.numel() for parameter in model.parameters())
    return f"{declared} numbers" if declared > MOST_DECLARED_PER_HELD * held else None


def _elements(path: Any, file_name: str) -> list[int]:
    """How many numbers each tensor of a file has, from its header."""
    try:
        with safe_open(file_name, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"The file {Path(file_name).name!r} of the checkpoint {str(path)!r} is no valid safetensors file "
            f"({error}). Download it again."
        ) from error
    return [torch.Size(shape).numel() for shape in shapes]


def check_finite(path: Any, model: nn.Module) -> None:
    """Refuses weights that hold NaN or infinity, which would draft nothing that is ever right.

    Not looked at are weights that stay on disk, and quantized ones.

    Raises:
        ValueError: If some do; the message names one.
    """
    for name, weight in model.named_parameters():
        is_read = not weight.is_meta and weight.is_floating_point() and weight.dtype.itemsize > 1
        if is_read and not weight.isfinite().all():
            raise ValueError(
                f"The checkpoint {str(path)!r} holds NaN or infinity in {name!r}. Download it again, or load it in a "
                "dtype that holds its numbers, such as `dtype=torch.float32`."
            )
