"""Bringing what the host knows to where the models compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def builds_on_device(device: torch.device) -> bool:
    """Whether trees are built and accepted on a device, so that the host does not wait for it. Not with Metal, which
    lacks operations on 64-bit integers."""
    return device.type not in ("cpu", "mps")


def on_device(values: Tensor | list[Any], device: torch.device) -> Tensor:
    """A tensor, or a list of integers as int64, on a device, without waiting for what the device still has to do.

    Args:
        values: What nobody changes later on; a tensor of the CPU.
        device: Any; a tensor that is there already is returned as it is.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")
    # CUDA takes a copy of pageable memory before it returns; with Metal the memory would have to stay as it is.
    return tensor.to(device, non_blocking=device.type != "mps")
