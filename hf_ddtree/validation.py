"""Checks of arguments, with messages that name the argument and what is allowed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral


class UnsupportedError(ValueError):
    """A model or call that cannot be decoded by tree, but by standard decoding."""


def require_positive_int(name: str, value: object, or_none: bool = False) -> None:
    """Raises `ValueError` unless `value` is an integer of at least 1; `bool` does not count as one."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1:
        return
    alternative = ", or None for the default" if or_none else ""
    raise ValueError(f"`{name}` must be an integer of at least 1{alternative}, but is {value!r}.")


def require_tokenizer(tokenizer: object) -> None:
    """Raises `TypeError` for what gives no text of tokens."""
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"`tokenizer` must have `decode`, as tokenizers do, but is {describe_type(tokenizer)}.")


def did_you_mean(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """A question that names the known name nearest to a misspelt one; empty if none is similar.

    Args:
        name: The misspelt name.
        known: The known names.
        similarity: Least ratio of matching characters, from 0 to 1.
    """
    nearest = get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f" Did you mean `{nearest[0]}`?" if nearest else ""


def describe_type(value: object) -> str:
    """What a value of a wrong type is, for an error message."""
    return f"the class `{value.__name__}`" if isinstance(value, type) else f"a `{type(value).__name__}`"


def install_command(extra: str) -> str:
    """What installs an optional dependency of the package, from an index or from a clone of its repository."""
    return f"pip install 'hf-ddtree[{extra}]', or in a clone pip install '.[{extra}]'"


def shortened(value: object) -> str:
    """A wrong value as an error message shows it, in 60 characters at most."""
    return textwrap.shorten(repr(value), 60, placeholder="...")


def reason_of(error: ValueError) -> str:
    """Why a line of a file cannot be read, for an error message."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno})."
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 (byte {error.object[error.start]:#x} at place {error.start + 1})."
    return str(error)
