"""The model card of a trained drafter, with its figures, and its upload to the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData

from ..drafters.dflash import DFlashConfig
from .config import TrainingConfig
from .report import Run

# What a folder with a drafter holds.
FILES = ("README.md", "config.json", "model.safetensors")
USAGE = """```python
import hf_ddtree
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
drafter = hf_ddtree.load_drafter("{name}", target_model=model)
out = model.generate(**inputs, assistant_model=drafter, generation_strategy="ddtree")
```"""


def write_card(
    folder: str | os.PathLike[str],
    run: Run,
    drafter_config: DFlashConfig,
    config: TrainingConfig,
    target: str,
    start: str | None = None,
    measured: str = "",
) -> None:
    """Writes the `README.md` of a drafter.

    Args:
        folder: Where the drafter was saved.
        run: The log of its training.
        drafter_config: Of the drafter.
        config: The settings of the training.
        target: The target's name on the Hub, or its folder, of which the card has the last part alone.
        start: Likewise the drafter that the training began with; None for one from scratch.
        measured: What else was measured, in Markdown.

    Raises:
        OSError: If it cannot be written.
    """
    path = Path(folder)
    is_folder = Path(target).exists()
    name = Path(target).name if is_folder else target
    data = ModelCardData(
        base_model=None if is_folder else target,
        library_name="hf-ddtree",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", drafter_config.model_type.removeprefix("hf_ddtree_")],
    )
    origin = "from scratch" if start is None else f"from {Path(start).name if Path(start).exists() else start}"
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# A drafter for {name}",
        f"It drafts blocks of {drafter_config.draft_length} tokens, of which {name} verifies the most probable "
        "ones in a tree. The output is the model's own.",
        USAGE.format(target=name, name=path.name),
        "## Held-out texts",
        _evaluations(run),
        *([measured] if measured else []),
        "## Training",
        f"{origin[0].upper()}{origin[1:]}, on the target's own answers. {_effort(run)}",
        "| setting | value |\n|---|---|\n"
        + "\n".join(f"| `{key}` | {value} |" for key, value in asdict(config).items()),
    ]
    (path / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def push_drafter(folder: str | os.PathLike[str], repo_id: str, private: bool = False) -> str:
    """Uploads a saved drafter and its card to the Hub, where its repository is made if need be.

    Args:
        folder: Where it was saved.
        repo_id: The repository, such as `"someone/drafter"`.
        private: Whether a repository that is made is private.

    Returns:
        The address of the commit.

    Raises:
        ValueError: If a file is missing.
    """
    missing = [name for name in FILES if not (Path(folder) / name).is_file()]
    if missing:
        raise ValueError(f"`folder` {str(folder)!r} has no {', '.join(missing)}. Save the drafter and its card first.")
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=Path(folder), allow_patterns=list(FILES)).commit_url)


def _evaluations(run: Run) -> str:
    if not run.evaluations:
        return "Nothing was measured."
    first, last = (run.evaluations[at]["held_out"] for at in (0, -1))
    begun, ended = first["tokens_per_forward"], last["tokens_per_forward"]
    rows = [(f"tokens per forward, {name}", begun[name], ended[name]) for name in ended]
    rows.append(("nats per slot", first["negative_log_likelihood"], last["negative_log_likelihood"]))
    rates = zip(first["hit_rates"], last["hit_rates"])
    rows += [(f"right at offset {place}, if all before it are", *pair) for place, pair in enumerate(rates, start=1)]
    lines = [f"| {what} | {before:.2f} | {after:.2f} |" for what, before, after in rows]
    return "\n".join(["| greedy decoding | before training | after |", "|---|---|---|", *lines])


def _effort(run: Run) -> str:
    if not run.steps:
        return ""
    last = run.steps[-1]
    return f"{last['step']} steps in {last['seconds'] / 60:.1f} minutes, to a loss of {last['loss']:.3f} per slot."


def speed_lines(rows: Sequence[tuple[str, float, float, float | None]]) -> str:
    """A table of speeds in Markdown; a row has method, tokens per second, speedup and tokens per forward."""
    lines = [
        f"| {method} | {rate:.1f} | {speedup:.2f} | {'' if per_forward is None else f'{per_forward:.2f}'} |"
        for method, rate, speedup, per_forward in rows
    ]
    head = ["| decoding | tokens/s | against plain | tokens per forward |", "|---|---|---|---|"]
    return "\n".join([*head, *lines])
