"""One prompt by several methods of decoding: each timed, tokens compared, two of them side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

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


def run_once(
    model: PreTrainedModel,
    inputs: Any,
    contestant: Contestant,
    options: Mapping[str, Any],
    streamer: BaseStreamer | None = None,
) -> tuple[Run, GenerateDecoderOnlyOutput]:
    """Runs a method, always with the same seed, and times it."""
    torch.manual_seed(SEED)
    start = time.perf_counter()
    out = model.generate(**inputs, **options, **contestant.arguments, return_dict_in_generate=True, streamer=streamer)
    seconds = time.perf_counter() - start
    new_tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(new_tokens, seconds, getattr(out, "ddtree_stats", None)), out


def compare(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Any,
    contestants: Sequence[Contestant],
    options: Mapping[str, Any],
) -> list[Run]:
    """Runs every method, the first two before the eyes of the user."""
    runs = []
    with SideBySide(console, [(contestant.title, contestant.style) for contestant in contestants[:2]]) as view:
        for column, contestant in enumerate(contestants[:2]):
            run, _ = run_once(model, inputs, contestant, options, ColumnStreamer(tokenizer, view, column))
            runs.append(run)
            view.end(column, run.summary)
    return runs + [run_once(model, inputs, contestant, options)[0] for contestant in contestants[2:]]


def conclude(console: Console, model: PreTrainedModel, runs: Sequence[Sequence[Run]]) -> None:
    """Says whether all tokens are the same; the process fails if not, where rounding cannot explain it.

    Args:
        console: Where to say it.
        model: The target.
        runs: The runs of each prompt, that of standard decoding first.
    """
    different = sum(run.token_ids != of_prompt[0].token_ids for of_prompt in runs for run in of_prompt[1:])
    if not different:
        console.print("[bold green]Identical[/]: every token is the one that standard decoding gives.")
        return
    compared = sum(len(of_prompt) - 1 for of_prompt in runs)
    console.print(f"[bold red]Not identical[/] in {different} of {compared} outputs.")
    if model.dtype == torch.float32:
        raise typer.Exit(code=1)
    console.print(
        f"In {str(model.dtype).removeprefix('torch.')} rounding can tip near ties, in standard decoding as well: "
        "docs/targets.md. `--dtype float32` compares exactly."
    )
