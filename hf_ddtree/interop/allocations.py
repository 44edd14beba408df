"""How much memory tensors take at most, counted by operation; also of tensors without contents."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def without_contents() -> AbstractContextManager[Any]:
    """Tensors that are made inside have sizes and a device, but no memory."""
    return FakeTensorMode()


class PeakMemory(TorchDispatchMode):
    """Counts what operations allocate inside the context, as it is before and after each of them.

    What a kernel needs on its way is not counted.

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
