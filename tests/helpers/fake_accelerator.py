"""A device that computes on the CPU and counts what would make the host wait for a GPU.

Tensors on it say that they are elsewhere, so code takes the paths that it takes on a GPU. As there, operations on
tensors of two devices are errors, and what the host wants to know has to be transferred.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake_accelerator"
TO_HOST, TO_DEVICE, UNKNOWN_SIZE = "to host", "to device", "unknown size"
# Their results have as many entries as the values say.
OF_UNKNOWN_SIZE = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "repeat_interleave"}
COPIES = {"_to_copy", "copy_"}


@dataclass(frozen=True)
class Wait:
    """Something that the host waits for.

    Attributes:
        kind: `TO_HOST`, values that the host wants; `TO_DEVICE`, values that are copied from memory that the host
            might change; `UNKNOWN_SIZE`, a result whose size depends on values.
        operation: What was called.
        frames: The calls that led there, the innermost last: `file:function:line`.
    """

    kind: str
    operation: str
    frames: tuple[str, ...]

    @property
    def in_model(self) -> bool:
        """Whether the code of Transformers' model asked for it."""
        return any("transformers/models" in frame for frame in self.frames)


class _OnDevice(Tensor):
    """A tensor of the fake device, around one of the CPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> _OnDevice:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=torch.device(NAME, 0),
        )
        wrapper.on_cpu = on_cpu
        return wrapper

    def __repr__(self) -> str:
        return f"on device: {self.on_cpu!r}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} of a tensor of the fake accelerator outside of its context")


class FakeAccelerator:
    """The device, while `running`; one at a time.

    Attributes:
        device: Its name for PyTorch.
        waits: What the host waited for.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets PyTorch know the device."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        _backend.accelerator = self
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            _backend.accelerator = None
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def wait(self, kind: str, operation: str) -> None:
        frames = [
            f"{frame.f_code.co_filename}:{frame.f_code.co_name}:{line}"
            for frame, line in traceback.walk_stack(None)
            if "hf_ddtree/" in frame.f_code.co_filename or "transformers/" in frame.f_code.co_filename
        ]
        self.waits.append(Wait(kind, operation, tuple(frames[::-1])))

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does on the CPU what an operation does on the device."""
        name = func.__name__.split(".")[0]
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        inputs = args[:1] if name in ("index", "index_put", "index_put_") else tensors
        for tensor in tree_leaves(inputs):
            if name not in COPIES and isinstance(tensor, Tensor) and not isinstance(tensor, _OnDevice) and tensor.ndim:
                raise RuntimeError(f"{func} of tensors on {NAME} and on the CPU")
        result = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if name == "_to_copy":
            return self._copied(args[0], result, kwargs)
        if name == "copy_":
            source, target = args[1], args[0]
            if isinstance(source, _OnDevice) and not isinstance(target, _OnDevice):
                self.wait(TO_HOST, name)
            elif not isinstance(source, _OnDevice) and source.ndim and not (len(args) > 2 and args[2]):
                self.wait(TO_DEVICE, name)
            return target
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            self.wait(TO_HOST, name)
            return result
        if name in OF_UNKNOWN_SIZE and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self.wait(UNKNOWN_SIZE, name)
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            for index in args[1]:
                if isinstance(index, Tensor) and not isinstance(index, _OnDevice):
                    self.wait(TO_DEVICE, name)
                elif isinstance(index, Tensor) and index.dtype == torch.bool:
                    if name == "index" or args[2].numel() > 1:
                        self.wait(UNKNOWN_SIZE, name)
        if func._schema.name.endswith("_") and args and isinstance(args[0], Tensor):
            return args[0]
        return tree_map(lambda value: _OnDevice(value) if isinstance(value, Tensor) else value, result)

    def _copied(self, source: Tensor, result: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device = kwargs.get("device")
        to_device = isinstance(source, _OnDevice) if device is None else torch.device(device).type == NAME
        if isinstance(source, _OnDevice) and not to_device:
            self.wait(TO_HOST, "_to_copy")
        elif not isinstance(source, _OnDevice) and to_device and not kwargs.get("non_blocking"):
            self.wait(TO_DEVICE, "_to_copy")
        return _OnDevice(result) if to_device else result


class _Operations(TorchDispatchMode):
    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_here = device is not None and torch.device(device).type == NAME
        if is_here or any(isinstance(value, _OnDevice) for value in tree_leaves((args, kwargs))):
            return self._accelerator.run(func, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """What does not reach the operations."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            if torch.device(kwargs["device"]).type == NAME and not isinstance(args[0], Tensor):
                del kwargs["device"]
                self._accelerator.wait(TO_DEVICE, "tensor")
                return _OnDevice(func(*args, **kwargs))
        if args and isinstance(args[0], _OnDevice):
            if func is Tensor.tolist:
                self._accelerator.wait(TO_HOST, "tolist")
                return args[0].on_cpu.tolist()
            if func is Tensor.data_ptr:
                return args[0].on_cpu.data_ptr()
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, _OnDevice):
        return value.on_cpu
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def on_cpu(value: Any) -> Any:
    """The same nest of values with all tensors on the CPU, without being counted."""
    return tree_map(_on_cpu, value)


def moved(model: nn.Module, accelerator: FakeAccelerator) -> nn.Module:
    """The model on the device, without counting that."""
    with accelerator.running():
        model.to(accelerator.device)
    accelerator.waits.clear()
    return model


class _Backend:
    """What PyTorch and Transformers ask a device's module. Its random numbers are those of the CPU."""

    accelerator: Any = None

    @property
    def is_running(self) -> bool:
        return self.accelerator is not None

    def is_initialized(self) -> bool:
        return self.is_running

    def is_available(self) -> bool:
        return self.is_running

    def device_count(self) -> int:
        return int(self.is_running)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_backend = _Backend()


def _install() -> None:
    """Makes PyTorch accept the name of the device; it has such a device only while one is running."""

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return _backend.is_running

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    _setup_privateuseone_for_python_backend(NAME, _backend, Hook())


# What PyTorch does behind its own functions, as where it makes a tensor of a list.
_overrides = library.Library("aten", "IMPL")
for _operation in (torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default):

    def _below_python(*args: Any, _operation: Any = _operation, **kwargs: Any) -> Any:
        return _backend.accelerator.run(_operation, args, kwargs)

    _overrides.impl(_operation, _below_python, "PrivateUse1")

_install()
