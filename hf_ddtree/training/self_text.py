"""The target writes the texts that its drafter learns from, by tree decoding."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..candidate_generators.base import end_tokens_of
from ..validation import require_positive_int
from .documents import Document


@dataclass(frozen=True)
class WritingProgress:
    """How far the writing is.

    Attributes:
        done, total: Prompts of this process.
        tokens_per_second: Of new tokens, since it was started.
        seconds_left: At that rate; None before anything is known.
    """

    done: int
    total: int
    tokens_per_second: float
    seconds_left: float | None


def write_answers(
    target_model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: str | Path,
    *,
    drafter: PreTrainedModel | None = None,
    max_new_tokens: int = 512,
    sampled_share: float = 0.25,
    temperature: float = 1.0,
    batch_size: int = 8,
    seed: int = 0,
    on_progress: Callable[[WritingProgress], None] | None = None,
) -> list[Document]:
    """Lets the target answer prompts, and keeps the answers on disk.

    Killed at any time, the same call goes on where it was: a batch of prompts gets the same answer whenever it is
    decoded. Under `torchrun` or `accelerate launch` each process takes its share of the batches; each returns what all
    have written so far, so wait for all before the texts are used.

    Args:
        target_model: The target.
        prompts: As tokens.
        folder: Where the answers are written, in JSONL files, one per process.
        drafter: Drafts for the target. None drafts from what the texts repeat and from what the target said before.
        max_new_tokens: Most tokens of an answer.
        sampled_share: From 0 to 1; this share of the batches is sampled, the others are decoded greedily.
        temperature: Of what is sampled.
        batch_size: Prompts that are decoded together.
        seed: Of what is sampled.
        on_progress: Called after each batch.

    Returns:
        The prompts with their answers, which alone count, in the order of the prompts.

    Raises:
        ValueError: If a setting is out of range, a prompt is empty, or `folder` holds answers to other prompts or with
            other settings.
    """
    require_positive_int("max_new_tokens", max_new_tokens)
    require_positive_int("batch_size", batch_size)
    if not 0 <= sampled_share <= 1:
        raise ValueError(f"`sampled_share` must be between 0 and 1, but is {sampled_share}.")
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0, but is {temperature}. Greedy is `sampled_share=0`.")
    if empty := [number for number, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise ValueError(f"`prompts` has prompts without a token, at {empty[:5]}. Leave them out.")
    rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    digest = hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in prompts]).encode()).hexdigest()[:16]
    settings = {
        "target": target_model.config.name_or_path,
        "prompts": digest,
        "max_new_tokens": max_new_tokens,
        "sampled_share": sampled_share,
        "temperature": temperature,
        "batch_size": batch_size,
        "seed": seed,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    answers = _read_answers(path, settings)
    starts = range(rank * batch_size, len(prompts), num_processes * batch_size)
    batches = [range(start, min(start + batch_size, len(prompts))) for start in starts]
    total = sum(map(len, batches))
    left = [batch for batch in batches if not all(number in answers for number in batch)]
    started, new_tokens, done = time.perf_counter(), 0, total - sum(map(len, left))
    first_done = done
    with _open_for_appending(path / f"answers-{rank}.jsonl", settings) as file:
        for batch in left:
            at = batch.start // batch_size
            is_sampled = int((at + 1) * sampled_share) > int(at * sampled_share)
            options = {"do_sample": True, "temperature": temperature} if is_sampled else {"do_sample": False}
            rows = _generate(
                target_model, [prompts[number] for number in batch], drafter, max_new_tokens, seed + at, options
            )
            for number, answer in zip(batch, rows):
                answers[number] = answer
                file.write(json.dumps({"prompt": number, "sampled": is_sampled, "answer": answer}) + "\n")
                new_tokens += len(answer)
            file.flush()
            done += len(batch)
            if on_progress is not None:
                seconds = time.perf_counter() - started
                left_over = seconds / (done - first_done) * (total - done)
                on_progress(WritingProgress(done, total, new_tokens / seconds, left_over))
    return [Document.answer([*prompts[number], *answers[number]], len(prompts[number])) for number in sorted(answers)]


def _generate(
    target_model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    drafter: PreTrainedModel | None,
    max_new_tokens: int,
    seed: int,
    options: dict[str, Any],
) -> list[list[int]]:
    """The answers, each up to its end token."""
    longest = max(map(len, prompts))
    ends = end_tokens_of(target_model)
    padding = target_model.generation_config.pad_token_id
    padding = next(iter(ends), 0) if padding is None else padding
    token_ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    if options["do_sample"]:
        options = {**options, "top_k": 0, "top_p": 1.0}
    drafting = {"tree_lookup": True} if drafter is None else {"assistant_model": drafter}
    device = target_model.device
    kept = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**kept):
        torch.manual_seed(seed)
        sequences = target_model.generate(
            token_ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
            generation_strategy="ddtree",
            **options,
            **drafting,
        )
    answers = []
    for row in sequences[:, longest:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


def _read_answers(folder: Path, settings: dict[str, Any]) -> dict[int, list[int]]:
    """The answers of all processes, by prompt."""
    answers = {}
    for path in sorted(folder.glob("answers-*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines):
            if not line.endswith("\n"):
                continue  # was cut off
            entry = json.loads(line)
            if number > 0:
                answers[entry["prompt"]] = entry["answer"]
            elif entry != settings:
                differing = sorted(name for name in settings if entry.get(name) != settings[name])
                names = " and ".join(f"`{name}`" for name in differing)
                raise ValueError(
                    f"`folder` {str(folder)!r} holds answers with other {names}. Choose another folder, or go on with "
                    "the same."
                )
    return answers


def _open_for_appending(path: Path, settings: dict[str, Any]) -> Any:
    """The file, without a last line that was cut off."""
    if path.exists():
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
    if not path.exists() or path.stat().st_size == 0:
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return path.open("a", encoding="utf-8")
