"""What a generation was made with, in words: the models, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..environment import processor_name, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Packages whose versions are told.
SHOWN = ("hf-ddtree", "python", "torch", "transformers")


def run_facts(model: PreTrainedModel | None, drafter: PreTrainedModel | str | None) -> dict[str, str]:
    """Names with texts: the target, its drafter, the device and the versions.

    Args:
        model: The target. None leaves out what only it can tell.
        drafter: Its drafter; a text stands for itself. None leaves it out.
    """
    if model is None:
        return {}
    facts = {"target": _describe(model)}
    if drafter is not None:
        facts["drafter"] = drafter if isinstance(drafter, str) else _describe(drafter)
    installed = versions()
    found = [f"{name} {installed[name]}" for name in SHOWN if installed[name]]
    return {**facts, "device": _device_of(model), "versions": ", ".join(found)}


def _describe(model: PreTrainedModel) -> str:
    """Name, class, parameters and precision."""
    name = str(getattr(model, "name_or_path", "") or "")
    if Path(name).is_dir():
        name = "/".join(Path(name).parts[-2:])
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    size = f"{millions / 1e3:.1f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    facts = (type(model).__name__, f"{size} parameters", str(model.dtype).removeprefix("torch."))
    return ", ".join(fact for fact in (name, *facts) if fact)


def _device_of(model: PreTrainedModel) -> str:
    import torch

    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    if model.device.type != "cpu":
        return str(model.device)
    count = torch.get_num_threads()
    return f"{processor_name()}, {count} {'thread' if count == 1 else 'threads'}"
