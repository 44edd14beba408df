"""`hf-ddtree doctor TARGET DRAFTER`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from .options import check_repository
from .terminal import make_console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..training.doctor import Diagnosis


def diagnosis_of(
    target: str,
    drafter: str | None,
    prompts: str | None,
    template_options: str,
    count: int,
    max_new_tokens: int,
    dtype: str,
    device_map: str | None,
) -> Diagnosis:
    """What is wrong with a drafter, by the options of the command."""
    from transformers.utils import logging

    from ..demo import demo_folders
    from ..drafter_kinds import load_drafter
    from ..training.doctor import diagnose
    from .loading import json_object, load_target

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if target == "demo":
        target, shipped = demo_folders()
        drafter, dtype = drafter or shipped, "float32" if dtype == "auto" else dtype
    if drafter is None:
        raise ValueError("there is no drafter to look at. Name it after TARGET.")
    check_repository("target", target, "TARGET")
    check_repository("drafter", drafter, "DRAFTER")
    options = json_object("template_options", template_options)
    model, tokenizer = load_target(target, dtype, device_map)
    asked, other_modes = _prompts_of(prompts, target == demo_folders()[0], tokenizer, options, count)
    loaded = load_drafter(drafter, target_model=model)
    with make_console(stderr=True).status("The target answers.") as status:
        return diagnose(
            *(model, loaded, tokenizer, asked, other_modes),
            max_new_tokens=max_new_tokens,
            on_trial=lambda name: status.update(Text(f"Is it that {name}?")),
        )


def _prompts_of(
    source: str | None, is_demo: bool, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], count: int
) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """The prompts as tokens, and the same in other modes of the chat template."""
    from ..demo import varied_prompts
    from ..training.data import read_prompts

    if source is None:
        if not is_demo:
            raise ValueError("`prompts` are needed. Name a file with prompts as the target gets them in use.")
        return [tokenizer(entry["prompt"]).input_ids for entry in varied_prompts()[:count]], {}
    asked = read_prompts(source, tokenizer, options)[:count]
    modes: dict[str, list[list[int]]] = {}
    if not tokenizer.chat_template:
        return asked, modes
    if "enable_thinking" in str(tokenizer.chat_template):
        for is_on in (True, False):
            mode = f"with `enable_thinking` {is_on} in the chat template"
            modes[mode] = read_prompts(source, tokenizer, {**options, "enable_thinking": is_on})[:count]
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        modes["on texts without the chat template"] = read_prompts(source, tokenizer)[:count]
    except ValueError:
        pass  # conversations have no form without a template
    finally:
        tokenizer.chat_template = template
    return asked, {mode: others for mode, others in modes.items() if others != asked}


def table_of(found: Diagnosis) -> Table:
    """What a drafter gives as it is, and with each known fault put right."""
    table = Table("a chain", "tokens per round", "nats per slot")
    table.add_row("while decoding", f"{found.decoded:.2f}", "")
    table.add_row(
        "by teacher forcing", f"{found.teacher_forced:.2f}", f"{found.negative_log_likelihood:.3f}", end_section=True
    )
    for trial in found.trials:
        style = "bold red" if trial is found.fault else ""
        figures = f"{trial.accepted_length:.2f}", f"{trial.negative_log_likelihood:.3f}"
        table.add_row(Text(f"if {trial.fault}", style), *figures)
    return table
