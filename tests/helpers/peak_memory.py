"""How much memory the tensors of a call take at most, counted on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts what operations allocate inside the context, as it is before and after each of them.

    Attributes:
        peak: Bytes of the most that was allocated at once.
        now: Bytes of what is allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_place(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and _place(tensor) not in given:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return output


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def peak_of(call: Any) -> int:
    """Bytes that the operations of a call allocate at most."""
    with PeakMemory() as memory:
        result = call()
    del result
    return memory.peak
