"""Private names of Transformers: one that is missing costs what needs it, with a message, and nothing else."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.utils import logging

logger = logging.get_logger(__name__)


class MissingPrivateName(RuntimeError):
    """The installed Transformers lacks a private name without which something that was asked for cannot be done."""

    def __init__(self, name: str, feature: str) -> None:
        super().__init__(_message(name, f"{feature} needs"))


def private(owner: Any, name: str, feature: str) -> Any:
    """The attribute `name` of `owner`.

    Args:
        owner: A class or an object of Transformers.
        name: The attribute, private to Transformers.
        feature: What needs it; begins the message.

    Raises:
        MissingPrivateName: If `owner` has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_type = owner if isinstance(owner, type) else type(owner)
        raise MissingPrivateName(f"{owner_type.__name__}.{name}", feature) from None


def warn_of_missing(name: str, consequence: str) -> None:
    """Says once a process that a private name is missing, and what follows."""
    logger.warning_once(_message(name, f"{consequence}: that needs"))


def _message(name: str, beginning: str) -> str:
    return (
        f"{beginning} `{name}`, a private name that Transformers {transformers.__version__} does not have. Install "
        "versions that fit: `pip install -U hf-ddtree transformers`, or in an updated clone `pip install -U .`."
    )
