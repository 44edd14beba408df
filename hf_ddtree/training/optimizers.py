"""Muon for the matrices inside the layers, AdamW for the rest, at one learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Names of what is indexed by words: embeddings, heads, the codebooks of a selector, the factors of a Markov head.
TABLES = ("embed", "lm_head", "codebook", "markov_w")


def build_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """The optimizers of some parameters.

    Muon takes the weight matrices inside the layers. AdamW takes what is looked up by token, norms, biases and
    kernels. Both have the same learning rate, as Muon's steps are scaled to the size of AdamW's: at a lower one,
    tables that are indexed by words hardly learn.

    Args:
        named_parameters: Names and parameters; those that take no gradient are left out.
        learning_rate: The rate, kept in each group as `peak_lr` for `set_learning_rate`.
        weight_decay: Of the matrices that Muon takes.

    Raises:
        ImportError: If PyTorch is older than 2.9 and has no Muon.
        ValueError: If no parameter takes a gradient.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(
            f"Training needs `torch.optim.Muon`, which PyTorch {torch.__version__} does not have: pip install -U "
            "'hf-ddtree[train]'."
        )
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trained:
        raise ValueError("No parameter takes a gradient. Call `requires_grad_(True)` on what is to be trained.")
    is_matrix = [parameter.ndim == 2 and not any(part in name for part in TABLES) for name, parameter in trained]
    matrices = [parameter for (_, parameter), chosen in zip(trained, is_matrix) if chosen]
    others = [parameter for (_, parameter), chosen in zip(trained, is_matrix) if not chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    if matrices:
        muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = learning_rate
    return optimizers


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Sets every group to `factor` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def linear_schedule(progress: float, warmup: float) -> float:
    """The factor on the learning rate at some share of a run, 0 to 1: a linear rise, then a linear fall to 0."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return max((1.0 - progress) / (1.0 - warmup), 0.0)
