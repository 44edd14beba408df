"""What code finds while `torch.compile` traces it, in place of context variables, which cannot be traced.

A traced forward sets it and clears it again, so compiled code neither reads nor changes it when it runs: what it holds
are values of the graph. Threads that run compiled code do not meet in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .dispatch import TreePass


class Traced:
    """The forward that is being traced.

    Attributes:
        tree_pass: The forward of a tree, None if it is no such forward.
        features: Where layers put their outputs, by their number; None if no one wants them.
        num_untraced: How many forwards of a tree are under way outside of traced code, in all threads.
    """

    tree_pass: TreePass | None = None
    features: dict[int, Tensor] | None = None
    num_untraced: int = 0


traced = Traced()
