"""Orders the prompts that ship by how varied standard decoding's continuation of them is.

    python scripts/choose_demo_prompts.py

Of the prompts with a continuation long enough to tell, the most varied one of each module, for `MOST_VARIED` in
`hf_ddtree/demo.py`. A continuation is varied where the share of distinct 6-grams of its tokens is large. Greedy,
float32, up to the end of the function. Takes about five minutes.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.benchmark import distinct_share
from hf_ddtree.demo import END_OF_FUNCTION, demo_prompts

MOST_TOKENS, LEAST_TOKENS = 128, 64


def main(count: Annotated[int, typer.Option(help="How many to choose.")] = 10) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, _, tokenizer = hf_ddtree.load_demo()
    best: dict[str, tuple[float, int, int]] = {}
    for index, entry in enumerate(track(demo_prompts(), "prompts", console=Console(stderr=True))):
        inputs = tokenizer(entry["prompt"], return_tensors="pt")
        out = model.generate(
            **inputs,
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            stop_strings=list(END_OF_FUNCTION),
            tokenizer=tokenizer,
        )
        token_ids = out[0, inputs.input_ids.shape[1] :].tolist()
        if len(token_ids) >= LEAST_TOKENS:
            found = (round(distinct_share(token_ids), 3), len(token_ids), -index)
            best[entry["module"]] = max(found, best.get(entry["module"], found))
    chosen = sorted(((*found, module) for module, found in best.items()), reverse=True)[:count]
    for share, length, index, module in chosen:
        print(f"{-index:3}  {share:.3f} of the 6-grams are distinct, {length} tokens, {module}")
    print(f"MOST_VARIED = {tuple(-index for _, _, index, _ in chosen)}")


if __name__ == "__main__":
    typer.run(main)
