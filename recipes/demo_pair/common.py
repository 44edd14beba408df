"""What the steps of the recipe share: seeding, and a clock that goes on where an interrupted run was."""

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
