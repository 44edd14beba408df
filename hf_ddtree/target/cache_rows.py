"""Where each row's tokens stand in the cache while rows accept different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..devices import on_device


class CommittedRows:
    """The committed tokens of each row.

    Attention layers without a window hold row `r` in their first `lengths[r]` entries: shorter rows leave the
    entries after theirs unused, so the cache is never longer than its longest row. Layers with a window hold the last
    entries of each row, aligned at the end.

    Args:
        num_prompt: Number of cached entries after prefill, the same for all rows.
        model_kwargs: As `generate()` keeps them after prefill: position ids and attention mask reach to the root.
        batch_size: Number of rows.
        device: Where the target takes its inputs.
    """

    def __init__(self, num_prompt: int, model_kwargs: dict[str, Any], batch_size: int, device: torch.device) -> None:
        self.num_prompt = num_prompt
        self.lengths = [num_prompt] * batch_size
        attention_mask = model_kwargs.get("attention_mask")
        self._prompt_mask = None if attention_mask is None else attention_mask[:, :num_prompt].to(device, torch.bool)
        self._prompt_root_position_ids = model_kwargs["position_ids"][..., -1:].to(device)
        self.device = device
        self._lengths: Tensor | None = None

    @property
    def num_cached(self) -> int:
        """Entries of the longest row."""
        return max(self.lengths)

    @property
    def are_equally_long(self) -> bool:
        """Whether all rows are equally long."""
        return min(self.lengths) == max(self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Counts the tokens that were committed to each row."""
        self._lengths = None
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]

    def put_back(self, lengths: list[int]) -> None:
        """Takes back what was counted since the rows had these lengths."""
        self._lengths = None
        self.lengths = lengths

    def lengths_on_device(self) -> Tensor:
        """`(batch, 1)` int64, `lengths` where the target takes its inputs."""
        if self._lengths is None:
            self._lengths = on_device(self.lengths, self.device)[:, None]
        return self._lengths

    def root_position_ids(self) -> Tensor:
        """`(..., batch, 1)` int64, the position of each row's root; leading dimensions are axes of the position."""
        if len(self.lengths) == 1 or self.are_equally_long:
            return self._prompt_root_position_ids + (self.lengths[0] - self.num_prompt)
        return self._prompt_root_position_ids + (self.lengths_on_device() - self.num_prompt)

    def root_indices(self) -> Tensor:
        """`(batch, 1)` int64, how many tokens each row has in front of its root, padding at the left not counted."""
        indices = self.lengths_on_device()
        if self._prompt_mask is None:
            return indices
        return indices - (self._prompt_mask.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)

    def mask(self) -> Tensor | None:
        """`(batch, num_cached)` bool, which entries of a layer without a window hold a token; None if all do."""
        num_cached = self.num_cached
        if self._prompt_mask is None and self.are_equally_long:
            return None
        mask = torch.ones((len(self.lengths), num_cached), dtype=torch.bool, device=self.device)
        if self._prompt_mask is not None:
            mask[:, : self.num_prompt] = self._prompt_mask
        if not self.are_equally_long:
            mask &= torch.arange(num_cached, device=self.device) < self.lengths_on_device()
        return mask

    def before_root(self) -> Tensor:
        """`(batch, num_cached)` int64, how far before its row's root each entry of a layer without a window lies."""
        return self.lengths_on_device() - torch.arange(self.num_cached, device=self.device)

    def window_mask(self, mask: Tensor | None, kept: int) -> Tensor | None:
        """`mask` for a layer that holds the last `kept` entries of each row, `(batch, kept)`."""
        if mask is None:
            return None
        index = self.lengths_on_device() - kept + torch.arange(kept, device=self.device)
        return mask.gather(1, index.clamp(min=0)) & (index >= 0)
