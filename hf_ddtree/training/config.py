"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import require_positive_int
from .losses import LOSSES, WEIGHTS, LossName, WeightsName


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a training run.

    Args:
        steps: Steps of the optimizers. None if `minutes` says when to end.
        minutes: How long to train, stopped time left out. The same seed then does not give the same weights.
        rows: Rows of a forward, for each process.
        accumulation: Forwards of a step.
        anchors: Blocks in a row (DFlash, arXiv:2602.06036, takes 512 in 3,072 tokens).
        learning_rate: Its peak, for all weights: Muon's steps are scaled to the size of AdamW's.
        warmup: Share of the run in which the learning rate rises; from there it falls to zero, both linearly.
        weight_decay: Of the matrices that Muon trains.
        max_gradient_norm: Longer gradients are cut to it.
        loss: What a slot is trained on: `"cross_entropy"`, `"total_variation"` or `"lk"`; see `slot_losses`.
        distribution_share: From 0, where slots learn the tokens that follow, to 1, where they learn the target's
            distribution. Above 0, the target's logits of all tokens in a forward are kept until it is done.
        lk_eta: Of `"lk"`: how soon total variation takes over from the divergence (arXiv:2602.23881 takes 3).
        weights: How positions in a block weigh: `"d_pace"`, `"decay"` or `"uniform"`; see `position_weights`.
        smoothing: Of `"d_pace"` (arXiv:2605.18810 takes 0.5).
        position_decay: Of `"decay"`, in slots (DFlash takes 4 for blocks of 8, 7 for 16).
        conditional_share: For drafters that look at the tokens before a slot: the share of the loss of what they make
            of it then. The rest is that of the slot by itself.
        logits_at_once: Most numbers in the logits that are computed at once. Beyond, they are computed block after
            block, and once more for the gradient, so memory does not grow with the vocabulary.
        log_every, evaluate_every, checkpoint_every: In steps.
        tree_budgets: Nodes of the trees that evaluations measure, besides the chain.
        seed: Of the order of the rows and the places of the blocks.

    Raises:
        ValueError: If a setting has a value that is not allowed.
    """

    steps: int | None = 1000
    minutes: float | None = None
    rows: int = 8
    accumulation: int = 1
    anchors: int = 64
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.02
    max_gradient_norm: float = 1.0
    loss: LossName = "cross_entropy"
    distribution_share: float = 0.0
    lk_eta: float = 3.0
    weights: WeightsName = "d_pace"
    smoothing: float = 0.5
    position_decay: float = 4.0
    conditional_share: float = 0.5
    logits_at_once: int = 2**26
    log_every: int = 20
    evaluate_every: int = 500
    checkpoint_every: int = 500
    tree_budgets: tuple[int, ...] = (8, 16, 32, 64)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(
                f"`steps` is {self.steps} and `minutes` is {self.minutes}, but one of them must say when training "
                "ends. Set the other to None."
            )
        counts = ("rows", "accumulation", "anchors", "logits_at_once", "log_every", "evaluate_every")
        for name in (*counts, "checkpoint_every", *(["steps"] if self.minutes is None else [])):
            require_positive_int(name, getattr(self, name))
        for name in ("distribution_share", "smoothing", "conditional_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be between 0 and 1, but is {getattr(self, name)}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"`warmup` must be at least 0 and below 1, but is {self.warmup}.")
        for name in ("minutes", "learning_rate", "max_gradient_norm", "position_decay"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, but is {getattr(self, name)}.")
        for name, allowed in (("loss", LOSSES), ("weights", WEIGHTS)):
            if getattr(self, name) not in allowed:
                known = ", ".join(map(repr, allowed))
                raise ValueError(f"`{name}` must be one of {known}, but is {getattr(self, name)!r}.")
