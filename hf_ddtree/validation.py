"""Checks of arguments, with messages that name the argument and what is allowed."""

from __future__ import annotations

from numbers import Integral


def require_positive_int(name: str, value: object, or_none: bool = False) -> None:
    """Raises `ValueError` unless `value` is an integer of at least 1; `bool` does not count as one."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1:
        return
    alternative = ", or None for the default" if or_none else ""
    raise ValueError(f"`{name}` must be an integer of at least 1{alternative}, but is {value!r}.")


def describe_type(value: object) -> str:
    """What a value of a wrong type is, for an error message."""
    return f"the class `{value.__name__}`" if isinstance(value, type) else f"a `{type(value).__name__}`"
