"""What the environment has: versions, device, kernels, attention; what of it is slow, and what to do."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Those whose version can change what comes out or how fast.
PACKAGES = (
    "hf-ddtree",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "accelerate",
    "triton",
    "flash-linear-attention",
    "causal-conv1d",
    "flash-attn",
    "kernels",
    "bitsandbytes",
)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
FAST_CPUS = ("AVX512", "SVE256")


@dataclass(frozen=True)
class Finding:
    """Something about the environment.

    Attributes:
        subject: What was looked at.
        found: What is there.
        advice: What to do, if it is slow or does not fit.
    """

    subject: str
    found: str
    advice: str | None = None


def versions() -> dict[str, str | None]:
    """The version of Python and of each package that matters; None for one that is not installed. Imports none."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def processor_name() -> str:
    """What the processor is called; empty if that is not known."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def examine() -> list[Finding]:
    """Looks at versions, device, threads, and the kernels of attention, recurrent layers and trees."""
    installed = versions()
    return [*_requirements(installed), _device(), *_threads(), *_precision(), *_kernels(installed)]


def _requirements(installed: dict[str, str | None]) -> Iterator[Finding]:
    """Whether what is installed is what this package asks for."""
    from packaging.requirements import Requirement

    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in installed.items() if version))
    try:
        texts = metadata.requires("hf-ddtree") or []
    except metadata.PackageNotFoundError:
        return
    for needed in map(Requirement, texts):
        version = installed.get(needed.name)
        if version and needed.marker is None and not needed.specifier.contains(version, prereleases=True):
            yield Finding(needed.name, version, f"Not among the versions that work: pip install '{needed}'")


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("device", ", ".join(names))
    if not NVIDIA_DRIVER.exists():
        return Finding("device", "CPU")
    if torch.version.cuda is None:
        advice = "There is an NVIDIA GPU, but this PyTorch is built for the CPU: see https://pytorch.org/get-started."
    else:
        advice = f"PyTorch for CUDA {torch.version.cuda} cannot use the GPU. Is the driver new enough (nvidia-smi)?"
    return Finding("device", "CPU", advice)


def _threads() -> Iterator[Finding]:
    """On a CPU, whether PyTorch uses its cores; two threads of one core count as one."""
    import torch

    if torch.cuda.is_available():
        return
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = None
    if 2 * threads < cores:
        cause = "OMP_NUM_THREADS is set. Unset it, or call" if "OMP_NUM_THREADS" in os.environ else "Call"
        advice = f"{cause} torch.set_num_threads({cores}), unless other processes need the cores."
    yield Finding("threads", f"{threads} for {cores} processors", advice)


def _precision() -> Iterator[Finding]:
    """On a CPU, whether half precision is worth it."""
    import torch

    if torch.cuda.is_available():
        return
    capability = torch.backends.cpu.get_cpu_capability()
    advice = None
    if capability not in FAST_CPUS:
        advice = "bfloat16 and float16 are slow on this processor: load models with dtype=torch.float32."
    yield Finding("instructions", capability, advice)


def _kernels(installed: dict[str, str | None]) -> Iterator[Finding]:
    """What attention, recurrent layers and operators over trees run on."""
    import torch

    from .attention.fused import has_triton

    if not torch.cuda.is_available():
        yield Finding("attention", "SDPA for prefill and single tokens, this package's own for trees")
        yield Finding("recurrent layers", "PyTorch's operations, as on any CPU")
        return
    flash = torch.backends.cuda.flash_sdp_enabled()
    yield Finding(
        "attention",
        f"SDPA {'with' if flash else 'without'} FlashAttention",
        None if flash else "Long contexts are slow: torch.backends.cuda.enable_flash_sdp(True)",
    )
    missing = [name for name in ("flash-linear-attention", "causal-conv1d") if installed[name] is None]
    yield Finding(
        "recurrent layers",
        "PyTorch's operations" if missing else "kernels of flash-linear-attention and causal-conv1d",
        f"Prefill and single tokens of hybrid models are slow: pip install {' '.join(missing)}" if missing else None,
    )
    yield Finding(
        "recurrent layers over a tree",
        "Triton kernels" if has_triton() else "PyTorch's operations",
        None if has_triton() else "Trees of hybrid models are slower: pip install triton",
    )
