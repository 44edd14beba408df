"""Prompts to measure on: from files, or from datasets of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..validation import reason_of, shortened


class Dataset(NamedTuple):
    """A dataset of the Hub.

    Attributes:
        path: Its repository, or the name of a loader.
        config: Name of a configuration, or None.
        split: Which part of it.
        column: Where the prompts are: texts, or lists of turns, of which the first is taken.
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
# Wrong lines that an error shows.
MOST_SHOWN = 5


def load_prompts(source: str, limit: int | None = None) -> list[str]:
    """The first prompts of a dataset or a file.

    Args:
        source: A name in `DATASETS`, which needs a network and the package `datasets`; a JSONL file with an object per
            line, whose prompt is under `prompt`, `text`, `question` or `turns`; or a text file with a prompt per line.
        limit: Most prompts to take; all if None.

    Raises:
        ValueError: If there is no such dataset or file, it holds no prompt, or a line holds none that can be used. The
            message names each such line.
        ImportError: If `datasets` is not installed.
    """
    if source in DATASETS:
        taken = list(islice(_from_hub(DATASETS[source]), limit))
    elif Path(source).is_file():
        taken = _from_file(Path(source), limit)
    else:
        raise ValueError(
            f"`prompts` is {source!r}, which is no file. Give a JSONL or text file, or one of {', '.join(DATASETS)}."
        )
    if not taken:
        raise ValueError(f"{source!r} holds no prompts.")
    return taken


def _from_hub(dataset: Dataset) -> Iterable[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "Datasets of the Hub need the package `datasets`: pip install datasets. Or give a file of prompts."
        ) from error
    files = {} if dataset.data_files is None else {"data_files": dataset.data_files}
    entries = load_dataset(dataset.path, dataset.config, split=dataset.split, streaming=True, **files)
    return (_text_of(dataset.column, entry[dataset.column]) for entry in entries)


def _from_file(path: Path, limit: int | None) -> list[str]:
    """The prompts in the first lines that are not blank."""
    lines = ((number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip())
    prompts, wrong = [], []
    for number, line in islice(lines, limit):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
            prompts.append(prompt_of(json.loads(text)) if path.suffix == ".jsonl" else text)
        except ValueError as error:
            wrong.append(f"{path}, line {number}: {reason_of(error)}")
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more lines."] if len(wrong) > MOST_SHOWN else []
        raise ValueError("\n".join([*wrong[:MOST_SHOWN], *more]))
    return prompts


def prompt_of(entry: Any) -> str:
    """The prompt of an object in a JSONL file: under the first of `prompt`, `text`, `question`, `turns` that it has.

    Raises:
        ValueError: If it has none of these, or no text there.
    """
    names = ", ".join(map(repr, COLUMNS))
    if not isinstance(entry, dict):
        raise ValueError(f"{shortened(entry)} is no object with one of {names}.")
    column = next((column for column in COLUMNS if column in entry), None)
    if column is None:
        raise ValueError(f"the object has none of {names}, but {', '.join(map(repr, entry)) or 'nothing'}.")
    return _text_of(column, entry[column])


def _text_of(column: str, prompt: Any) -> str:
    """The prompt itself, or the first of several turns."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    if not isinstance(first, str):
        raise ValueError(f"{column!r} must be a text, or a list that begins with one, but is {shortened(prompt)}.")
    if not first.strip():
        raise ValueError(f"{column!r} is empty.")
    return first
