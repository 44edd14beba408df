"""The state of a training run on disk: weights and optimizers as safetensors, the rest as JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# Of the optimizers' state, what is no tensor already.
_PREFIX = "step-"


def latest_checkpoint(folder: Path) -> Path | None:
    """The last finished checkpoint in a folder; None if there is none."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return max(found, key=lambda path: int(path.name.removeprefix(_PREFIX)), default=None)


def save_checkpoint(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
) -> Path:
    """Writes a checkpoint and removes older ones. Killed at any time, it leaves the old one or the new one.

    Args:
        folder: Where checkpoints are; made if need be.
        model: Its weights are kept as they are.
        optimizers: Their state is kept; what their groups hold is not.
        state: What else there is, for JSON; with `step`, which names the checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: If it cannot be written, such as on a full disk. Older checkpoints are left then.
    """
    final = folder / f"{_PREFIX}{state['step']:08d}"
    partial = folder / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(_tensors(model.state_dict()), partial / "weights.safetensors")
        tensors: dict[str, Tensor] = {}
        for number, optimizer in enumerate(optimizers):
            for index, entries in optimizer.state_dict()["state"].items():
                tensors |= {f"{number}.{index}.{name}": torch.as_tensor(value) for name, value in entries.items()}
        save_file(_tensors(tensors), partial / "optimizers.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in partial.iterdir():
            with path.open("rb") as written:
                os.fsync(written.fileno())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for path in folder.glob(f"{_PREFIX}*"):
        if path != final:
            shutil.rmtree(path, ignore_errors=True)
    return final


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Puts weights and optimizers back to what a checkpoint holds.

    Raises:
        RuntimeError: If the weights are not those of such a model.
    """
    model.load_state_dict(load_file(checkpoint / "weights.safetensors"))
    by_optimizer: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, tensor in load_file(checkpoint / "optimizers.safetensors").items():
        number, index, name = key.split(".")
        by_optimizer[int(number)].setdefault(int(index), {})[name] = tensor
    for optimizer, entries in zip(optimizers, by_optimizer):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})


def _tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
