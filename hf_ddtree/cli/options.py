"""What commands share: checks of options, and errors in the words of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Values of `device_map` that are no devices.
PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
# What the command line calls the arguments that errors name.
OPTIONS = {
    "batch_size": "--batch-size",
    "context_length": "--context-length",
    "distribution_share": "--distribution-share",
    "drafter": "--from",
    "drafters": "--drafter",
    "dtype": "--dtype",
    "head": "--head",
    "held_out": "--held-out",
    "kind": "--kind",
    "learning_rate": "--learning-rate",
    "loss": "--loss",
    "max_new_tokens": "--max-new-tokens",
    "methods": "--method",
    "minutes": "--minutes",
    "model": "TARGET",
    "output_dir": "--output",
    "prompts": "--prompts",
    "record_to": "--record-to",
    "recorded": "--recorded",
    "sampled_share": "--sampled-share",
    "start": "--from",
    "steps": "--steps",
    "temperature": "--temperature",
    "temperatures": "--temperature",
    "template_options": "--template-options",
    "tensorboard": "--tensorboard",
    "texts": "--texts",
    "tree_budget": "--tree-budget",
    "weights": "--weights",
}


def check_dtype(dtype: str) -> str:
    """Refuses a dtype that no target is loaded in."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}.")
    return dtype


def check_device_map(device_map: str | None) -> str | None:
    """Refuses what is neither a placement nor a device of this machine."""
    if device_map is not None and device_map not in PLACEMENTS:
        import torch

        try:
            torch.empty(0, device=device_map)
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise typer.BadParameter(
                f"{device_map!r} is neither {', '.join(PLACEMENTS)} nor a device of this machine, such as 'cpu': "
                f"{first_line(error)}"
            ) from error
    return device_map


def check_tree_budget(tree_budget: str) -> str:
    """Refuses what is neither `auto` nor a number of nodes."""
    if tree_budget != "auto" and not (tree_budget.isdecimal() and int(tree_budget) > 0):
        raise typer.BadParameter(f"{tree_budget!r} is neither `auto` nor an integer of at least 1.")
    return tree_budget


def check_prompt(prompt: str | None) -> str | None:
    """Refuses a prompt without text."""
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter("The prompt is empty. Give it at least one character.")
    return prompt


Target = Annotated[str, typer.Argument(metavar="TARGET", help="A repository of the Hub, a folder, or `demo`.")]
Dtype = Annotated[str, typer.Option(callback=check_dtype, help=f"Of the target: {', '.join(DTYPES)}.")]
Prompt = Annotated[
    str | None, typer.Option(callback=check_prompt, help="A prompt of your own, in place of those that ship.")
]
DeviceMap = Annotated[
    str | None, typer.Option(callback=check_device_map, help="Where to put the target, such as `auto` or `cuda`.")
]


def check_repository(role: str, name: str, option: str) -> None:
    """Checks that there is a target or drafter of this name, and that a target is no drafter."""
    from transformers import PreTrainedConfig

    from ..drafter_kinds import is_drafter_alone
    from ..drafters.checkpoint import names_a_folder

    if name == "mtp":
        return
    try:
        raw_config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            reason = f"has a config.json that cannot be read: {first_line(error)}"
        elif names_a_folder(name):
            reason = "does not exist."
        else:
            reason = f"is no folder, nor a repository that could be had from the Hub: {first_line(error)}"
        raise typer.BadParameter(f"The {role} {name!r} {reason}", param_hint=option) from error
    if not raw_config:
        raise typer.BadParameter(f"The {role} {name!r} has no config.json.", param_hint=option)
    if role == "target" and is_drafter_alone(raw_config):
        raise typer.BadParameter(
            f"{name!r} is a drafter. Name its target first, and it as `--drafter`.", param_hint=option
        )


def usage_error(error: Exception) -> typer.BadParameter:
    """An error that names options in place of arguments."""
    named = re.sub(r"`(\w+)`", lambda found: f"`{OPTIONS.get(found[1], found[1])}`", str(error))
    return typer.BadParameter(named)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [""])[0]
