"""The convolution along the paths of a tree in one Triton kernel, which does what `tree_causal_conv` does."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 256


@triton.jit
def _kernel(
    inputs,
    weight,
    windows,
    bias,
    output,  # fmt: skip
    num_nodes,
    num_channels,
    input_row,
    input_channel,
    input_place,
    window_row,  # fmt: skip
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHANNELS: tl.constexpr,  # fmt: skip
):
    row, node = tl.program_id(0) // num_nodes, tl.program_id(0) % num_nodes
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(SIZE):
        place = tl.load(windows + row * window_row + node * SIZE + tap)
        read = tl.load(inputs + row * input_row + channels * input_channel + place * input_place, is_channel, 0.0)
        taps = tl.load(weight + channels * SIZE + tap, is_channel, 0.0)
        total += read.to(taps.dtype).to(tl.float32) * taps.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, is_channel, 0.0).to(tl.float32)
    total = total.to(weight.dtype.element_ty)
    if IS_SILU:
        exact = total.to(tl.float32)
        total = (exact / (1.0 + tl.exp(-exact))).to(weight.dtype.element_ty)
    place = (row * num_nodes + node) * num_channels + channels
    tl.store(output + place, total.to(output.dtype.element_ty), is_channel)


def fused_causal_conv(
    hidden_states: Tensor, weight: Tensor, windows: Tensor, bias: Tensor | None, is_silu: bool
) -> Tensor:
    """As `tree_causal_conv`, with SiLU or no activation.

    Returns:
        `(batch, channels, n)` in the dtype of `hidden_states`.
    """
    batch_size, num_channels, _ = hidden_states.shape
    num_nodes, size = windows.shape[1:]
    weight, windows = weight.contiguous(), windows.contiguous()
    output = hidden_states.new_empty((batch_size, num_nodes, num_channels))
    launch: Any = _kernel[batch_size * num_nodes, triton.cdiv(num_channels, CHANNELS)]
    launch(
        *(hidden_states, weight, windows, weight if bias is None else bias, output),
        *(num_nodes, num_channels, *hidden_states.stride(), windows.stride(0)),
        SIZE=size,
        HAS_BIAS=bias is not None,
        IS_SILU=is_silu,
        CHANNELS=CHANNELS,
    )
    return output.transpose(1, 2)
