"""Training a drafter for a target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashDraftModel
from ..drafters.dflash.checkpoint import check_drafter_fits
from ..validation import install_command
from .anchors import labels_behind, sample_anchors
from .block_loss import BlockLoss
from .checkpoints import latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from .config import TrainingConfig
from .documents import Rows, RowSource
from .evaluation import Evaluation, Evaluator
from .interrupts import deferred_interrupts
from .optimizers import build_optimizers, linear_schedule, set_learning_rate
from .run_log import RunLog, scalars_of
from .target_features import TargetFeatures

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"Training needs the package `accelerate`: {install_command('train')}.") from error

# Settings that change nothing of what is learnt, so that a run may go on with others.
_FREE = ("log_every", "evaluate_every", "checkpoint_every", "tree_budgets", "logits_at_once")


class DrafterTrainer:
    """Trains a drafter of the DFlash family for a frozen target: DFlash, DFlash 2, DSpark, Domino, JetSpec.

    A step takes rows of the target's texts, drafts blocks at random roots of all rows in one forward, and compares
    every slot with the token that follows. Which rows and roots step `n` takes depends on the seed and `n` alone, so a
    run that was stopped, at any moment, goes on from its last checkpoint as if it had not been. Started by
    `accelerate launch`, processes share the rows of a step, and learn what one process learns from all of them.

    Args:
        target_model: The target, in any precision, quantized or not. It is only read.
        drafter: The drafter, in float32. It is moved to the accelerator's device and trained in place; parameters
            that take no gradient stay as they are.
        rows: Where the texts are from, such as `PackedDocuments`.
        config: The settings.
        evaluator: Measures the drafter on held-out texts, before the first step, every `config.evaluate_every` steps
            and after the last.
        output_dir: For checkpoints and `log.jsonl`. If there is a checkpoint, the run goes on from it. None keeps
            nothing.
        accelerator: Devices, processes and mixed precision. By default what `accelerate` finds. Its trackers, once
            initialised, get the numbers of the log.
        on_log: Called in the main process with each entry of the log.

    Attributes:
        step: Steps that are done.
        seconds: Spent on them, stopped time left out.

    Raises:
        ValueError: If the drafter does not fit the target or is of another precision, or `output_dir` holds a run with
            other settings.
    """

    def __init__(
        self,
        target_model: PreTrainedModel,
        drafter: DFlashDraftModel,
        rows: RowSource,
        config: TrainingConfig | None = None,
        *,
        evaluator: Evaluator | None = None,
        output_dir: str | Path | None = None,
        accelerator: Accelerator | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if not isinstance(drafter, DFlashDraftModel):
            raise ValueError(
                f"`drafter` is a `{type(drafter).__name__}`, but only drafters of the DFlash family can be trained: "
                "those that `new_drafter` makes and `load_drafter` loads as such."
            )
        check_drafter_fits(drafter, target_model)
        if drafter.dtype != torch.float32:
            raise ValueError(
                f"`drafter` is in {drafter.dtype}, in which small steps are lost. Load it with `dtype=torch.float32`; "
                "for fast matrix products pass an `Accelerator(mixed_precision='bf16')`."
            )
        self.config = config or TrainingConfig()
        self.drafter = drafter
        self.step, self.seconds = 0, 0.0
        self._target = target_model.eval()
        self._rows = rows
        self._evaluator = evaluator
        self._accelerator = accelerator or Accelerator()
        self._on_log = on_log
        self._folder = None if output_dir is None else Path(output_dir)
        drafter.to(self._accelerator.device).train()
        loss = BlockLoss(drafter, target_model, self.config)
        config = self.config
        optimizers = build_optimizers(drafter.named_parameters(), config.learning_rate, config.weight_decay)
        self._model, *self._optimizers = self._accelerator.prepare(loss, *optimizers)
        self._trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self._resume()
        log = self._folder / "log.jsonl" if self._folder is not None and self._is_main else None
        self._log = RunLog(log, self.step)

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        if self.config.minutes is not None:
            return min(self.seconds / (60 * self.config.minutes), 1.0)
        assert self.config.steps is not None
        return min(self.step / self.config.steps, 1.0)

    def train(self) -> Evaluation | None:
        """Trains to the end.

        Returns:
            The last evaluation; None without an `evaluator`, and in processes other than the main one.

        Raises:
            FloatingPointError: If the loss is no number. The last checkpoint is from before.
            OSError: If a checkpoint cannot be written. The one before is left.
            KeyboardInterrupt: After Ctrl-C, once the step is done and a checkpoint written; at once after a second.
        """
        features = TargetFeatures(self._target, self.drafter.config.target_layer_ids)
        evaluation = self.evaluate() if self.step == 0 or self.progress >= 1 else None
        since_log: list[torch.Tensor] = []
        try:
            with deferred_interrupts() as was_interrupted:
                while self.progress < 1:
                    start = time.perf_counter()
                    since_log.append(self._take_step(features))
                    self.step += 1
                    self.seconds += self._agreed(time.perf_counter() - start)
                    is_last, is_stopped = self.progress >= 1, self._is_anywhere(was_interrupted())
                    if self.step % self.config.log_every == 0 or is_last:
                        self._report(since_log)
                        since_log = []
                    if self.step % self.config.evaluate_every == 0 or is_last:
                        evaluation = self.evaluate()
                    if self.step % self.config.checkpoint_every == 0 or is_last or is_stopped:
                        self.save_checkpoint()
                    if is_stopped and not is_last:
                        raise KeyboardInterrupt
        finally:
            features.close()
        return evaluation

    def evaluate(self) -> Evaluation | None:
        """Measures the drafter on the held-out texts, and logs it; None without any, and in other processes."""
        evaluation = None
        if self._evaluator is not None and self._is_main:
            evaluation = self._evaluator(self.drafter)
            self._write({"step": self.step, "held_out": evaluation.to_dict()})
        self._accelerator.wait_for_everyone()
        return evaluation

    def save_checkpoint(self) -> None:
        """Writes a checkpoint into `output_dir`."""
        if self._folder is not None and self._is_main:
            state = {"step": self.step, "seconds": self.seconds, "config": asdict(self.config)}
            save_checkpoint(self._folder / "checkpoints", self.drafter, self._optimizers, state)
        self._accelerator.wait_for_everyone()

    @property
    def _is_main(self) -> bool:
        return bool(self._accelerator.is_main_process)

    def _resume(self) -> None:
        checkpoint = None if self._folder is None else latest_checkpoint(self._folder / "checkpoints")
        if checkpoint is None:
            return
        state = read_state(checkpoint)
        for field in fields(self.config):
            here, there = getattr(self.config, field.name), state["config"].get(field.name)
            if field.name not in _FREE and here != there:
                raise ValueError(
                    f"`output_dir` {str(self._folder)!r} holds a run with `{field.name}` {there}, but now it is "
                    f"{here}. Go on with {there}, or choose another folder."
                )
        load_checkpoint(checkpoint, self.drafter, self._optimizers)
        self.step, self.seconds = state["step"], state["seconds"]

    def _take_step(self, features: TargetFeatures) -> torch.Tensor:
        """One step of the optimizers; returns the statistics of all processes' blocks, and the gradient's norm."""
        config, accelerator = self.config, self._accelerator
        set_learning_rate(self._optimizers, linear_schedule(self.progress, config.warmup))
        parts = [self._part(number) for number in range(config.accumulation)]
        depth = self.drafter.config.draft_length
        num_slots = sum(labels_behind(rows, *blocks, depth)[2].sum() for rows, blocks in parts)
        num_slots = accelerator.reduce(torch.as_tensor(num_slots, device=accelerator.device), "sum").clamp(min=1)
        total: torch.Tensor | None = None
        for number, (rows, (anchors, is_used)) in enumerate(parts):
            rows = rows.to(accelerator.device)
            anchors, is_used = anchors.to(accelerator.device), is_used.to(accelerator.device)
            given, logits = features(rows, with_logits=config.distribution_share > 0)
            is_last = number + 1 == len(parts)
            with nullcontext() if is_last else accelerator.no_sync(self._model):
                with accelerator.autocast():
                    loss, statistics = self._model(rows, given, anchors, is_used, logits)
                # Processes average their gradients, and each slot of all of them counts the same.
                accelerator.backward(loss * (accelerator.num_processes / num_slots))
            packed = statistics.packed()
            total = packed if total is None else total + packed
        norm = accelerator.clip_grad_norm_(self._trained, config.max_gradient_norm)
        assert total is not None and norm is not None
        total = accelerator.reduce(total, "sum")
        if not torch.isfinite(total[0]):
            raise FloatingPointError(
                f"The loss of step {self.step + 1} is {float(total[0])}. Go on from the last checkpoint with a lower "
                "`learning_rate`, in another folder."
            )
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.cat((total, norm.to(total)[None]))

    def _part(self, number: int) -> tuple[Rows, tuple[torch.Tensor, torch.Tensor]]:
        """The rows and roots of one of this process's forwards."""
        config, accelerator = self.config, self._accelerator
        part = (self.step * config.accumulation + number) * accelerator.num_processes + accelerator.process_index
        places = range(part * config.rows, (part + 1) * config.rows)
        rows = self._rows.rows(places)
        return rows, sample_anchors(rows, config.anchors, [(config.seed, place) for place in places])

    def _agreed(self, seconds: float) -> float:
        """The main process's time, so that all end at the same step."""
        accelerator = self._accelerator
        if accelerator.num_processes == 1:
            return seconds
        mine = torch.tensor(seconds if self._is_main else 0.0, device=accelerator.device)
        return float(accelerator.reduce(mine, "sum"))

    def _is_anywhere(self, flag: bool) -> bool:
        """Whether a flag is set in some process."""
        if self._accelerator.num_processes == 1:
            return flag
        return bool(self._accelerator.reduce(torch.tensor(float(flag), device=self._accelerator.device), "sum") > 0)

    def _report(self, steps: Sequence[torch.Tensor]) -> None:
        """Logs what some steps gave."""
        loss, nll, num_slots, *by_depth, norm = torch.stack(list(steps)).sum(dim=0).tolist()
        reached, right = by_depth[: len(by_depth) // 2], by_depth[len(by_depth) // 2 :]
        self._write(
            {
                "step": self.step,
                "seconds": round(self.seconds, 3),
                "loss": loss / max(num_slots, 1),
                "negative_log_likelihood": nll / max(num_slots, 1),
                "hit_rates": [round(hits / max(count, 1), 4) for hits, count in zip(right, reached)],
                "gradient_norm": norm / len(steps),
                "learning_rate": self._optimizers[0].param_groups[0]["lr"],
            }
        )

    def _write(self, entry: dict[str, Any]) -> None:
        if self._is_main:
            self._log.add(entry)
            self._accelerator.log(scalars_of(entry), step=entry["step"])
            if self._on_log is not None:
                self._on_log(entry)
