"""The target's cache between rounds, for drafters that attend to the target's own keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_rows import CommittedRows


@dataclass(frozen=True)
class CommittedCache:
    """What the target's cache holds of the committed tokens. To be read alone, and before the target runs again.

    Attributes:
        cache: The cache.
        rows: Where each row's tokens are in it.
    """

    cache: Cache
    rows: CommittedRows

    def read(self, layer: int, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values of a layer, and which of them a token at its row's root would see.

        Args:
            layer: Number of the cache's layer.
            window: The layer's sliding window, None for full attention.

        Returns:
            Keys and values, `(batch, heads, entries, head_dim)`, which are views; and `(batch, entries)` bool.
        """
        layer_cache, rows = self.cache.layers[layer], self.rows
        seen, device = rows.mask(), rows.device
        if layer_cache.is_sliding:
            kept = min(rows.num_cached, layer_cache.sliding_window - 1)
            seen = rows.window_mask(seen, kept)
            first = layer_cache.keys.shape[-2] - kept
        else:
            kept, first = rows.num_cached, 0
            if window is not None:
                within = rows.before_root() < window
                seen = within if seen is None else seen & within
        if seen is None:
            seen = torch.ones((1, kept), dtype=torch.bool, device=device)
        keys, values = (entries[..., first : first + kept, :] for entries in (layer_cache.keys, layer_cache.values))
        return keys, values, seen.expand(len(rows.lengths), -1)
