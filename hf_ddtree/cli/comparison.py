"""One prompt by several methods of decoding: two of them side by side, each timed, tokens compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..output import DDTreeStats
from .streaming import ColumnStreamer, SideBySide

SEED = 0
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Contestant:
    """A method of decoding.

    Attributes:
        title: What it is called.
        style: How its text is printed.
        arguments: What it adds to a call of `generate()`.
    """

    title: str
    style: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One output: its new tokens, how long it took, and the `ddtree_stats` of tree decoding."""

    token_ids: list[int]
    seconds: float
    stats: DDTreeStats | None

    @property
    def summary(self) -> str:
        """Tokens, time and speed."""
        count = len(self.token_ids)
        return f"{count} {'token' if count == 1 else 'tokens'} in {self.seconds:.2f} s, {count / self.seconds:.1f}/s"


def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """A prompt as the model's inputs, in its chat template if it has one."""
    if not tokenizer.chat_template:
        return tokenizer(text, return_tensors="pt").to(model.device)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)


def warm_up(model: PreTrainedModel, inputs: Any, contestants: Sequence[Contestant]) -> None:
    """Runs each method once, so that first calls are not timed and refusals come before anything is printed."""
    for contestant in contestants:
        model.generate(**inputs, max_new_tokens=WARM_UP_TOKENS, **contestant.arguments)


def compare(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Any,
    contestants: Sequence[Contestant],
    options: dict[str, Any],
) -> list[Run]:
    """Runs every method with the same seed, the first two before the eyes of the user."""

    def run(contestant: Contestant, streamer: ColumnStreamer | None = None) -> Run:
        torch.manual_seed(SEED)
        start = time.perf_counter()
        out = model.generate(
            **inputs, **options, **contestant.arguments, return_dict_in_generate=True, streamer=streamer
        )
        seconds = time.perf_counter() - start
        new_tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Run(new_tokens, seconds, getattr(out, "ddtree_stats", None))

    runs = []
    with SideBySide(console, [(contestant.title, contestant.style) for contestant in contestants[:2]]) as view:
        for column, contestant in enumerate(contestants[:2]):
            runs.append(run(contestant, ColumnStreamer(tokenizer, view, column)))
            view.end(column, runs[-1].summary)
    return runs + [run(contestant) for contestant in contestants[2:]]
