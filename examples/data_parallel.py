"""Completes the prompts of a JSONL file, each process its share of them.

    accelerate launch --num_processes 2 examples/data_parallel.py prompts.jsonl completions.jsonl
    torchrun --nproc-per-node 2 examples/data_parallel.py prompts.jsonl completions.jsonl  # on a CPU as well

Every line of the input has its prompt under `prompt`, `text`, `question` or `turns`; the output has the same lines in
the same order, and a `completion` in each. A run that was interrupted goes on where it stopped, with any number of
processes. Needs Accelerate: pip install accelerate
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.benchmark import load_prompts

try:
    from accelerate import PartialState
    from accelerate.utils import gather_object
except ModuleNotFoundError as error:
    raise SystemExit("This example needs Accelerate: pip install accelerate") from error

logging.set_verbosity_error()
logging.disable_progress_bar()


def main(
    prompts: Path,
    completions: Path,
    target: Annotated[str | None, typer.Option(help="Folder or hub id; the pair that ships by default.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Its drafter; prompt lookup by default.")] = None,
    max_new_tokens: int = 128,
) -> None:
    try:
        texts = load_prompts(str(prompts))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    state = PartialState(cpu=not torch.cuda.is_available())
    if target is None:
        model, draft_model, tokenizer = hf_ddtree.load_demo()
        model, draft_model = model.to(state.device), draft_model.to(state.device)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto", device_map={"": state.device})
        tokenizer = AutoTokenizer.from_pretrained(target)
        draft_model = None if drafter is None else hf_ddtree.load_drafter(drafter, target_model=model)
    drafting = {"tree_lookup": True} if draft_model is None else {"assistant_model": draft_model}

    parts = sorted(completions.parent.glob(f"{completions.name}.part*"))
    done = {json.loads(line)["line"] for part in parts for line in part.read_text().splitlines()}
    left = [number for number in range(len(lines)) if number not in done]
    state.wait_for_everyone()  # nobody writes before all have read what is done
    own_part = completions.with_name(f"{completions.name}.part{state.process_index}")
    lengths: list[int] = []
    with own_part.open("a") as file:
        for number in left[state.process_index :: state.num_processes]:
            inputs = tokenizer(texts[number], return_tensors="pt").to(state.device)
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                generation_strategy="ddtree",
                **drafting,
                return_dict_in_generate=True,
            )
            new_tokens = output.sequences[0, inputs.input_ids.shape[1] :]
            completion = tokenizer.decode(new_tokens, skip_special_tokens=True)
            file.write(json.dumps({"line": number, "completion": completion}) + "\n")
            file.flush()
            lengths += output.ddtree_stats.accepted_lengths

    lengths = gather_object(lengths)  # waits for everyone
    if state.is_main_process:
        parts = sorted(completions.parent.glob(f"{completions.name}.part*"))
        finished = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        for entry in finished:
            lines[entry["line"]]["completion"] = entry["completion"]
        completions.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for part in parts:
            part.unlink()
        taken_by = "1 process" if state.num_processes == 1 else f"{state.num_processes} processes"
        print(f"{len(left)} of {len(lines)} prompts were left, {taken_by} took them.")
        if lengths:
            print(f"{sum(lengths) / len(lengths):.2f} tokens per forward of the target")
    state.wait_for_everyone()  # a process that leaves while others still communicate can be aborted
    state.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
