"""A training run of a few steps on a tiny pair, for tests of what interrupts it and of several processes.

Started with a folder, a number of rows and the step at which it kills itself, 0 for never.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_ddtree.training import Document, DrafterTrainer, PackedDocuments, TrainingConfig, new_drafter

from .families import VOCAB_SIZE, make_model

STEPS = 6


def make_documents(count: int = 12, seed: int = 0) -> list[Document]:
    """Texts that count up from a random token, of 9 to 40 tokens, the first 3 of which do not count."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        start, length = draw.randrange(VOCAB_SIZE), draw.randint(9, 40)
        texts.append(Document.answer([(start + 3 * place) % (VOCAB_SIZE - 1) for place in range(length)], 3))
    return texts


def make_trainer(folder: Path | None, kind: str = "dflash2", on_log: Any = None, **settings: Any) -> DrafterTrainer:
    """A trainer that is the same each time."""
    target = make_model("qwen3_5", "sdpa")
    torch.manual_seed(0)
    sizes = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 8} if kind == "dflash2" else {}
    drafter = new_drafter(target, VOCAB_SIZE - 1, kind, layers=2, block_size=4, window=20, **sizes)
    config = TrainingConfig(**{"steps": STEPS, "rows": 2, "anchors": 8, "log_every": 1, **settings})
    rows = PackedDocuments(make_documents(), 48)
    accelerator = Accelerator(cpu=True)
    return DrafterTrainer(target, drafter, rows, config, output_dir=folder, accelerator=accelerator, on_log=on_log)


def main() -> None:
    folder, rows, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def on_log(entry: dict[str, Any]) -> None:
        if entry["step"] == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(folder, rows=rows, on_log=on_log, checkpoint_every=2)
    trainer.train()
    print(json.dumps(trainer.step))


if __name__ == "__main__":
    main()
