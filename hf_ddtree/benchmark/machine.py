"""The machine that figures are from."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers

import hf_ddtree

from ..environment import processor_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures are from: processor or GPU, threads, and versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ddtree": hf_ddtree.__version__,
    }
