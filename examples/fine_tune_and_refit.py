"""A fine-tune for which the old drafter is weak, and the drafter trained on for it.

    pip install 'hf-ddtree[train]'
    python examples/fine_tune_and_refit.py build/refit

The target that ships completes Python code. Here it is trained on English, the texts that Python's `help()` shows, so
that its drafter expects other words than it says. Then `hf-ddtree train --from` trains the drafter on what the
fine-tune says. The tokens per forward that are printed are of texts that neither has learnt. Under 20 minutes on two
cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.demo import demo_folders, varied_prompts

logging.set_verbosity_error()
logging.disable_progress_bar()

TREE_NODES = 16
PROMPT_CHARACTERS = 160
# One of so many texts is kept to measure on.
HELD_OUT_EVERY = 8


def split_topics() -> tuple[list[str], list[str]]:
    """Texts to learn from, and texts to measure on."""
    texts = [topics[name] for name in sorted(topics)]
    learnt = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    return learnt, texts[::HELD_OUT_EVERY]


def prompts_of(texts: list[str], count: int) -> list[str]:
    """Beginnings of paragraphs, cut between words, evenly spaced over all texts."""
    paragraphs = [part for text in texts for part in text.split("\n\n") if len(part) > PROMPT_CHARACTERS]
    chosen = paragraphs[:: max(1, len(paragraphs) // count)][:count]
    return [part[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for part in chosen]


def fine_tune(
    model: PreTrainedModel, token_ids: torch.Tensor, minutes: float, rows: int = 8, length: int = 256
) -> float:
    """Trains all weights for some minutes.

    Args:
        model: The model.
        token_ids: `(tokens,)`, all texts one after the other.
        minutes: How long. The learning rate falls to zero meanwhile.
        rows, length: Of a step.

    Returns:
        The loss of the last step, in nats per token.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    started, share, loss = time.perf_counter(), 0.0, torch.zeros(())
    model.train()
    while share < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - share)
        starts = torch.randint(len(token_ids) - length, (rows,), generator=generator)
        batch = token_ids[starts[:, None] + torch.arange(length)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        share = (time.perf_counter() - started) / (60 * minutes)
    model.eval()
    return float(loss.detach())


def tokens_per_forward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    new_tokens: int,
    drafter: PreTrainedModel | None,
) -> float:
    """Tokens that a forward of the target emits, over all prompts; by lookup without a drafter."""
    drafting = {"tree_lookup": True} if drafter is None else {"assistant_model": drafter, "calibrate": False}
    lengths: list[int] = []
    for prompt in prompts:
        output = model.generate(
            **tokenizer(prompt, return_tensors="pt"),
            max_new_tokens=new_tokens,
            do_sample=False,
            generation_strategy="ddtree",
            tree_budget=TREE_NODES,
            return_dict_in_generate=True,
            **drafting,
        )
        lengths += output.ddtree_stats.accepted_lengths
    return sum(lengths) / max(1, len(lengths))


def main(
    folder: Annotated[
        Path, typer.Argument(help="For the fine-tune, its prompts and the new drafter; must not exist.")
    ],
    tune_minutes: Annotated[float, typer.Option(help="Of fine-tuning the target.")] = 3.0,
    train_minutes: Annotated[float, typer.Option(help="Of training the drafter on.")] = 10.0,
    prompts: Annotated[int, typer.Option(help="That the fine-tune answers for its drafter.")] = 384,
    held_out: Annotated[int, typer.Option(help="Prompts to measure on.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 192,
) -> None:
    folder.mkdir(parents=True)
    target_folder, drafter_folder = demo_folders()
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    old = hf_ddtree.load_drafter(drafter_folder, target_model=model)
    learnt, kept = split_topics()
    code = [entry["prompt"] for entry in varied_prompts()[:held_out]]
    english = prompts_of(kept, held_out)

    original = tokens_per_forward(model, tokenizer, code, new_tokens, old)
    print(f"the target that ships, its drafter, Python:   {original:.2f} tokens per forward", flush=True)

    token_ids = torch.tensor(tokenizer("\n\n".join(learnt)).input_ids)
    loss = fine_tune(model, token_ids, tune_minutes)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    print(f"fine-tuned for {tune_minutes:g} minutes, to {loss:.2f} nats per token", flush=True)
    fallen = tokens_per_forward(model, tokenizer, english, new_tokens, old)
    by_lookup = tokens_per_forward(model, tokenizer, english, new_tokens, None)
    print(f"the fine-tune, the old drafter, English:      {fallen:.2f}, {fallen / original:.0%} of the original")
    print(f"the fine-tune, lookup alone, English:         {by_lookup:.2f}", flush=True)

    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts_of(learnt, prompts)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "hf_ddtree", "train", folder / "target", "--dtype", "float32"]
    command += ["--prompts", folder / "prompts.jsonl", "--from", drafter_folder, "--output", folder / "run"]
    command += ["--minutes", train_minutes, "--max-new-tokens", new_tokens, "--batch-size", 32, "--held-out", 2]
    command += ["--rows", 8, "--length", 512, "--anchors", 32, "--learning-rate", 1e-3]
    subprocess.run(list(map(str, command)), check=True)

    new = hf_ddtree.load_drafter(folder / "run" / "drafter", target_model=model)
    regained = tokens_per_forward(model, tokenizer, english, new_tokens, new)
    print(f"the fine-tune, the drafter trained on:        {regained:.2f}, {regained / original:.0%} of the original")


if __name__ == "__main__":
    typer.run(main)
