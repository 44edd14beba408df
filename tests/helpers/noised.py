"""A copy of a model that is often, but not always, of the same opinion."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel


def make_noised(model: PreTrainedModel, noise: float = 0.15, seed: int = 0) -> PreTrainedModel:
    """The model with noise on its matrices, `noise` times as large as their own values."""
    noised = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in noised.parameters():
        if parameter.ndim > 1:
            parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return noised.eval()
