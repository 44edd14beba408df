"""The files of a drafter's checkpoint, in any layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel


def write_checkpoint(
    drafter: PreTrainedModel, config: dict[str, Any], folder: str | os.PathLike[str], dtype: torch.dtype
) -> None:
    """Writes `config.json` and `model.safetensors`; files of these names are replaced once both are written.

    Args:
        drafter: Whose weights are written.
        config: The contents of `config.json`.
        folder: Where to; made if need be.
        dtype: What the weights are rounded to.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(weights, path / "model.safetensors.partial", metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (path / "config.json.partial").write_text(text, encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        os.replace(path / f"{name}.partial", path / name)
