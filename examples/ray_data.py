"""Completes the prompts of a JSONL file on Ray Data: a pool of actors, each a target with its drafter.

    pip install 'ray[data]'
    python examples/ray_data.py prompts.jsonl completions --actors 2

Every line of the input has its prompt under `prompt`. Each batch of lines becomes a file in the folder `completions`:
the number of each line and its `completion`, or the `error` of a line that cannot be completed, which stops no other.
A run that was interrupted goes on where it stopped. Needs Ray: pip install 'ray[data]'
"""

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.demo import demo_folders

try:
    import ray
except ModuleNotFoundError as error:
    raise SystemExit("This example needs Ray: pip install 'ray[data]'") from error


class Completer:
    """An actor: it loads target and drafter once, and completes batches."""

    def __init__(self, target: str, drafter: str, folder: str, max_new_tokens: int) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype="auto", device_map="auto")
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        hf_ddtree.attach(self._model, drafter)
        self._folder, self._max_new_tokens = Path(folder), max_new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = [self._complete(int(number), line) for number, line in zip(batch["line"], batch["text"])]
        # Whole or not at all: a file that is there is complete.
        path = self._folder / f"{uuid.uuid4().hex}.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in done), encoding="utf-8")
        partial.rename(path)
        return {"line": batch["line"], "failed": ["error" in entry for entry in done]}

    def _complete(self, number: int, line: str) -> dict[str, Any]:
        try:
            inputs = self._tokenizer(json.loads(line)["prompt"], return_tensors="pt").to(self._model.device)
            output = self._model.generate(**inputs, max_new_tokens=self._max_new_tokens, do_sample=False)
            new_tokens = output[0, inputs.input_ids.shape[1] :]
            return {"line": number, "completion": self._tokenizer.decode(new_tokens, skip_special_tokens=True)}
        except Exception as error:
            return {"line": number, "error": f"{type(error).__name__}: {error}"}


def main(
    prompts: Path,
    completions: Path,
    target: Annotated[str | None, typer.Option(help="Folder or hub id; that of the demo by default.")] = None,
    drafter: Annotated[str, typer.Option(help="Folder, hub id, `mtp` or `lookup`.")] = "lookup",
    actors: int = 2,
    batch_size: int = 8,
    max_new_tokens: int = 128,
    gpus_per_actor: float = 0,
) -> None:
    if target is None:
        target, drafter = demo_folders()
    completions.mkdir(exist_ok=True)
    done = {json.loads(line)["line"] for part in completions.glob("*.jsonl") for line in part.read_text().splitlines()}
    lines = prompts.read_text(encoding="utf-8").splitlines()
    left = [{"line": number, "text": line} for number, line in enumerate(lines) if number not in done]
    if left:
        made = ray.data.from_items(left, override_num_blocks=len(left)).map_batches(
            Completer,
            fn_constructor_args=(target, drafter, str(completions.resolve()), max_new_tokens),
            compute=ray.data.ActorPoolStrategy(size=actors),
            batch_size=batch_size,
            num_gpus=gpus_per_actor,
        )
        failed = sum(entry["failed"] for entry in made.iter_rows())
    else:
        failed = 0
    print(f"{len(left)} of {len(lines)} lines were left, {failed} of them could not be completed.")


if __name__ == "__main__":
    typer.run(main)
