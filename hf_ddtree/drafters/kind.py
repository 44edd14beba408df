"""What a kind of drafter is: the formats it comes in, how it is recognised, checked and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint import Checkpoint

# What trees are like.
BLOCK = (
    "one forward for a block; by one distribution per depth, calibrated; with a memory by what the target said as well"
)
BLOCK_MARGINALS = "one forward for a block; by one distribution per depth, calibrated"
CONDITIONAL = "one forward for a block; by each token's probability given the one before it"
ALONG_BRANCH = "one forward for a block, then a small head per level; by each token's probability given its branch"
LEVELWISE = "one forward per level; by each token's probability given its branch"


class Format(NamedTuple):
    """A format that drafters of a kind are published in; a row of the table in `docs/drafters.md`.

    Attributes:
        publisher: Whose it is.
        recognised_by: What in its `config.json` tells.
        needs: What must be there.
        parity: The test that compares it with its publisher's implementation, or with plain equations.
    """

    publisher: str
    recognised_by: str
    needs: str
    parity: str


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        name: What it is called.
        tree: What its trees are like.
        formats: The formats that it comes in.
        recognises: Whether a checkpoint holds such a drafter, for the target that it is loaded for. The target is None
            if there is none, or if nothing but the checkpoint's config may be read.
        read_config: The drafter's configuration, from its checkpoint's; None if only the weights can tell.
        check_fits: Raises `ValueError` if a drafter with this configuration does not fit a target, whose weights may
            be on the meta device.
        load: Loads the drafter from its checkpoint and configuration for a target, or for None.
        matches: Whether an `assistant_model` is a drafter of this kind.
        is_never_a_target: Whether such a checkpoint can be nothing else than a drafter.
    """

    name: str
    tree: str
    formats: tuple[Format, ...]
    recognises: Callable[[Checkpoint, PreTrainedModel | None], bool]
    read_config: Callable[[Checkpoint], PreTrainedConfig | None]
    check_fits: Callable[[Any, PreTrainedModel], None]
    load: Callable[[Checkpoint, Any, PreTrainedModel | None], PreTrainedModel]
    matches: Callable[[Any], bool]
    is_never_a_target: bool = True
