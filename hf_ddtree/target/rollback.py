"""Putting a cache back to what was committed if something ends a round early, such as Ctrl-C inside a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer, StaticLayer

from .cache_rows import CommittedRows

# The methods by which models write to a cache layer.
UPDATES = ("update", "update_conv_state", "update_recurrent_state")


@contextmanager
def undone_on_error(cache: Cache, rows: CommittedRows | None = None) -> Iterator[None]:
    """Puts the cache, and `rows`, back to what it held if an exception leaves the context; the exception passes.

    Keys and values are only ever extended, so keeping references suffices. What is changed in place is copied:
    the states of layers that have one, and the length of a static cache.
    """
    layers, lengths = list(cache.layers), [] if rows is None else list(rows.lengths)
    held = [_held_by(layer) for layer in layers]
    try:
        yield
    except BaseException:
        cache.layers[:] = layers
        for layer, attributes in zip(layers, held):
            _put_back(layer, attributes)
        if rows is not None:
            rows.put_back(lengths)
        raise


def refuse_further_use(cache: Cache) -> None:
    """Makes every later forward over the cache an error: its rows hold different numbers of tokens."""
    for layer in cache.layers:
        for name in UPDATES:
            if hasattr(layer, name):
                setattr(layer, name, _refuse)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "This cache was in use by a `generate()` call that was interrupted while its rows had different lengths, so "
        "it cannot be continued. Start again from the whole sequences with a new cache."
    )


def _held_by(layer: Any) -> dict[str, Any]:
    """The attributes of a cache layer, with copies of what a forward or a commit changes in place."""
    attributes = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    if isinstance(layer, LinearAttentionLayer):
        for name in ("recurrent_states", "conv_states"):
            attributes[name] = {index: _copy(state) for index, state in attributes[name].items()}
    if isinstance(layer, StaticLayer):
        attributes["cumulative_length"] = _copy(layer.cumulative_length)
    return attributes


def _put_back(layer: Any, attributes: dict[str, Any]) -> None:
    """Gives a layer its attributes back; tensors that it changes in place keep their address."""
    for name, value in attributes.items():
        now = getattr(layer, name, None)
        if isinstance(value, dict) and isinstance(now, dict):
            attributes[name] = {index: _in_place(now.get(index), state) for index, state in value.items()}
        elif name == "cumulative_length":
            attributes[name] = _in_place(now, value)
    vars(layer).clear()
    vars(layer).update(attributes)
    if isinstance(layer, StaticLayer) and layer.is_initialized:
        for entries in (layer.keys, layer.values):  # what was fed may be NaN, which no mask hides
            entries[..., int(layer.cumulative_length) :, :] = 0.0


def _in_place(now: Any, value: Any) -> Any:
    """The value, written into the tensor that is there now if it fits."""
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
        return now.copy_(value)
    return value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
