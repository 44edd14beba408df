"""Which forward over a tree a layer's call belongs to.

A context variable tells, so that other threads and tasks may run the same model meanwhile. `torch.compile` cannot
trace a context variable. So a traced forward leaves its tree in `traced` while it is traced, and clears it again:
compiled code neither reads nor changes it when it runs, and what it holds are values of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .tree_pass import TreePass

_lock = threading.Lock()
_active: ContextVar[TreePass | None] = ContextVar("hf_ddtree_tree_pass", default=None)


class Traced:
    """The forward that is being traced.

    Attributes:
        tree_pass: The forward over a tree, None if it is no such forward.
        features: Where layers put their outputs, by their number; None if nothing records them.
        num_untraced: How many forwards over a tree are under way outside of traced code, in all threads.
    """

    tree_pass: TreePass | None = None
    features: dict[int, Tensor] | None = None
    num_untraced: int = 0


traced = Traced()


@contextmanager
def active(tree_pass: TreePass) -> Iterator[None]:
    """Sends this context's calls to the tree operators. Other threads and tasks are not affected."""
    token = _active.set(tree_pass)
    with _lock:
        traced.num_untraced += 1
    try:
        yield
    finally:
        with _lock:
            traced.num_untraced -= 1
        _active.reset(token)


def current_pass() -> TreePass | None:
    """The tree that a call is for, if any. While traced, a call asks the context only if it could be for one there."""
    if torch.compiler.is_compiling() and (traced.tree_pass is not None or traced.num_untraced == 0):
        return traced.tree_pass
    return _active.get()
