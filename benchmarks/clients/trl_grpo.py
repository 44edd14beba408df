"""TRL: a few steps of GRPO. Rollouts are greedy, so that the two runs can be compared; rewards differ by place."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, prompts, output = sys.argv[1:]
rollouts = []


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    rollouts.extend(completion_ids)
    return [float(sum(ids) % 7 + place) for place, ids in enumerate(completion_ids)]


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.found += [round(logs[name], 5) for name in ("loss", "grad_norm", "entropy") if name in logs]


losses = Losses()
with tempfile.TemporaryDirectory() as folder:
    settings = GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=32,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        generation_kwargs={"do_sample": False},
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_dict({"prompt": json.loads(Path(prompts).read_text())})
    GRPOTrainer(model, reward, args=settings, train_dataset=data, callbacks=[losses]).train()
Path(output).write_text(json.dumps({"rollouts": rollouts, "losses": losses.found}))
