"""The keys and values of the context, which a DFlash drafter keeps between rounds."""

from __future__ import annotations

from torch import Tensor

from ...target.preallocation import GrowingTensor


class _ContextLayer:
    """Keys and values of one layer, which grow in place as those of the target's cache do.

    The block's keys and values of a forward lie after the context's, and the next forward overwrites them.
    """

    def __init__(self) -> None:
        self._entries: Tensor | None = None  # (2, batch, heads, length, head_dim): keys, then values
        self._grower = GrowingTensor()

    @property
    def length(self) -> int:
        """Context tokens that it holds."""
        return 0 if self._entries is None else self._entries.shape[-2]

    def append(self, new: Tensor, num_context: int, keep: int | None, following: int = 0) -> Tensor:
        """Writes `new`, of which the first `num_context` positions stay, and returns all there is to attend to.

        Args:
            new: `(2, batch, heads, num_context + block, head_dim)`.
            num_context: Positions of `new` that belong to the context.
            keep: How much of the old context is still needed. None for all.
            following: How many positions are known to follow, for which memory is allocated as well.

        Returns:
            `(2, batch, heads, length + block, head_dim)`, a view.
        """
        entries = new[..., :0, :] if self._entries is None else self._entries
        if keep is not None and not self._grower.has_room(entries, new.shape[-2]):
            entries = entries[..., max(0, self.length - keep) :, :]
        extended = self._grower.extended(entries, new, following)
        self._entries = extended[..., : entries.shape[-2] + num_context, :]
        return extended

    def crop(self, length: int) -> None:
        """Keeps the first `length` positions."""
        if self._entries is not None:
            self._entries = self._entries[..., :length, :]

    def select(self, index: Tensor) -> None:
        """Keeps the positions `index (batch, length)` of each row, in this order."""
        if self._entries is not None:
            _, _, heads, _, head_dim = self._entries.shape
            expanded = index[None, :, None, :, None].expand(2, -1, heads, -1, head_dim)
            self._entries = self._entries.gather(3, expanded)


class DFlashContextCache:
    """Keys and values of the context, for every layer of a DFlash drafter; never the block's.

    Memory grows as that of the target's cache does. A layer with a sliding window drops what no later block can see,
    unless rows are padded.
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
            layer.crop(layer.length - removed)
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

    def _append(self, layer_idx: int, new: Tensor, num_context: int, keep: int | None, following: int = 0) -> Tensor:
        while len(self._layers) <= layer_idx:
            self._layers.append(_ContextLayer())
        if layer_idx == 0:
            self._length += num_context
        return self._layers[layer_idx].append(new, num_context, keep, following)
