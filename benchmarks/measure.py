"""What the benchmarks share: methods that alternate, where the time of a round goes, and the file of results."""

from __future__ import annotations

import functools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel

from hf_ddtree.benchmark import describe_machine, quartiles

RESULTS = Path(__file__).parent / "results"
NOT_PRINTED = "--output", "--workloads"


def rounded_quartiles(values: Iterable[float]) -> list[float]:
    """Quartiles as files of results hold them."""
    return [round(value, 4) for value in quartiles(values)]


class CallTimer:
    """Times the calls of an object's method from now on.

    Attributes:
        spans: When each call began and ended, in seconds.
    """

    def __init__(self, owner: Any, name: str = "forward") -> None:
        self.spans: list[tuple[float, float]] = []
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.spans.append((start, time.perf_counter()))
            return result

        setattr(owner, name, timed)

    def seconds(self, start: float, end: float) -> float:
        """Time in calls that began between two moments."""
        return sum(stop - begin for begin, stop in self.spans if start <= begin < end)


class Stopwatch:
    """Runs `generate()` and tells where its time goes.

    Args:
        model: The target.
        drafters: Those that will draft for it. What comes between their forward and the candidates' probabilities,
            the output head and the scores of pairs, is timed apart.
    """

    def __init__(self, model: PreTrainedModel, drafters: Sequence[Any] = ()) -> None:
        self.model = model
        self._target = CallTimer(model)
        self._drafters = [CallTimer(drafter) for drafter in drafters]
        self._heads = [
            CallTimer(drafter, name)
            for drafter in drafters
            for name in ("compute_logits", "pair_scores")
            if hasattr(drafter, name)
        ]

    def run(self, prompt: Any, max_new_tokens: int, **arguments: Any) -> tuple[dict[str, Any], list[list[int]]]:
        """Decodes greedily.

        Returns:
            What it took from the first token on, prefill left out, with the medians of its rounds and of their parts;
            and the sequences. A round lasts from the end of one forward of the target to the end of the next.
        """
        for timer in (self._target, *self._drafters, *self._heads):
            timer.spans.clear()
        start = time.perf_counter()
        out = self.model.generate(
            **prompt, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, **arguments
        )
        end = time.perf_counter()
        new = out.sequences[:, prompt["input_ids"].shape[1] :]
        padding = self.model.generation_config.pad_token_id
        ends = [stop for _, stop in self._target.spans]
        rounds = [self._round(begin, stop) for begin, stop in zip(ends, ends[1:])]
        row = {
            "tokens": new.numel() - int((new == padding).sum() if padding is not None else 0) - len(new),
            "rows": len(new),
            "seconds": round(end - ends[0], 6),
            "prefill_seconds": round(ends[0] - start, 6),
            "rounds": len(rounds),
            "round_ms": {
                part: round(1e3 * statistics.median(of_round[part] for of_round in rounds), 3) for part in rounds[0]
            },
        }
        stats = getattr(out, "ddtree_stats", None)
        if stats is not None:
            row |= {"accepted_lengths": stats.accepted_lengths, "tree_sizes": stats.tree_sizes}
        return row, out.sequences.tolist()

    def _round(self, begin: float, end: float) -> dict[str, float]:
        target, drafter, head = (
            sum(timer.seconds(begin, end) for timer in timers)
            for timers in ([self._target], self._drafters, self._heads)
        )
        return {
            "whole": end - begin,
            "target": target,
            "drafter": drafter,
            "head": head,
            "outside": end - begin - target - drafter - head,
        }


