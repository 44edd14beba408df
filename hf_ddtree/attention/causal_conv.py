"""A short causal convolution along the paths of a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..tree.tree_batch import TreeBatch
from . import fused


def ancestor_windows(tree_batch: TreeBatch, kernel_size: int, num_cached: int) -> Tensor:
    """For each node, where the inputs of its convolution stand: its nearest ancestors, continued into the cache.

    Args:
        tree_batch: The round's trees.
        kernel_size: Width of the convolution.
        num_cached: Number of cached inputs in front of the nodes', at least `kernel_size - 1`.

    Returns:
        `(batch, n, kernel_size)` int64 indices into the cached inputs followed by the nodes', oldest first.
    """
    # The ancestor of a node at depth d is the only one of its ancestors at that depth.
    offsets = torch.arange(1 - kernel_size, 1, device=tree_batch.depths.device)
    wanted_depth = tree_batch.depths[..., None] + offsets
    at_depth = tree_batch.depths[:, None, None, :] == wanted_depth[..., None]
    node = (at_depth & tree_batch.ancestor_mask[:, :, None, :]).int().argmax(dim=-1)
    return num_cached + torch.where(wanted_depth >= 0, node, wanted_depth)


def tree_causal_conv(
    hidden_states: Tensor,
    weight: Tensor,
    windows: Tensor,
    bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Convolves each node's window of its own path.

    Args:
        hidden_states: `(batch, channels, cached + n)`, the cached inputs followed by the nodes'.
        weight: `(channels, kernel_size)`.
        windows: `(batch, n, kernel_size)`, from `ancestor_windows`.
        bias: `(channels,)`.
        activation: What the outputs go through.

    Returns:
        `(batch, channels, n)` in the dtype of `hidden_states`.
    """

    def plain() -> tuple[Tensor]:
        return (_tree_causal_conv(hidden_states, weight, windows, bias, activation),)

    is_silu = isinstance(activation, nn.SiLU | SiLUActivation)
    if fused.can_run(hidden_states.device) and (activation is None or is_silu):
        from .fused_causal_conv import fused_causal_conv

        form = "convolution", hidden_states.device, hidden_states.dtype, weight.shape[-1], bias is None, is_silu
        (output,) = fused.checked(
            form, lambda: (fused_causal_conv(hidden_states, weight, windows, bias, is_silu),), plain
        )
        return output
    return plain()[0]


def _tree_causal_conv(
    hidden_states: Tensor,
    weight: Tensor,
    windows: Tensor,
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """By operations of PyTorch."""
    # Gathering whole rows of channels is several times faster than gathering within each channel.
    inputs = hidden_states.to(weight.dtype).transpose(1, 2).contiguous()
    if len(inputs) == 1:
        gathered = inputs.index_select(1, windows.flatten())
    else:
        gathered = inputs.gather(1, windows.flatten(1)[..., None].expand(-1, -1, inputs.shape[2]))
    # In half precision a convolution rounds once, at its end.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    gathered = gathered.view(*windows.shape, -1).to(dtype)
    output = (gathered * weight.to(dtype).t().contiguous()).sum(2)
    if bias is not None:
        output = output + bias
    output = output.to(weight.dtype)
    if activation is not None:
        output = activation(output)
    return output.to(hidden_states.dtype).transpose(1, 2)
