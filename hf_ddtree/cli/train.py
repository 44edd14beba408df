"""`hf-ddtree train`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.live import Live
from rich.text import Text

from .loading import json_object
from .options import DeviceMap, Dtype, Target, check_repository, usage_error
from .progress import PlainProgress
from .terminal import make_console
from .training_table import LiveTable, line_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters import DFlashDraftModel
    from ..training import Document, TrainingConfig
    from ..training.self_text import WritingProgress

# What is measured at the end, besides standard decoding.
METHODS = ("chain", "tree:16", "auto")
# Prompts on which a drafter is looked at before it is trained on.
LOOKED_AT = 4


def train(
    target: Target,
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="A folder for everything. The same command goes on with what is there."),
    ],
    prompts: Annotated[
        str | None, typer.Option(help="Prompts that the target answers: a JSONL or text file, a folder, or a dataset.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(help="Texts that are taken as they are: a JSONL or text file, a folder, or a dataset."),
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(help="A folder to which `generate()` or `hf-ddtree serve` has recorded what this target said."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="A drafter to go on from.", show_default="from scratch")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="Of a DFlash drafter in `--from`, train this head alone, in minutes: dflash2 or dspark."),
    ] = None,
    kind: Annotated[str, typer.Option(help="Without `--from`: dflash, dflash2, dspark or jetspec.")] = "dflash2",
    layers: Annotated[int, typer.Option(min=1, help="Without `--from`: layers of the drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Without `--from`: slots of a block.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizers.")] = 1000,
    minutes: Annotated[float | None, typer.Option(help="Train so long, in place of `--steps`.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Its peak.", show_default="1e-3; with `--from` 2e-4; with `--head` 5e-3")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step, for each process.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 1024,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks in a row.")] = 64,
    loss: Annotated[str, typer.Option(help="cross_entropy, total_variation or lk.")] = "cross_entropy",
    weights: Annotated[str, typer.Option(help="How positions weigh: d_pace, decay or uniform.")] = "d_pace",
    distribution_share: Annotated[
        float, typer.Option(help="How much of the target's distribution is learnt, in place of its tokens.")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    sampled_share: Annotated[float, typer.Option(help="Share of the answers that is sampled, not greedy.")] = 0.25,
    temperature: Annotated[float, typer.Option(help="Of the answers that are sampled.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are answered together.")] = 8,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts, or texts, that are kept to measure on.")] = 8,
    template_options: Annotated[
        str, typer.Option(help="Arguments of the chat template as JSON, such as '{\"enable_thinking\": false}'.")
    ] = "{}",
    skip_bad_lines: Annotated[bool, typer.Option(help="Leave out lines that cannot be used.")] = False,
    mixed_precision: Annotated[str, typer.Option(help="Of the drafter's products: no or bf16.")] = "no",
    push_to_hub: Annotated[
        str | None, typer.Option(help="A repository of the Hub to upload the drafter to, with its card.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard as well, in OUTPUT/tensorboard.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Train a drafter for a target on what the target writes, and measure what it gives.

    Killed or stopped at any time, the same command goes on. The drafter is in
    OUTPUT/drafter, in the layout of published ones, the log in log.jsonl, and
    what was measured on held-out prompts in bench/report.json.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console, messages = make_console(), make_console(stderr=True)
    with _errors_as_messages(messages, output):
        target = _target_folder(target)
        _check_names(target, start, head, has_texts=any((prompts, texts, recorded)))
        reading = _reading(template_options, skip_bad_lines, messages)
        from ..drafters.zlab.writing import published_config
        from ..training import TrainingConfig
        from ..training.data import read_documents, read_prompts

        config = TrainingConfig(
            steps=None if minutes is not None else steps,
            minutes=minutes,
            rows=rows,
            anchors=anchors,
            learning_rate=learning_rate or (5e-3 if head is not None else 1e-3 if start is None else 2e-4),
            loss=loss,  # type: ignore[arg-type]
            weights=weights,  # type: ignore[arg-type]
            distribution_share=distribution_share,
            seed=seed,
        )
        run = _Run(output, _accelerator(mixed_precision, output if tensorboard else None), console, messages)
        model, tokenizer = _load(target, dtype, device_map, run.accelerator)
        if start is None:
            drafter = _new_drafter(model, tokenizer, kind, layers, block_size, length, seed)
        else:
            drafter = _loaded_drafter(model, start, head, seed)
        published_config(drafter.config)
        documents = [] if texts is None else read_documents(texts, tokenizer, **reading)
        said = [] if recorded is None else _recorded(run, model, drafter, recorded, length, reading)
        measured: list[list[int]] = []
        if prompts is not None:
            measured, learnt = _split(read_prompts(prompts, tokenizer, **reading), held_out, "prompts")
        elif said:
            evaluated, said = _split_texts(said, held_out)
            measured = [document.prompt() for document in evaluated]
        else:
            evaluated, documents = documents[:held_out], documents[held_out:]
        documents = [*documents, *said]
        if measured and start is not None:
            _warn_of_faults(run, model, drafter, tokenizer, measured)
        if prompts is not None:
            writing: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
            writing["drafter"] = drafter if start is not None else None
            sampling = {"sampled_share": sampled_share, "temperature": temperature}
            evaluated, answers = _answers(run, model, measured, learnt, writing, sampling)
            documents = [*documents, *answers]
        _train(run, model, drafter, documents, evaluated, config, length)
        speeds = _measure(run, model, tokenizer, measured, max_new_tokens) if measured else ""
        if run.accelerator.is_main_process:
            _publish(run, drafter, config, target, start, speeds, push_to_hub)


class _Run(NamedTuple):
    """Where a run is, and whom it tells."""

    output: Path
    accelerator: Accelerator
    console: Console
    messages: Console


@contextmanager
def _errors_as_messages(messages: Console, output: Path) -> Iterator[None]:
    """Ends the command with a message where it is stopped or an argument is wrong."""
    try:
        yield
    except KeyboardInterrupt:
        messages.print(f"Stopped. The same command goes on with what is in {output}.")
        raise typer.Exit(code=130) from None
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error


def _check_names(target: str, start: str | None, head: str | None, has_texts: bool) -> None:
    if not has_texts:
        raise ValueError(
            "there is nothing to train on. Give `prompts` for the target to answer, `texts`, or `recorded`."
        )
    if head is not None and start is None:
        raise ValueError("`head` goes on top of a drafter that is trained already. Name it with `start`.")
    check_repository("target", target, "TARGET")
    if start is not None:
        check_repository("drafter", start, "--from")


def _reading(template_options: str, skip_bad_lines: bool, messages: Console) -> dict[str, Any]:
    """How files are read, as `read_documents` and `read_prompts` take it."""
    return {
        "template_options": json_object("template_options", template_options),
        "on_bad_line": "skip" if skip_bad_lines else "raise",
        "on_skip": lambda wrong: messages.print(Text(f"left out: {wrong}")),
    }


def _accelerator(mixed_precision: str, tensorboard: Path | None) -> Accelerator:
    """Devices and processes; with a folder for TensorBoard's log, if there is to be one."""
    from accelerate import Accelerator

    if tensorboard is None:
        return Accelerator(mixed_precision=mixed_precision)
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError("`tensorboard` needs the package of that name: pip install tensorboard.")
    accelerator = Accelerator(mixed_precision=mixed_precision, log_with="tensorboard", project_dir=tensorboard)
    accelerator.init_trackers("tensorboard")
    return accelerator


