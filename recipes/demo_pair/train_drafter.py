"""Step 4: the drafter, DFlash 2 by default, trained on the target's own texts with the target frozen.

Writes `drafter_run/` (checkpoints to go on from, and the log) and `drafter/` (weights rounded to bfloat16, in the
layout of published checkpoints).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import MASK, SEED, TARGET_LAYER_IDS, device, seed_everything
from evaluate import load_held_out
from rich.progress import Progress
from self_text import LENGTH, open_rows
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from hf_ddtree.drafters.zlab.writing import save_drafter
from hf_ddtree.training import Document, DrafterTrainer, Evaluator, Rows, TrainingConfig, new_drafter


class SelfText:
    """Random texts of those that are done so far, with their features; more may be written meanwhile."""

    def __init__(self, work_dir: Path, feature_size: int) -> None:
        self.progress_file = work_dir / "train_rows.json"
        rows = json.loads(self.progress_file.read_text())["rows"]
        self.text, self.features = open_rows(work_dir, "train", rows, feature_size, "r")

    def rows(self, places: Sequence[int]) -> Rows:
        progress = json.loads(self.progress_file.read_text())
        chosen = np.array([np.random.default_rng([SEED, place]).integers(progress["done"]) for place in places])
        first = torch.tensor(progress["prompt_lengths"])[chosen]
        tokens = torch.from_numpy(self.text[chosen].astype("int64"))
        features = torch.from_numpy(self.features[chosen]).float()
        is_counted = torch.arange(LENGTH) >= first[:, None]
        return Rows(tokens, torch.zeros_like(tokens), is_counted, features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--minutes", type=float, default=60.0, help="the learning rate has decayed to zero by then")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--kind", choices=["dflash", "dflash2", "dspark", "jetspec"], default="dflash2")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=12)
    parser.add_argument("--weights", choices=["d_pace", "decay"], default="decay", help="of the slots")
    parser.add_argument("--rows", type=int, default=4, help="texts a step")
    parser.add_argument("--anchors", type=int, default=40, help="blocks a text")
    args = parser.parse_args()

    seed_everything(1)
    target = Qwen3_5ForCausalLM.from_pretrained(args.work_dir / "target", dtype=torch.float32).to(device()).eval()
    mask = AutoTokenizer.from_pretrained(args.work_dir / "target").convert_tokens_to_ids(MASK)
    drafter = new_drafter(
        target,
        mask,
        args.kind,
        layers=args.layers,
        block_size=args.block_size,
        # Where it sees more than the texts that it learns from are long, a drafter is right less often.
        window=LENGTH,
        target_layer_ids=TARGET_LAYER_IDS,
        intermediate_size=512,
        num_attention_heads=3,
        num_key_value_heads=3,
    )
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters on {device()}")
    feature_size = len(TARGET_LAYER_IDS) * target.config.hidden_size
    tokens, features, prompt_lengths = load_held_out(args.work_dir, feature_size, rows=8)
    held_out = [Document.answer(text.tolist(), first) for text, first in zip(tokens, prompt_lengths, strict=True)]
    config = TrainingConfig(
        steps=None,
        minutes=args.minutes,
        rows=args.rows,
        anchors=args.anchors,
        learning_rate=args.lr,
        weights=args.weights,
        position_decay=3.0,
        tree_budgets=(16, 64),
    )
    with Progress() as bar:
        task = bar.add_task("drafter", total=1.0)

        def show(entry: dict) -> None:
            if "loss" in entry:
                text = f"drafter, step {entry['step']}, loss {entry['loss']:.3f}"
                bar.update(task, completed=trainer.progress, description=text)

        trainer = DrafterTrainer(
            target,
            drafter,
            SelfText(args.work_dir, feature_size),
            config,
            evaluator=Evaluator(target, held_out, config.tree_budgets, LENGTH, list(features)),
            output_dir=args.work_dir / "drafter_run",
            on_log=show,
        )
        evaluation = trainer.train()
    save_drafter(drafter, args.work_dir / "drafter")
    print(json.dumps(evaluation.to_dict()))


if __name__ == "__main__":
    main()
