"""What differs between the supported Transformers versions, and nothing else."""

from __future__ import annotations

from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

# Transformers renamed `past_key_values` to `cache` in models' arguments, `generate()`'s keyword arguments and outputs.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments that `generate()` prepared, None if there is none."""
    return model_kwargs.get(CACHE_KEY)
