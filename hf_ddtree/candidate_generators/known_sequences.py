"""The sequences that a drafter keeps state of between calls, and whether a call continues them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class KnownSequences:
    """The sequences that a drafter keeps state of, to tell in a later call whether they continue.

    Attributes:
        input_ids: `(batch, length)`, the tokens so far.
        root_positions: Per row the number of its tokens that the target's cache held last.
        drafter: Identifies the drafter; the state of another one is not used.
    """

    input_ids: Tensor | None = None
    root_positions: list[int] = field(default_factory=list)
    drafter: tuple[Any, ...] = ()

    def continues(self, drafter: tuple[Any, ...], cached_ids: Tensor, num_cached: int) -> bool:
        """Whether this state belongs to the drafter and to the tokens in the target's cache, as far as can be told.

        Args:
            drafter: Identifies the drafter.
            cached_ids: `(batch, num_cached)`, the tokens; `(batch, 0)` if they are not known.
            num_cached: Their number.
        """
        if self.drafter != drafter or self.input_ids is None or self.root_positions != [num_cached] * len(cached_ids):
            return False
        # Both end at the same token, but either may lack the first ones. The root, which is last, is never cached.
        known = self.input_ids[:, :-1]
        length = min(known.shape[1], cached_ids.shape[1])
        return torch.equal(known[:, known.shape[1] - length :], cached_ids[:, cached_ids.shape[1] - length :])
