"""How a tree spends its budget, and how large it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    pass

TreeShape = Literal["best_first", "spine_first", "chain"]


# Most nodes of a tree.
MOST_NODES = 4096


TREE_SHAPES: tuple[str, ...] = get_args(TreeShape)


def require_tree_shape(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is one of `TREE_SHAPES`."""
    if value not in TREE_SHAPES:
        allowed = ", ".join(map(repr, TREE_SHAPES))
        raise ValueError(f"`{name}` must be one of {allowed}, but is {value!r}.")
