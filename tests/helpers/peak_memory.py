"""How much memory the tensors of a call take at most, counted on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from hf_ddtree.interop.allocations import PeakMemory


@torch.no_grad()
def peak_of(call: Any) -> int:
    """Bytes that the operations of a call allocate at most."""
    with PeakMemory() as memory:
        result = call()
    del result
    return memory.peak