def _load(
    target: str, dtype: str, device_map: str | None, accelerator: Accelerator
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, on the accelerator's device unless a device map says otherwise, and its tokenizer."""
    from ..demo import demo_folders
    from .loading import load_target

    is_demo = target == demo_folders()[0]
    model, tokenizer = load_target(target, "float32" if is_demo and dtype == "auto" else dtype, device_map)
    if device_map is None:
        model.to(accelerator.device)
    return model, tokenizer


def _split(texts: list[Any], held_out: int, source: str) -> tuple[list[Any], list[Any]]:
    """Texts to measure on, evenly spaced, and the others to learn from."""
    if len(texts) <= held_out:
        raise ValueError(
            f"`{source}` holds {len(texts)} texts, of which `held_out`, {held_out}, are kept to measure on. Give "
            "more, or keep fewer."
        )
    every = len(texts) // held_out
    learnt = [text for number, text in enumerate(texts) if number % every or number // every >= held_out]
    return texts[::every][:held_out], learnt


def _split_texts(said: list[Document], held_out: int) -> tuple[list[Document], list[Document]]:
    """The same of recorded answers. Prompts that are measured on are not learnt from, however often they came."""
    by_prompt = {tuple(document.prompt()): document for document in said}
    measured, _ = _split([document for prompt, document in by_prompt.items() if prompt], held_out, "recorded")
    prompts = {tuple(document.prompt()) for document in measured}
    return measured, [document for document in said if tuple(document.prompt()) not in prompts]


def _recorded(
    run: _Run,
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    folder: str,
    length: int,
    reading: dict[str, Any],
) -> list[Document]:
    """The recorded answers, and what there is to say of them."""
    from ..training.data import read_recorded

    on_bad = {name: reading[name] for name in ("on_bad_line", "on_skip")}
    said = read_recorded(folder, model, drafter.config.target_layer_ids, **on_bad)
    known, longer = sum(one.features is not None for one in said), sum(len(one) > length for one in said)
    answers = sum(int(one.is_counted.sum()) for one in said)
    text = (
        f"{len(said)} recorded texts with {answers} tokens of answers, {known} of them with features for this drafter."
    )
    if longer:
        text += f" {longer} are longer than `--length` and are cut."
    if run.accelerator.is_main_process:
        run.messages.print(Text(text))
    return said


def _warn_of_faults(
    run: _Run,
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
) -> None:
    """Says what is wrong with a drafter before it is trained on: a setting that is wrong would be trained around."""
    from ..training.doctor import diagnose

    if not run.accelerator.is_main_process or (run.output / "log.jsonl").exists():
        return
    with run.messages.status("Looking for known faults of the drafter."):
        try:
            found = diagnose(model, drafter, tokenizer, prompts[:LOOKED_AT])
        except ValueError as error:
            run.messages.print(Text(f"The drafter was not looked at: {error}"))
            return
    if found.fault is not None or found.parts:
        run.messages.print(Text("\n".join(["Look at this before training:", *found.findings()])))


def _answers(
    run: _Run,
    model: PreTrainedModel,
    measured: list[list[int]],
    learnt: list[list[int]],
    writing: dict[str, Any],
    sampling: dict[str, Any],
) -> tuple[list[Document], list[Document]]:
    """The target's answers to both kinds of prompts: greedy ones to measure on, a mix to learn from."""
    from ..training.self_text import write_answers

    with Live(console=run.messages, transient=True) as live:

        def telling() -> dict[str, Any]:
            lines = PlainProgress(run.messages)

            def tell(progress: WritingProgress) -> None:
                live.update(_writing(progress))
                if run.accelerator.is_main_process:
                    lines.tell(progress.done / progress.total, _answered(progress))

            return {**writing, "on_progress": tell}

        for _ in range(2):  # the second time for what other processes have written meanwhile
            evaluated = write_answers(model, measured, run.output / "held_out", sampled_share=0.0, **telling())
            answers = write_answers(model, learnt, run.output / "answers", **sampling, **telling())
            run.accelerator.wait_for_everyone()
    return evaluated, answers


def _train(
    run: _Run,
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    documents: list[Document],
    evaluated: list[Document],
    config: TrainingConfig,
    length: int,
) -> None:
    """Trains the drafter, shows how it goes, and saves it."""
    from ..training import DrafterTrainer, Evaluator, PackedDocuments, save_drafter

    if run.accelerator.is_main_process:
        _tell_memory(run.messages, model, drafter, config, length, run.accelerator.mixed_precision == "bf16")
    table, lines = LiveTable(), PlainProgress(run.messages)

    def tell(entry: dict[str, Any]) -> None:
        live.update(table.add(entry, trainer.progress))
        lines.tell(trainer.progress, line_of(entry, trainer.progress), is_rare="held_out" in entry)

    with Live(table.render(), console=run.messages, transient=True) as live:
        trainer = DrafterTrainer(
            model,
            drafter,
            PackedDocuments(documents, length, config.seed),
            config,
            evaluator=Evaluator(model, evaluated, config.tree_budgets, length),
            output_dir=run.output,
            accelerator=run.accelerator,
            on_log=tell,
        )
        if trainer.step and run.accelerator.is_main_process:
            run.messages.print(f"Going on after step {trainer.step}.")
        trainer.train()
    if run.accelerator.is_main_process:
        save_drafter(drafter, run.output / "drafter")
        run.console.print(table.render())
        run.console.print(Text(f"\nThe drafter is in {run.output / 'drafter'}.\n"), soft_wrap=True)
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def _tell_memory(
    messages: Console,
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    config: TrainingConfig,
    length: int,
    in_bfloat16: bool,
) -> None:
    """Says what a step needs before the first one is made."""
    import torch

    from ..training.step_memory import step_memory

    told = step_memory(drafter, model, config, length, torch.bfloat16 if in_bfloat16 else None)
    parts = {"target": told.target, "drafter": told.drafter, "optimizers": told.optimizers, "a step": told.on_its_way}
    sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    messages.print(
        f"Memory in each process: {told.total / 2**30:.2f} GiB ({sizes}). A step grows with `--rows`, `--length` and "
        "`--anchors`."
    )


def _writing(progress: WritingProgress) -> Text:
    left = "" if progress.seconds_left is None else f", {progress.seconds_left / 60:.1f} minutes left"
    return Text(f"{_answered(progress)}{left}")


def _answered(progress: WritingProgress) -> str:
    return (
        f"The target answers: {progress.done} of {progress.total} prompts, {progress.tokens_per_second:.0f} tokens/s"
    )


def _target_folder(target: str) -> str:
    from ..demo import demo_folders

    return demo_folders()[0] if target == "demo" else target


def _new_drafter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    layers: int,
    block_size: int,
    length: int,
    seed: int,
) -> DFlashDraftModel:
    """A drafter from scratch."""
    import torch

    from ..training import find_mask_token, new_drafter

    vocab_size = model.config.get_text_config().vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return new_drafter(
            model,
            find_mask_token(tokenizer, vocab_size),
            kind,  # type: ignore[arg-type]
            layers=layers,
            block_size=block_size,
            window=length,
        )


def _loaded_drafter(model: PreTrainedModel, start: str, head: str | None, seed: int) -> DFlashDraftModel:
    """The drafter to go on from, in float32, or the one with a head on top of it."""
    import torch

    from ..drafter_kinds import load_drafter
    from ..drafters import DFlashDraftModel
    from ..training.head_alone import add_head

    loaded = load_drafter(start, target_model=model, dtype=torch.float32)
    if not isinstance(loaded, DFlashDraftModel):
        raise ValueError(
            f"{start!r} is a `{type(loaded).__name__}`, but only drafters of the DFlash family can be trained."
        )
    if head is None:
        return loaded
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return add_head(loaded, head)  # type: ignore[arg-type]


def _measure(
    run: _Run,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> str:
    """Decodes the held-out prompts with the drafter as it was saved; returns the speeds in Markdown."""
    from ..benchmark import benchmark, make_methods
    from ..drafter_kinds import load_drafter
    from ..training.card import speed_lines

    saved = load_drafter(run.output / "drafter", target_model=model)
    methods, lines = make_methods(METHODS, {"drafter": saved}), PlainProgress(run.messages)
    report = benchmark(
        *(model, tokenizer, prompts, methods),
        max_new_tokens=max_new_tokens,
        output_dir=run.output / "bench",
        on_run=lambda done, total: lines.tell(done / total, f"Decoding with the drafter: {done} of {total} runs"),
    )
    if (run.output / "bench" / "report.json").exists():
        run.console.print(report.table())
    rows = [
        (entry.method, entry.tokens_per_second[1], (entry.speedup or (1.0, 1.0, 1.0))[1], entry.tokens_per_forward)
        for entry in report.summaries()
        if entry.tokens_per_second is not None
    ]
    return speed_lines(rows)


def _publish(
    run: _Run,
    drafter: DFlashDraftModel,
    config: TrainingConfig,
    target: str,
    start: str | None,
    speeds: str,
    repository: str | None,
) -> None:
    """Writes the drafter's card, and uploads both if a repository is named."""
    from ..training.card import push_drafter, write_card
    from ..training.report import read_run

    write_card(run.output / "drafter", read_run(run.output), drafter.config, config, target, start, speeds)
    if repository is not None:
        run.console.print(
            f"Uploaded: {push_drafter(run.output / 'drafter', repository)}", soft_wrap=True, markup=False
        )
