"""A method at a temperature: medians, spread, and whether they are more than chance."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .sample_statistics import quartiles, sign_test


@dataclass
class Summary:
    """A method at a temperature.

    Attributes:
        method, temperature: Which.
        runs: Batches of prompts.
        compared: On how many of them the tokens were compared with standard decoding's.
        identical: On how many of these every token is standard decoding's.
        refused: Why the method cannot decode this, or None.
        tokens_per_second: Quartiles over batches, of all rows together, prompt included.
        speedup: Quartiles over batches of standard decoding's time over the method's.
        faster: On how many batches the method is faster than standard decoding.
        p_value: How likely as uneven a count would be if both were as fast (two-sided sign test); None for `plain`.
        tokens_per_forward: Tokens per forward of the target and row, on average; None where it is not known.
        accepted_lengths: How often a round emitted how many tokens.
        round_ms: Milliseconds of a round's stages, on average.
        peak_memory: Most bytes on the GPU.
    """

    method: str
    temperature: float
    runs: int
    compared: int
    identical: int
    refused: str | None = None
    tokens_per_second: tuple[float, float, float] | None = None
    speedup: tuple[float, float, float] | None = None
    faster: int = 0
    p_value: float | None = None
    tokens_per_forward: float | None = None
    accepted_lengths: dict[int, int] | None = None
    round_ms: dict[str, float] | None = None
    peak_memory: int | None = None

    @property
    def label(self) -> str:
        """Method and, if it samples, temperature."""
        return f"{self.method} @ {self.temperature:g}" if self.temperature else self.method

    @property
    def differs(self) -> bool:
        """Whether a token differs from standard decoding's where it should not."""
        return self.identical < self.compared


def summarise(runs: Sequence[dict[str, Any]], method: str, temperature: float, plain: str) -> Summary:
    """Summarises a method's runs at a temperature, against the runs of the method `plain`."""
    of = {
        name: {
            run["batch"]: run
            for run in runs
            if run["method"] == name and run["temperature"] == temperature and "refused" not in run
        }
        for name in (plain, method)
    }
    all_runs = [run for run in runs if run["method"] == method and run["temperature"] == temperature]
    refused = next((run["refused"] for run in all_runs if "refused" in run), None)
    of_method, of_plain = of[method], of[plain]
    compared = [run["identical"] for run in of_method.values() if run["identical"] is not None]
    summary = Summary(method, temperature, len(all_runs), len(compared), sum(compared), refused)
    both = sorted(of_method.keys() & of_plain.keys())
    if not both:
        if refused is None:
            summary.refused = "Not shown, as standard decoding, which it is compared with, was refused."
        return summary
    ratios = [of_plain[batch]["seconds"] / of_method[batch]["seconds"] for batch in both]
    summary.tokens_per_second = quartiles(of_method[batch]["tokens"] / of_method[batch]["seconds"] for batch in both)
    if method != plain:
        summary.speedup = quartiles(ratios)
        summary.faster = sum(ratio > 1 for ratio in ratios)
        summary.p_value = sign_test(summary.faster, sum(ratio < 1 for ratio in ratios))
    _add_rounds(summary, list(of_method.values()))
    summary.peak_memory = max((run["peak_memory"] for run in of_method.values() if "peak_memory" in run), default=None)
    return summary


def _add_rounds(summary: Summary, runs: Sequence[dict[str, Any]]) -> None:
    """Adds what rounds emit and where their time goes, where the runs say so."""
    lengths = [length for run in runs for length in run.get("accepted_lengths", ())]
    if not lengths:
        return
    rounds = sum(run["target_forwards"] - 1 for run in runs)
    summary.tokens_per_forward = statistics.mean(lengths)
    summary.accepted_lengths = dict(sorted(Counter(lengths).items()))
    summary.round_ms = {
        stage: sum(run["stage_seconds"][stage] for run in runs) / rounds * 1e3 for stage in runs[0]["stage_seconds"]
    }


def is_of(run: dict[str, Any], entry: Summary) -> bool:
    """Whether a run is among those that are summarised."""
    return run["method"] == entry.method and run["temperature"] == entry.temperature
