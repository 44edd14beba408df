"""What the steps of the recipe share: seeding, optimizers, and a learning rate that follows the clock."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

SEED = 20261129
END_OF_TEXT, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
# The drafter sees what these layers of the target give: an early one, the last one, and two between.
TARGET_LAYER_IDS = [1, 5, 8, 11]


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(offset: int = 0) -> torch.Generator:
    """Seeds torch, and returns a CPU generator for the data order; `offset` tells the steps' streams apart."""
    torch.manual_seed(SEED + offset)
    return torch.Generator().manual_seed(SEED + offset)


def load_tokens(path: Path) -> np.ndarray:
    """A memory-mapped `(n,)` uint16 token stream."""
    return np.memmap(path, dtype=np.uint16, mode="r")


def save_atomically(state: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the new one, never half a file."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


@dataclass
class TimeBudget:
    """A training run measured in seconds: the learning rate reaches zero when the time is up, on any machine.

    `spent` carries over what earlier, interrupted runs have used.
    """

    seconds: float
    spent: float = 0.0
    warmup: float = 0.03
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.started

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        return min(self.elapsed / self.seconds, 1.0)

    @property
    def exhausted(self) -> bool:
        return self.elapsed >= self.seconds

    def lr_factor(self) -> float:
        """Linear warm-up, then linear decay to zero."""
        progress = self.progress
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        return max((1.0 - progress) / (1.0 - self.warmup), 0.0)


def build_optimizers(
    named_parameters: list[tuple[str, torch.nn.Parameter]], lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices inside the layers, AdamW for whatever is looked up by token, norms and the rest.

    Both get the same learning rate: Muon's step is rescaled to the size of AdamW's. Every group remembers its peak
    in `peak_lr`, for `set_lr`.
    """
    by_token = ("embed", "lm_head", "codebook")
    matrices = [p for name, p in named_parameters if p.ndim == 2 and not any(part in name for part in by_token)]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named_parameters if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = lr
    return optimizers


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Sets every group to `factor` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