def alternate(
    methods: Sequence[str],
    prompts: Sequence[Any],
    run: Callable[[str, Any], tuple[dict[str, Any], list[list[int]]]],
    title: str,
) -> list[dict[str, Any]]:
    """Runs every method on every prompt, in an order that rotates, and compares the tokens with those of `"plain"`.

    Args:
        methods: Their names.
        prompts: What `run` takes.
        run: Gives a run's figures and its sequences. Those may be shorter than standard decoding's, all alike.
        title: For the progress bar.
    """
    runs = []
    for index, prompt in enumerate(track(prompts, title, console=Console(stderr=True))):
        shift = index % len(methods)
        sequences, of_prompt = {}, []
        for method in (*methods[shift:], *methods[:shift]):
            row, sequences[method] = run(method, prompt)
            of_prompt.append({"prompt": index, "method": method, **row})
        for row in of_prompt:
            found = sequences[row["method"]]
            row["identical"] = found == [plain[: len(mine)] for plain, mine in zip(sequences["plain"], found)]
        runs += of_prompt
    return runs


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By method: all prompts together, quartiles over prompts, and what a typical round is made of.

    `together` is of all prompts' tokens, rounds and seconds added up, so that one figure follows from the others:
    tokens per second, that against standard decoding's, and milliseconds per round. `round_ms` is of medians.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run)
    plain = {run["prompt"]: speed(run) for run in by_method["plain"]}
    plain_together = speed_together(by_method["plain"])
    summary = {}
    for method, of_method in by_method.items():
        lengths = list(chain.from_iterable(map(lengths_of, of_method)))
        sizes = list(chain.from_iterable(run.get("tree_sizes", [0]) for run in of_method))
        summary[method] = {
            "runs": len(of_method),
            "identical": sum(run["identical"] for run in of_method),
            "together": {
                "tokens_per_second": round(speed_together(of_method), 4),
                "against_plain": round(speed_together(of_method) / plain_together, 4),
                "round_ms": round(1e3 * total(of_method, "seconds") / total(of_method, "rounds"), 3),
            },
            "tokens_per_second": rounded_quartiles(map(speed, of_method)),
            "against_plain": rounded_quartiles(speed(run) / plain[run["prompt"]] for run in of_method),
            "tokens_per_forward": round(statistics.mean(lengths), 3),
            "nodes": round(statistics.mean(sizes), 1),
            "round_ms": {
                part: round(statistics.median(run["round_ms"][part] for run in of_method), 3)
                for part in of_method[0]["round_ms"]
            },
        }
    return summary


def lengths_of(run: dict[str, Any]) -> list[float]:
    """Tokens that each round emits a row; where only their sum is known, all the same."""
    return run.get("accepted_lengths") or [run["tokens"] / run["rounds"] / run["rows"]] * run["rounds"]


def speed(run: dict[str, Any]) -> float:
    """Tokens a second, of all rows together, after the first."""
    return run["tokens"] / run["seconds"]


def total(runs: Iterable[dict[str, Any]], name: str) -> float:
    """What several runs have of something."""
    return sum(run[name] for run in runs)


def speed_together(runs: Sequence[dict[str, Any]]) -> float:
    """Tokens a second of several runs, all their tokens over all their seconds."""
    return total(runs, "tokens") / total(runs, "seconds")


def against(runs: list[dict[str, Any]], method: str, other: str) -> list[float]:
    """Quartiles over prompts of one method's speed over another's."""
    of = {(run["method"], run["prompt"]): speed(run) for run in runs}
    return rounded_quartiles(value / of[other, prompt] for (name, prompt), value in of.items() if name == method)


def require_identical(runs: list[dict[str, Any]]) -> None:
    """Ends the script with an error if a run gave other tokens than standard decoding."""
    different = {run["method"] for run in runs if not run["identical"]}
    if different:
        raise SystemExit(f"Some outputs differ from standard decoding's: {', '.join(sorted(different))}.")


def command() -> str:
    """How this script was called, without what changes no figure."""
    arguments = sys.argv[1:]
    for name in NOT_PRINTED:
        while name in arguments:
            place = arguments.index(name)
            del arguments[place : place + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def save(path: Path, summary: dict[str, Any], runs: Sequence[dict[str, Any]], **about: Any) -> None:
    """Writes the file that a page is made from: where the figures are from, what they say, and each run.

    Args:
        path: Where to.
        summary: What they say.
        runs: One a line.
        about: What else there is to know.
    """
    about = {"command": command(), "machine": describe_machine(torch.device("cpu")), **about}
    lines = ",\n".join(map(json.dumps, runs))
    head = f'{{"about": {json.dumps(about, indent=1)},\n"summary": {json.dumps(summary, indent=1)}'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
