"""Code that decodes with trees, to be pasted: with the drafter that was named, or what can be done without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

# Small models of families, with the rows of their tables of embeddings.
SMALL_MODELS = {
    "gemma3_text": ("google/gemma-3-270m-it", 262144),
    "llama": ("meta-llama/Llama-3.2-1B-Instruct", 128256),
    "qwen2": ("Qwen/Qwen2.5-0.5B-Instruct", 151936),
    "qwen3": ("Qwen/Qwen3-0.6B", 151936),
    "qwen3_moe": ("Qwen/Qwen3-0.6B", 151936),
}
# Rows by which tables for one tokenizer differ, as each model pads its own.
MOST_PADDING = 1024
# Parameters of a target that such a small model can draft for with a gain.
LEAST_PARAMETERS = 3e9


@dataclass(frozen=True)
class Suggestion:
    """A way to draft for a target.

    Attributes:
        what: What drafts, and when that pays.
        call: Code that makes `drafter` from `model`, or None.
    """

    what: str
    call: str | None = None


def loading_of(name: str, attn_implementation: str, auto_class: type) -> list[str]:
    """Lines that load a target and its tokenizer."""
    options = f'dtype="auto", attn_implementation="{attn_implementation}"'
    return [
        f"from transformers import {auto_class.__name__}, AutoTokenizer",
        "",
        f"model = {auto_class.__name__}.from_pretrained({name!r}, {options})",
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})",
    ]


def drafter_loading_of(name: str) -> str:
    """A line that loads a drafter."""
    return f"drafter = hf_ddtree.load_drafter({name!r}, target_model=model)"


def generate_call(has_drafter: bool, tree_budget: Any) -> list[str]:
    """Lines that generate from a prompt and print the text, by prompt lookup if there is no drafter."""
    source = "assistant_model=drafter" if has_drafter else "tree_lookup=True"
    options = f'{source}, generation_strategy="ddtree", tree_budget={json.dumps(tree_budget)}, max_new_tokens=128'
    return [
        'inputs = tokenizer("A prompt of yours", return_tensors="pt").to(model.device)',
        f"out = model.generate(**inputs, {options})",
        "print(tokenizer.decode(out[0], skip_special_tokens=True))",
    ]


def suggestions_for(target: PreTrainedModel, has_mtp: bool | None) -> Iterator[Suggestion]:
    """What else than prompt lookup can draft for a target that has no drafter, the simplest first.

    Args:
        target: The target, whose weights may be on the meta device.
        has_mtp: Whether its checkpoint holds multi-token-prediction layers; None if that is not known.
    """
    if has_mtp is not False:
        maybe = "" if has_mtp else ", if it holds them"
        yield Suggestion(
            f"The multi-token-prediction layers in its own checkpoint{maybe}: nothing else to load.",
            drafter_loading_of("mtp"),
        )
    yield Suggestion(
        "A DFlash drafter that was trained for this very model: most tokens per forward. Search the Hub for the "
        "model's name and DFlash."
    )
    small = _small_model_for(target)
    yield Suggestion(
        "A small model of the family, with the same tokenizer"
        + (":" if small else ", in place of SMALL_MODEL. It must be several times faster:"),
        drafter_loading_of(small or "SMALL_MODEL"),
    )
    yield Suggestion("A drafter that you train, with `hf-ddtree train` and prompts of your own.")


def _small_model_for(target: PreTrainedModel) -> str | None:
    config = target.config.get_text_config()
    name, rows = SMALL_MODELS.get(config.model_type, (None, 0))
    if abs(rows - config.vocab_size) > MOST_PADDING or target.num_parameters() < LEAST_PARAMETERS:
        return None
    return name
