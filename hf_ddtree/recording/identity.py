"""Whether two models have the same weights, told by a few of them."""

from __future__ import annotations

import hashlib
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Values of each parameter that are looked at, evenly spaced.
VALUES = 16


def fingerprint_of(model: PreTrainedModel) -> str | None:
    """A hash of a model's parameters: their names and shapes, and some values of each, rounded to bfloat16.

    Rounded, so that a model is the same in float32 and in bfloat16. What a library of quantization keeps as a type of
    its own counts by name and shape alone.

    Args:
        model: The model.

    Returns:
        64 hexadecimal digits; None if some are offloaded.
    """
    digest, values = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.data
        if tensor.is_meta:
            return None
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if type(tensor) is Tensor and tensor.numel():
            flat = tensor.flatten()
            values.append(flat[:: max(1, len(flat) // VALUES)][:VALUES].to(torch.bfloat16))
    for _, on_one_device in groupby(values, key=lambda one: one.device):
        digest.update(torch.cat(list(on_one_device)).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
