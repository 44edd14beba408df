"""GRPO with rollouts by tree, and a drafter that is trained on them as the policy changes.

    pip install trl '.[train]'
    python examples/rollouts.py --steps 24

The policy is the target that ships, or one of yours, and learns to write short lines: replace `reward` by your own.
Rollouts are samples of the policy as it is, so the log-probabilities that TRL computes for them are right. Every
`--refresh-every` steps the drafter goes on learning from the latest rollouts. Needs TRL: pip install trl
"""

import tempfile
from collections import deque
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.demo import demo_folders, demo_prompts
from hf_ddtree.training import Document, DrafterTrainer, PackedDocuments, TrainingConfig

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit("This example needs TRL: pip install trl") from error

logging.set_verbosity_error()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Higher, the shorter the longest line."""
    return [-float(max(map(len, text.split("\n")))) for text in completions]


class RefreshDrafter(TrainerCallback):
    """Trains a drafter on the latest rollouts, every so many steps of the policy.

    Args:
        drafter: In float32.
        every: Steps of the policy from one refreshment to the next; 0 for none.
        length: Tokens of a row that the drafter learns from, prompt included.
        steps: Steps of the drafter per refreshment.
    """

    def __init__(self, drafter: PreTrainedModel, every: int, length: int, steps: int = 20) -> None:
        self.drafter, self.every = drafter, every
        self.rollouts: deque[Document] = deque(maxlen=256)
        self._length, self._steps = length, steps

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not self.every or state.global_step % self.every:
            return
        modes = {module: module.training for module in model.modules()}
        config = TrainingConfig(steps=self._steps, rows=4, anchors=16, learning_rate=2e-4)
        rows = PackedDocuments(list(self.rollouts), length=self._length)
        DrafterTrainer(model, self.drafter, rows, config).train()
        self.drafter.eval()
        for module, is_training in modes.items():
            module.training = is_training


def train(
    target: str,
    drafter: str,
    steps: int,
    refresh_every: int = 0,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    tree_budget: int = 16,
    learning_rate: float = 1e-4,
    seed: int = 42,
) -> list[int]:
    """Trains a policy by GRPO, and its drafter every `refresh_every` steps, if that is not 0.

    Returns:
        Forwards of the policy per rollout, one rollout per step.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    draft_model = hf_ddtree.load_drafter(drafter, target_model=model, dtype=torch.float32)
    hf_ddtree.attach(model, draft_model)
    refresh = RefreshDrafter(draft_model, refresh_every, length=512)
    forwards: list[int] = []

    def record(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Keeps the rollouts; as a reward it says nothing."""
        for prompt, ids in zip(prompts, completion_ids):
            prompt_ids = tokenizer(prompt).input_ids
            refresh.rollouts.append(Document.answer(prompt_ids + ids, len(prompt_ids)))
        return [0.0] * len(prompts)

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            max_steps=steps,
            learning_rate=learning_rate,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=max_new_tokens,
            temperature=temperature,
            gradient_checkpointing=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=refresh_every or steps,
            seed=seed,
            # TRL sets a generation config of its own for rollouts, which has to say it again.
            generation_kwargs={
                "generation_strategy": "ddtree",
                "drafter": model.generation_config.drafter,
                "tree_budget": tree_budget,
            },
        )
        prompts = Dataset.from_list([{"prompt": entry["prompt"]} for entry in demo_prompts()])
        trainer = GRPOTrainer(
            model,
            [reward, record],
            args=settings,
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=[refresh],
        )
        count_forwards(model, forwards)
        trainer.train()
    return forwards


def count_forwards(model: PreTrainedModel, counts: list[int]) -> None:
    """Appends to a list, per `generate()` call of a model, how many forwards it took."""
    generate, running = model.generate, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        running[0] = 0
        output = generate(*args, **kwargs)
        counts.append(running[0])
        return output

    model.generate = counted
    model.register_forward_pre_hook(lambda *_: running.__setitem__(0, running[0] + 1))


def main(
    target: Annotated[
        str | None, typer.Option(help="Policy, a folder or hub id; that of the demo by default.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Its drafter.")] = None,
    steps: int = 24,
    refresh_every: Annotated[int, typer.Option(help="Steps from one refreshment to the next; 0 for none.")] = 6,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    tree_budget: int = 16,
    learning_rate: float = 1e-4,
) -> None:
    if (target is None) != (drafter is None):
        raise typer.BadParameter("Name both, or neither.", param_hint="--target, --drafter")
    names = (target, drafter) if target and drafter else demo_folders()
    forwards = train(*names, steps, refresh_every, max_new_tokens, temperature, tree_budget, learning_rate)
    for start in range(0, steps, refresh_every or steps):
        part = forwards[start : start + (refresh_every or steps)]
        print(f"steps {start + 1} to {start + len(part)}: {sum(part) / len(part):.1f} forwards per rollout")


if __name__ == "__main__":
    typer.run(main)
