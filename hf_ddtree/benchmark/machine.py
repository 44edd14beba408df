"""The machine that figures are from."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_ddtree


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the figures are from: processor or GPU, threads, and versions."""
    cpu_info = Path("/proc/cpuinfo")
    names = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.processor())
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ddtree": hf_ddtree.__version__,
    }
