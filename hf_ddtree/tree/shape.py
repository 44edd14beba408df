"""How a tree spends its budget, and how large it may be."""

from __future__ import annotations

from typing import Literal, get_args

# Most nodes of a tree.
MOST_NODES = 4096

TreeShape = Literal["best_first", "spine_first", "chain"]
TREE_SHAPES: tuple[str, ...] = get_args(TreeShape)


def require_tree_shape(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is one of `TREE_SHAPES`."""
    if value not in TREE_SHAPES:
        allowed = ", ".join(map(repr, TREE_SHAPES))
        raise ValueError(f"`{name}` must be one of {allowed}, but is {value!r}.")
