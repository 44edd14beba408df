"""The keys and values of the context, which a DFlash drafter keeps between rounds."""

from __future__ import annotations

import torch
from torch import Tensor


class _ContextLayer:
    """Keys and values of one layer in a preallocated buffer that is written in place.

    The block's keys and values of a forward lie behind the context's, and the next forward overwrites them.
    """

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # (2, batch, heads, capacity, head_dim): keys, then values

    def append(self, new: Tensor, num_context: int, keep: int | None) -> Tensor:
        """Writes `new`, of which the first `num_context` positions stay, and returns all there is to attend to.

        Args:
            new: `(2, batch, heads, num_context + block, head_dim)`.
            num_context: Positions of `new` that belong to the context.
            keep: How much of the old context is still needed. None for all.

        Returns:
            `(2, batch, heads, length + block, head_dim)`, a view.
        """
        num_new = new.shape[3]
        if self._buffer is None or self.length + num_new > self._buffer.shape[3]:
            self._reallocate(new, keep)
        buffer, end = self._writable(), self.length + num_new
        buffer[:, :, :, self.length : end] = new
        self.length += num_context
        return buffer[:, :, :, :end]

    def select(self, index: Tensor) -> None:
        """Keeps the positions `index (batch, length)` of each row, in this order."""
        if self._buffer is not None:
            buffer, self.length = self._writable(), index.shape[1]
            expanded = index[None, :, None, :, None].expand(2, -1, buffer.shape[2], -1, buffer.shape[4])
            buffer[:, :, :, : self.length] = buffer.gather(3, expanded)

    def _writable(self) -> Tensor:
        """The buffer, copied if it was made in inference mode and may not be written to any more."""
        assert self._buffer is not None
        if self._buffer.is_inference() and not torch.is_inference_mode_enabled():
            self._buffer = self._buffer.clone()
        return self._buffer

    def _reallocate(self, new: Tensor, keep: int | None) -> None:
        """Allocates twice what is needed now, so that copying costs little per token."""
        kept = self.length if keep is None else min(self.length, keep)
        buffer = new.new_empty((*new.shape[:3], max(2 * (kept + new.shape[3]), 64), new.shape[4]))
        if self._buffer is not None:
            buffer[:, :, :, :kept] = self._buffer[:, :, :, self.length - kept : self.length]
        self._buffer, self.length = buffer, kept


class DFlashContextCache:
    """Keys and values of the context, for every layer of a DFlash drafter; never the block's.

    Buffers grow by doubling. A layer with a sliding window drops what no later block can see, unless rows are padded.
    """

    def __init__(self) -> None:
        self._layers: list[_ContextLayer] = []
        self._length = 0

    def get_seq_length(self) -> int:
        """Context tokens so far, dropped ones included."""
        return self._length

    def crop(self, length: int) -> None:
        """Drops the last context tokens, so that `length` are left.

        Raises:
            ValueError: If there are fewer, or if a sliding layer no longer has what it would need.
        """
        if not 0 <= length <= self._length:
            raise ValueError(
                f"`length` is {length}, but must be between 0 and {self._length}, the tokens in the cache."
            )
        removed = self._length - length
        if removed and any(layer.length < self._length for layer in self._layers):
            raise ValueError(
                f"`length` is {length}, but a layer with a sliding window has dropped tokens that it would need "
                f"again. Start a new `DFlashContextCache` and pass the features of all {length} tokens."
            )
        for layer in self._layers:
            layer.length -= removed
        self._length = length

    def drop_padding(self, context_mask: Tensor, length: int) -> Tensor:
        """Moves each row's tokens to the front and cuts off what is padding in all rows.

        Args:
            context_mask: `(batch, length)` bool, False where a row's context is padding. Calls with a mask drop
                nothing, so layers with a sliding window are as long as the others.
            length: Tokens of the longest row.

        Returns:
            `(batch, length)` bool, the mask that belongs to the context now.
        """
        order = context_mask.int().argsort(dim=1, descending=True, stable=True)[:, :length]
        for layer in self._layers:
            layer.select(order)
        self._length = length
        return context_mask.gather(1, order)

    def _skip(self, num_tokens: int) -> None:
        """Counts context tokens that no block can see and that are passed to no layer."""
        self._length += num_tokens

    def _append(self, layer_idx: int, new: Tensor, num_context: int, keep: int | None) -> Tensor:
        while len(self._layers) <= layer_idx:
            self._layers.append(_ContextLayer())
        if layer_idx == 0:
            self._length += num_context
        return self._layers[layer_idx].append(new, num_context, keep)
