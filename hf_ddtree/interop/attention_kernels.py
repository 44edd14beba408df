"""PyTorch's attention kernels that also return the logarithms of the sums of exponentiated scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def open_kernel(queries: Tensor, key: Tensor, value: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A kernel for attention without a mask that returns its output and `(batch, heads, queries)` such logarithms.

    None where PyTorch has none for this device, dtype and size of heads. There may be more logarithms than queries.
    """
    if queries.shape[-1] != value.shape[-1]:
        return None
    if queries.device.type == "cpu":
        return _kernel("_scaled_dot_product_flash_attention_for_cpu")
    if queries.device.type != "cuda" or torch.version.hip is not None or queries.shape[-1] % 8:
        return None
    parameters = torch.backends.cuda.SDPAParams(queries, key, value, None, 0.0, False, False)
    if torch.backends.cuda.can_use_flash_attention(parameters):
        return _kernel("_scaled_dot_product_flash_attention")
    if torch.backends.cuda.can_use_efficient_attention(parameters):
        return _kernel("_scaled_dot_product_efficient_attention", None, True)
    return None


def _kernel(name: str, *arguments: object) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """An operator of PyTorch with some of its arguments after the values; None if this version has none."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return None

    def kernel(queries: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        output, log_sum, *_ = operator(queries, key, value, *arguments, scale=scale)
        return output, log_sum

    return kernel
