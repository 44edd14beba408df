"""The small trained pair that ships with the package: a gated-delta-net hybrid and its DFlash drafter."""

from __future__ import annotations

import json
from importlib.resources import as_file, files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .drafter_kinds import load_drafter
from .drafters import DFlashDraftModel

# Prompts by how varied standard decoding's continuation is, one of each module, as `scripts/choose_demo_prompts.py`
# finds them.
MOST_VARIED = (73, 20, 77, 5, 0, 69, 125, 90, 79, 112)
# Before the next method of a class.
END_OF_FUNCTION = ("\n\n    def ", "\n\n    @")

_PAIR = files("hf_ddtree") / "demo_pair"


def load_demo(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """Loads the pair, which completes Python code; see `recipes/demo_pair` for how it was made.

    Args:
        dtype: Of both models.

    Returns:
        Target, drafter and tokenizer, on the CPU.
    """
    with as_file(_PAIR / "target") as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    with as_file(_PAIR / "drafter") as folder:
        drafter = load_drafter(folder, target_model=model)
    return model, drafter, tokenizer


def demo_folders() -> tuple[str, str]:
    """Where the pair's target and drafter lie."""
    return str(_PAIR / "target"), str(_PAIR / "drafter")


def demo_prompts() -> list[dict[str, str]]:
    """Code to complete, from modules that neither model was trained on.

    Returns:
        Dictionaries with `prompt`, the text, and `module`, where in the standard library it comes from.
    """
    lines = (_PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def varied_prompts() -> list[dict[str, str]]:
    """The same, those first whose continuation by standard decoding repeats itself least."""
    prompts = demo_prompts()
    return [prompts[index] for index in MOST_VARIED] + [
        entry for index, entry in enumerate(prompts) if index not in MOST_VARIED
    ]
