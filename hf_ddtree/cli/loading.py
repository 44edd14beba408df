"""Loading what a command decodes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_target(name: str, dtype: str, device_map: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target and its tokenizer, which pads with the end-of-sequence token if it has no token for that."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
