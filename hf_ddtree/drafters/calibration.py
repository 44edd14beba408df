"""Calibrating a drafter's probabilities while decoding.

A block-diffusion drafter predicts one distribution per depth, so a token has the same probability below the drafter's
own best candidates and below their siblings, where it is mostly wrong; and its probabilities may be over- or
underconfident for the target at hand. Each round is evidence: at every accepted node the target's next token is known,
and so which candidate was accepted.

`c = (accepted + a) / (expected + a)` corrects the probabilities of a class of candidates, where `accepted` counts
those that were accepted, `expected` sums their predicted probabilities, and `a` is the weight of the prior: `c` is the
posterior mean of a Poisson rate with a Gamma(a, a) prior after `accepted` events of which `expected` were predicted. A
class is a range of depths, the best candidate or any other, on or off the spine (below best candidates only, or not),
and a range of predicted probabilities.
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

from .mixture import Powers

# Lower ends of the ranges: of depths from 1, of candidates' ranks from 0, and of negative log-probabilities.
DEPTHS = (1, 2, 4)
RANKS = (0, 1)
SURPRISES = (0.0, 0.05, 0.15, 0.4, 0.8, 1.6, 3.2)
_EDGES = np.array(SURPRISES[1:], dtype=np.float32)
SHAPE = (len(DEPTHS), 2, len(RANKS), len(SURPRISES))
# The weight of the prior in accepted candidates, and the number of rounds after which evidence has decayed to 1/e.
PRIOR, MEMORY = 16.0, 1024
# The powers of the marginal on the spine and off it, and of what the target said after the last tokens.
INITIAL_POWERS = (1.0, 0.7, 0.3)
# Observations that the power of a selector remembers.
SELECTOR_MEMORY = 512
# What the powers of greedy decoding and of sampling are called in a file.
DECODING = {"greedy": False, "sampled": True}


class Calibration:
    """Measured corrections of a drafter's probabilities; the identity before there is evidence.

    It is the drafter's attribute `calibration`, and every call updates it. Calls that run at the same time may lose
    each other's evidence, but leave the table consistent. It changes the trees, and so the speed; never a token.

    Attributes:
        powers: For greedy decoding and for sampling (`True`), how marginals and what the target said are combined; see
            `BranchCandidates`.
        selector_powers: The same for the power of a selector's probabilities; see `DFlash2TreeCandidateGenerator`.
    """

    def __init__(self) -> None:
        self.powers = {do_sample: Powers(INITIAL_POWERS) for do_sample in (False, True)}
        self.selector_powers = {do_sample: Powers((1.0,), SELECTOR_MEMORY) for do_sample in (False, True)}
        # (accepted, expected). Replaced and never written to, so that a thread sees both of the same moment.
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
        """The arguments of `build_tree` with the corrected probabilities on the spine and off it.

        A candidate that would become more probable than a better one gets that one's probability, so ranks stay.

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
        """Adds the evidence of one row and round: the accepted candidate below each node on the emitted path.

        Args:
            log_probs: `(depth, k)`, the drafter's own, of the candidates that the round's tree was built from.
            token_ids: `(depth, k)`.
            emitted: The tokens after the root: the accepted ones, the target's own, and what followed.
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
        """Writes the table and the powers to a JSON file."""
        table = {"depths": DEPTHS, "ranks": RANKS, "surprises": SURPRISES}
        right, stated = self._counts.tolist()
        powers = {
            kind: {name: of_kind[do_sample].to_dict() for name, do_sample in DECODING.items()}
            for kind, of_kind in self._powers_by_kind.items()
        }
        Path(path).write_text(json.dumps(table | {"right": right, "stated": stated} | powers))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            ValueError: If it is something else, or has other classes or powers than this version.
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
        try:
            for kind, of_kind in calibration._powers_by_kind.items():
                for name, powers in table.get(kind, {}).items():
                    of_kind[DECODING[name]].set_dict(powers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds powers that `Calibration.save` did not write.") from error
        return calibration

    @property
    def _powers_by_kind(self) -> dict[str, dict[bool, Powers]]:
        return {"powers": self.powers, "selector_powers": self.selector_powers}

    def _set(self, counts: np.ndarray) -> None:
        self._counts = counts
        self._log_factors = np.log((counts[0] + PRIOR) / (counts[1] + PRIOR)).astype(np.float32)


def _cells(log_probs: np.ndarray) -> np.ndarray:
    """`(depth, 2, k)` int64: the class of each candidate of `(depth, k)`, on the spine and off it."""
    surprise = _EDGES.searchsorted(-log_probs)
    return _first_cells(*log_probs.shape) + surprise[:, None]


@lru_cache(maxsize=64)
def _first_cells(depth: int, width: int) -> np.ndarray:
    """`(depth, 2, width)`, the first class of each depth, side of the spine and rank."""
    depths = np.searchsorted(DEPTHS, np.arange(1, depth + 1), side="right") - 1
    ranks = np.searchsorted(RANKS, np.arange(width), side="right") - 1
    places = (depths[:, None, None] * 2 + np.arange(2)[:, None]) * len(RANKS) + ranks
    return places * len(SURPRISES)


@lru_cache(maxsize=64)
def _next_state(width: int) -> Tensor:
    """`(2, width)` int64: the best candidate stays on the spine, and no other returns to it."""
    off_spine = torch.ones((2, width), dtype=torch.int64, device="cpu")
    off_spine[0, 0] = 0
    return off_spine
