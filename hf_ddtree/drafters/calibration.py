"""Learning, while decoding, how probable a drafter's candidates really are.

A block-diffusion drafter gives one distribution a depth. It states the same probability for a token below its own best
guesses and below a sibling that they did not foresee, where it mostly errs; and what it states may be too sure or not
sure enough for a target that takes its best token. The rounds themselves tell: at every node that was accepted, the
target's next token is known, and so which candidate was right.

`c = (right + a) / (stated + a)` corrects the probabilities of a class of candidates, where `right` counts those that
were right, `stated` sums what was stated for them, and `a` is the weight of the prior: the mean of a Gamma(a, a) prior
on `c` after `right` events of which `stated` were expected. A class is a range of depths, the best candidate or any
other, on or off the spine (below best candidates alone, or not), and a range of stated probabilities.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Lower ends of the ranges: of depths from 1, of candidates' ranks from 0, and of negative log-probabilities.
DEPTHS = (1, 2, 4)
RANKS = (0, 1)
SURPRISES = (0.0, 0.05, 0.15, 0.4, 0.8, 1.6, 3.2)
_EDGES = np.array(SURPRISES[1:], dtype=np.float32)
SHAPE = (len(DEPTHS), 2, len(RANKS), len(SURPRISES))
# How many right candidates the prior is worth, and after how many rounds evidence counts 1/e.
PRIOR, MEMORY = 16.0, 1024


class Calibration:
    """What is known of a drafter's errors; at first nothing, so that probabilities stay as they are stated.

    It lives with the drafter, as `drafter.calibration`, and learns from every call. Calls that run at the same time
    may lose each other's evidence, but leave the table in order. What it changes are the trees, and so the speed;
    never a token.
    """

    def __init__(self) -> None:
        # Replaced and never written to, so that a thread sees right and stated of the same moment.
        self._counts = np.zeros((2, int(np.prod(SHAPE))))
        self._log_factors = np.zeros(int(np.prod(SHAPE)), dtype=np.float32)

    @property
    def is_neutral(self) -> bool:
        """Whether there is no evidence yet."""
        return not self._counts.any()

    @property
    def factors(self) -> np.ndarray:
        """The corrections `c`, float32, by range of depths, spine (on, off), rank (best, other) and range of
        probabilities (falling)."""
        return np.exp(self._log_factors).reshape(SHAPE)

    def calibrate(self, log_probs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `build_tree` that say what is probable on the spine and off it.

        A candidate that comes out more probable than a better one is given that one's probability, so ranks stay.

        Args:
            log_probs: `(depth, k)` float32, as from `top_candidates`.
            token_ids: `(depth, k)` int64.

        Returns:
            `log_probs (depth, 2, k)` float32 and `token_ids (depth, 2, k)`, on the spine first; `next_state (2, k)`.
        """
        stated = log_probs.numpy()
        cells = _cells(stated)
        calibrated = stated[:, None] + self._log_factors.take(cells)
        np.minimum.accumulate(calibrated, axis=-1, out=calibrated)
        np.minimum(calibrated, 0, out=calibrated)
        return torch.from_numpy(calibrated), token_ids[:, None].expand(-1, 2, -1), _next_state(stated.shape[1])

    def learn(self, log_probs: Tensor, token_ids: Tensor, emitted: Sequence[int]) -> None:
        """Takes up the evidence of a row and round: what was right below each node that the emitted tokens pass.

        Args:
            log_probs: `(depth, k)`, the candidates that the round's tree was built from, as they were stated.
            token_ids: `(depth, k)`.
            emitted: The tokens that followed the root: those that were accepted, the target's own, and what followed.
        """
        stated, tokens = log_probs[: len(emitted)].numpy(), token_ids[: len(emitted)].numpy()
        hits = tokens == np.array(emitted[: len(tokens)])[:, None]
        is_candidate = hits.any(axis=1)
        if not is_candidate.all():
            reached = int(is_candidate.argmin()) + 1
            stated, hits = stated[:reached], hits[:reached]
        was_best = hits[:, 0]
        off_spine = np.zeros(len(stated), dtype=np.int64)
        off_spine[1:] = ~np.logical_and.accumulate(was_best[:-1])
        cells = _cells(stated)[np.arange(len(stated)), off_spine]
        counts = self._counts * (1 - 1 / MEMORY)
        counts[1] += np.bincount(cells.ravel(), np.exp(stated).ravel(), counts.shape[1])
        counts[0] += np.bincount(cells[hits], minlength=counts.shape[1])
        self._set(counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table to a JSON file."""
        table = {"depths": DEPTHS, "ranks": RANKS, "surprises": SURPRISES}
        right, stated = self._counts.tolist()
        Path(path).write_text(json.dumps(table | {"right": right, "stated": stated}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            ValueError: If it is something else, or has other classes than this version.
        """
        table = json.loads(Path(path).read_text())
        classes = {"depths": list(DEPTHS), "ranks": list(RANKS), "surprises": list(SURPRISES)}
        calibration = cls()
        lengths = {len(table.get(name) or ()) for name in ("right", "stated")}
        if {name: table.get(name) for name in classes} != classes or lengths != {calibration._counts.shape[1]}:
            raise ValueError(
                f"{str(path)!r} holds no calibration of this version: `Calibration.save` writes {', '.join(classes)}, "
                "right and stated. Start with a new `Calibration`, which learns within some hundred rounds."
            )
        calibration._set(np.array([table["right"], table["stated"]], dtype=np.float64))
        return calibration

    def _set(self, counts: np.ndarray) -> None:
        self._counts = counts
        self._log_factors = np.log((counts[0] + PRIOR) / (counts[1] + PRIOR)).astype(np.float32)


def _cells(log_probs: np.ndarray) -> np.ndarray:
    """`(depth, 2, k)` int64: the class of each candidate of `(depth, k)`, on the spine and off it."""
    surprise = _EDGES.searchsorted(-log_probs)
    return _first_cells(*log_probs.shape) + surprise[:, None]


@lru_cache(maxsize=64)
def _first_cells(depth: int, width: int) -> np.ndarray:
    """`(depth, 2, width)`, for each place the class of the most probable candidates."""
    depths = np.searchsorted(DEPTHS, np.arange(1, depth + 1), side="right") - 1
    ranks = np.searchsorted(RANKS, np.arange(width), side="right") - 1
    places = (depths[:, None, None] * 2 + np.arange(2)[:, None]) * len(RANKS) + ranks
    return places * len(SURPRISES)


@lru_cache(maxsize=64)
def _next_state(width: int) -> Tensor:
    """`(2, width)` int64: the best candidate stays on the spine, and no other comes back to it."""
    off_spine = torch.ones((2, width), dtype=torch.int64, device="cpu")
    off_spine[0, 0] = 0
    return off_spine
