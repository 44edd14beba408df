"""Loading what a command decodes with, and prompts for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import check_repository

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a chat model is asked.
QUESTIONS = (
    "Write a Python function that merges two sorted lists, with a docstring and a test.",
    "Explain in three short paragraphs how a hash table works.",
    "Plan a vegetarian dinner for four and list what to buy.",
)


class Pair(NamedTuple):
    """A target with its tokenizer, and its drafter if it has one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: PreTrainedModel | None


def load_pair(target: str | None, drafter: str | None, dtype: str, device_map: str | None) -> Pair:
    """Loads what `--target` and `--drafter` name; without a target, or for `demo`, the pair that ships."""
    from ..demo import demo_folders
    from ..drafter_kinds import load_drafter

    if target in (None, "demo"):
        target, shipped = demo_folders()
        drafter = drafter or shipped
        dtype = "float32" if dtype == "auto" else dtype
    check_repository("target", target, "--target")
    if drafter is not None:
        check_repository("drafter", drafter, "--drafter")
    model, tokenizer = load_target(target, dtype, device_map)
    return Pair(model, tokenizer, None if drafter is None else load_drafter(drafter, target_model=model))


def load_target(name: str, dtype: str, device_map: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target and its tokenizer, which pads with the end-of-sequence token if it has no token for that."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def choose_prompts(tokenizer: PreTrainedTokenizerBase, prompt: str | None, count: int) -> list[tuple[str, str]]:
    """Titles and texts of prompts: the user's, questions for a chat model, or code to complete."""
    from ..demo import varied_prompts

    if prompt is not None:
        return [("--prompt", prompt)]
    if tokenizer.chat_template:
        return [("a question", question) for question in QUESTIONS[:count]]
    return [(entry["module"], entry["prompt"]) for entry in varied_prompts()[:count]]


def json_object(name: str, text: str) -> dict[str, Any]:
    """An option that is an object in JSON.

    Raises:
        ValueError: If it is not.
    """
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` is no JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(options, dict):
        raise ValueError(f"`{name}` must be an object in JSON, but is {text}.")
    return options
