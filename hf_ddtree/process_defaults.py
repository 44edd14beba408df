"""Defaults of all models of a process, for programs that call `generate()` and cannot be told of a strategy."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from .configuration import LOOKUP, STRATEGIES, DDTreeConfig
from .recording.folder import recording_folder
from .shared_drafters import shared_drafter
from .validation import UnsupportedError

# A JSON object with `generation_strategy`, knobs and `record_to`, as `hf-ddtree run` sets it for a program.
VARIABLE = "HF_DDTREE_DEFAULTS"


def process_defaults() -> SimpleNamespace | None:
    """The defaults of `HF_DDTREE_DEFAULTS`, `generation_strategy` among them; None if it is not set.

    Raises:
        ValueError: If the variable is no JSON object of a strategy and knobs.
    """
    text = os.environ.get(VARIABLE)
    return SimpleNamespace(**_parsed(text)) if text else None


def to_variable(generation_strategy: str = "ddtree", **knobs: Any) -> str:
    """The value of `HF_DDTREE_DEFAULTS` for a strategy, knobs and `record_to`, the arguments of a `RecordingFolder`.

    Raises:
        ValueError: If one of them has a value that is not allowed.
        TypeError: If a keyword argument is not a knob.
    """
    settings = {"generation_strategy": generation_strategy, **knobs}
    text = json.dumps({name: value for name, value in settings.items() if value is not None})
    _parsed(text)
    return text


def check_drafts_for(drafter: str, model: PreTrainedModel) -> None:
    """Loads the drafter that is the process's default for a model, if it is not loaded yet.

    Raises:
        UnsupportedError: If it does not draft for this model, which is then to be decoded by the standard method.
    """
    if drafter == LOOKUP:
        return
    try:
        shared_drafter(drafter, model)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"The default drafter {drafter!r} cannot draft for this model. {error}") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ValueError("it is no JSON object.")
        settings.setdefault("generation_strategy", "ddtree")
        if settings["generation_strategy"] not in STRATEGIES:
            raise ValueError(
                f"`generation_strategy` is {settings['generation_strategy']!r}, but must be one of "
                f"{', '.join(map(repr, STRATEGIES))}."
            )
        if settings.get("record_to") is not None:
            recording_folder(settings["record_to"])
        knobs = {name: value for name, value in settings.items() if name not in ("generation_strategy", "record_to")}
        DDTreeConfig.from_knobs(VARIABLE, **knobs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The environment variable {VARIABLE} is {text!r}, but must be a JSON object of knobs such as "
            f'{{"drafter": "lookup"}}: {error}'
        ) from error
    return settings
