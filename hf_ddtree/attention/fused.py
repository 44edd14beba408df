"""Operators over a tree that are one Triton kernel each: where they can run, and whether they are right there.

They run on CUDA if Triton is installed, which PyTorch's builds for CUDA bring. What a kernel gives is compared with
what PyTorch's operations give the first time that it runs in a form on a device. If it fails or differs, those do it
from then on, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)
# In units of the largest value; half precision rounds at the end of either.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

_is_right: dict[Hashable, bool] = {}


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def can_run(device: torch.device) -> bool:
    """Whether the kernels run on a device. Not while a forward is compiled, which joins operations itself."""
    return device.type == "cuda" and has_triton() and not torch.compiler.is_compiling()


def verdicts() -> dict[Hashable, bool]:
    """Each form of a kernel that has run in this process, and whether it gave what it should."""
    return dict(_is_right)


def checked(
    form: Hashable, fused: Callable[[], tuple[Tensor, ...]], plain: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What a kernel gives, or what PyTorch's operations give if it cannot be relied on.

    Args:
        form: What is compiled, and where.
        fused, plain: Give the same tensors, the one by a kernel, the other by PyTorch's operations.
    """
    if form in _is_right:
        return fused() if _is_right[form] else plain()
    expected = plain()
    if expected[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return expected  # nothing can be compared
    if not all(bool(part.isfinite().all()) for part in expected):
        return expected
    try:
        reason = _difference(fused(), expected)
    except Exception as error:  # a compiler and a driver fail in many ways
        reason = f"it fails with {error!r}"
    _is_right[form] = not reason
    if reason:
        logger.warning(f"A kernel for trees is not used ({form}): {reason}. PyTorch's operations take its place.")
    return expected


def _difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str:
    """How a result differs from what is expected; empty if it does not."""
    for one, other in zip(actual, expected, strict=True):
        error = float((one.float() - other.float()).abs().max())
        bound = TOLERANCE.get(other.dtype, 1e-4) * max(1.0, float(other.abs().max()))
        if not error <= bound:
            return f"it is off by {error:.2g}"
    return ""
