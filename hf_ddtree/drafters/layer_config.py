"""The configuration of a drafter's own layers, with checks of its values."""

import math
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

# No module of a config class has `from __future__ import annotations`: `strict` checks values against the declared
# types, and does not read types that are strings.


@strict
class LayerConfig(Qwen3Config):
    """A Qwen3 config, which describes a drafter's own layers. A wrong value is refused when it is made, not in use.

    Raises:
        StrictDataclassFieldValidationError: If a value is not of the type that its field declares.
        ValueError: If a value is out of range.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in (field.name for field in fields(self)):
            value = getattr(self, name, None)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` is {value}, but must be a finite number.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` is {self.sliding_window}, but must be at least 1, or None.")
        theta = (self.rope_parameters or {}).get("rope_theta", 1.0)
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ValueError(f"`rope_theta` is {theta!r}, but must be a number above 0.")
