"""The runs of a benchmark: every method on every batch of prompts, in an order that rotates."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .machine import describe_machine
from .methods import Method
from .report import Report
from .run_log import RunLog

WARM_UP_TOKENS = 8


def benchmark(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    methods: Sequence[Method],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 1,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    output_dir: str | os.PathLike[str] | None = None,
    on_run: Callable[[int, int], None] | None = None,
    **generate_kwargs: Any,
) -> Report:
    """Runs every method on every batch of prompts and compares tokens with standard decoding's.

    Not compared are several rows that sample, as independent rows draw in another order, and Transformers' own
    assisted decoding where it samples: there the distributions are the same, but not the tokens of a seed.

    For each batch the methods run one after the other, in an order that rotates from batch to batch. A method that
    refuses a batch is reported with its reason. Started under `torchrun` or `accelerate launch`, each process takes
    its share of the batches; with a common `output_dir` the last one to end reports on all.

    Args:
        model: The target.
        tokenizer: Its tokenizer; its chat template is applied if it has one.
        prompts: Texts; or tokens, which are taken as they are.
        methods: From `make_methods`; the first is standard decoding.
        max_new_tokens: Tokens to generate for each prompt.
        batch_size: Prompts that are decoded together, padded at the left.
        temperatures: 0 for greedy decoding; others sample, each batch from the same seed.
        seed: Seed of the first batch.
        output_dir: Where to write every run as it ends, and the report. Runs found there are not repeated.
        on_run: Called before the first run and after each, with the number of finished runs and of all.
        generate_kwargs: Go to every call of `generate()`.

    Raises:
        ValueError: If `output_dir` holds runs of a benchmark with other settings, a number is out of range, or there
            is no prompt or an empty one.
    """
    for name, number in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {number}.")
    if min(temperatures, default=-1.0) < 0:
        raise ValueError(f"`temperatures` must hold numbers of at least 0, but is {list(temperatures)}.")
    if not prompts:
        raise ValueError("`prompts` is empty. Give at least one text.")
    if empty := [index for index, one in enumerate(prompts) if not (one.strip() if isinstance(one, str) else one)]:
        raise ValueError(f"`prompts` has empty texts at {empty}. Leave them out.")
    batches = [_encode(tokenizer, prompts[at : at + batch_size]) for at in range(0, len(prompts), batch_size)]
    settings = {
        **_settings_of(model, methods, prompts),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "temperatures": list(temperatures),
        "seed": seed,
    }
    rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    log = RunLog(output_dir, settings, rank)
    plain = methods[0].name
    done = {(run["temperature"], run["batch"], run["method"]) for run in log.runs(plain)}
    planned = [
        (temperature, index, method)
        for temperature in temperatures
        for index in range(rank, len(batches), num_processes)
        for method in _in_turn(methods, index)
    ]
    left = [run for run in planned if (run[0], run[1], run[2].name) not in done]
    if on_run is not None:
        on_run(len(planned) - len(left), len(planned))
    for method in methods:
        first = next((index for _, index, other in left if other is method), None)
        if first is not None:
            _warm_up(model, batches[first], method, generate_kwargs)
    for number, (temperature, index, method) in enumerate(left, start=1):
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        torch.manual_seed(seed + index)
        # Whatever strategy the model's own configuration asks for.
        call = {"generation_strategy": None, "max_new_tokens": max_new_tokens, **sampling}
        run = _run(model, tokenizer, batches[index], {**call, **generate_kwargs, **method.arguments})
        if temperature and (len(batches[index]["input_ids"]) > 1 or not method.keeps_draws):
            run["tokens_of_rows"] = None
        log.add({"temperature": temperature, "batch": index, "method": method.name, **run})
        if on_run is not None:
            on_run(len(planned) - len(left) + number, len(planned))
    report = Report({"settings": settings, "machine": describe_machine(model.device)}, log.runs(plain))
    if output_dir is not None and len(report.runs) == len(batches) * len(temperatures) * len(methods):
        report.save(Path(output_dir) / "report.json")
    return report


def _settings_of(
    model: PreTrainedModel, methods: Sequence[Method], prompts: Sequence[str] | Sequence[Sequence[int]]
) -> dict[str, Any]:
    drafters = [method.arguments["assistant_model"] for method in methods if "assistant_model" in method.arguments]
    return {
        "model": _name(model),
        "drafters": sorted(set(map(_name, drafters))),
        "dtype": str(model.dtype),
        "methods": [method.name for method in methods],
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16],
    }


def _in_turn(methods: Sequence[Method], index: int) -> list[Method]:
    """The methods in an order that rotates from batch to batch."""
    shift = index % len(methods)
    return [*methods[shift:], *methods[:shift]]


def _name(model: PreTrainedModel) -> str:
    return model.config.name_or_path or type(model).__name__


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Sequence[int]]) -> Any:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        return tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    if getattr(tokenizer, "chat_template", None):
        texts = [
            str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            )
            for text in texts
        ]
    return tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1, padding_side="left")


def _warm_up(model: PreTrainedModel, batch: Any, method: Method, generate_kwargs: dict[str, Any]) -> None:
    arguments = {"generation_strategy": None, **generate_kwargs, **method.arguments}
    arguments |= {"max_new_tokens": WARM_UP_TOKENS, "do_sample": False}
    try:
        model.generate(**batch.to(model.device), **arguments)
    except ValueError:
        pass  # the run will say why


def _run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Any, call: dict[str, Any]
) -> dict[str, Any]:
    """One call: its times, its tokens, and what `ddtree_stats` say of it."""
    batch = batch.to(model.device)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    start = time.perf_counter()
    try:
        out = model.generate(**batch, **call, return_dict_in_generate=True)
    except ValueError as error:
        return {"refused": str(error), "tokens_of_rows": None}
    if on_gpu:
        torch.cuda.synchronize(model.device)
    end = time.perf_counter()
    new = out.sequences[:, batch["input_ids"].shape[1] :]
    padding = new == tokenizer.pad_token_id if tokenizer.pad_token_id is not None else torch.zeros_like(new)
    run = {
        "seconds": end - start,
        "tokens": int((~padding.bool()).sum()),
        "rows": len(new),
        "tokens_of_rows": new.tolist(),
    }
    if on_gpu:
        run["peak_memory"] = torch.cuda.max_memory_allocated(model.device)
    stats = getattr(out, "ddtree_stats", None)
    if stats is not None:
        run |= {
            "target_forwards": stats.target_forwards,
            "draft_forwards": stats.draft_forwards,
            "accepted_lengths": stats.accepted_lengths,
            "tree_sizes": stats.tree_sizes,
            "stage_seconds": stats.stage_seconds,
        }
    return run
