"""Prompts to measure on: files, or datasets of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple


class Dataset(NamedTuple):
    """A dataset of the Hub.

    Attributes:
        path: Its repository, or the name of a loader.
        config: Name of a configuration, or None.
        split: Which part of it.
        column: Where the prompts are: texts, or lists of turns whose first one is taken.
        data_files: Files to load, where the repository has a loading script.
    """

    path: str
    config: str | None
    split: str
    column: str
    data_files: str | None = None


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "main", "test", "question"),
    "math500": Dataset("HuggingFaceH4/MATH-500", None, "test", "problem"),
    "aime": Dataset("HuggingFaceH4/aime_2024", None, "train", "problem"),
    "humaneval": Dataset("openai/openai_humaneval", None, "test", "prompt"),
    "mbpp": Dataset("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "livecodebench": Dataset(
        "json", None, "train", "question_content", "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
    ),
    "swe-bench": Dataset("princeton-nlp/SWE-bench_Lite", None, "test", "problem_statement"),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "alpaca": Dataset("tatsu-lab/alpaca", None, "train", "instruction"),
}
COLUMNS = ("prompt", "text", "question", "turns")


def load_prompts(source: str, limit: int) -> list[str]:
    """The first prompts of a dataset or a file.

    Args:
        source: A name in `DATASETS`, which needs a network and the package `datasets`; a JSONL file with an object a
            line, whose prompt is under `prompt`, `text`, `question` or `turns`; or a text file with a prompt a line.
        limit: Most prompts to take.

    Raises:
        ValueError: If there is no such dataset or file, or it holds no prompt.
        ImportError: If `datasets` is not installed.
    """
    if source in DATASETS:
        prompts = _from_hub(DATASETS[source])
    elif Path(source).is_file():
        prompts = _from_file(Path(source))
    else:
        raise ValueError(
            f"`prompts` is {source!r}, which is no file. Give a JSONL or text file, or one of {', '.join(DATASETS)}."
        )
    taken = list(islice(prompts, limit))
    if not taken:
        raise ValueError(f"{source!r} holds no prompts.")
    return taken


def _from_hub(dataset: Dataset) -> Iterable[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("Datasets of the Hub need the package `datasets`: pip install datasets.") from error
    files = {} if dataset.data_files is None else {"data_files": dataset.data_files}
    entries = load_dataset(dataset.path, dataset.config, split=dataset.split, streaming=True, **files)
    return (_first_turn(entry[dataset.column]) for entry in entries)


def _from_file(path: Path) -> Iterable[str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        yield from lines
        return
    for number, line in enumerate(lines, start=1):
        try:
            yield prompt_of(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"Line {number} of {str(path)!r} is no JSON object with one of {', '.join(map(repr, COLUMNS))}."
            ) from error


def prompt_of(entry: dict[str, Any]) -> str:
    """The prompt of an object in a JSONL file: under the first of `prompt`, `text`, `question`, `turns` that it has.

    Raises:
        ValueError: If it has none of these.
    """
    column = next((column for column in COLUMNS if isinstance(entry, dict) and column in entry), None)
    if column is None:
        raise ValueError(f"An entry has none of {', '.join(map(repr, COLUMNS))}: {entry!r}.")
    return _first_turn(entry[column])


def _first_turn(prompt: Any) -> str:
    return str(prompt[0] if isinstance(prompt, list | tuple) else prompt)
