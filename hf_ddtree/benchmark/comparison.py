"""What became faster or slower between two reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .report import Report
from .sample_statistics import quartiles, sign_test
from .summary import Summary, is_of
from .tables import change_text, make_table, speed_text, with_notes, with_quartiles

# Settings without which speeds cannot be compared.
SETTINGS_OF_WORK = ("batch_size", "max_new_tokens", "prompts", "prompts_digest")
# Settings across which speeds may be compared, if it is said.
SETTINGS_TO_TELL = ("model", "drafters", "dtype", "seed")


def compare(before: Report, after: Report) -> Table:
    """A table of what became faster or slower between two reports, method by method.

    Changes are of the speeds on the same batch of prompts. Below the table stands what else differs, and which methods
    are in one report alone.

    Raises:
        ValueError: If the reports are of other prompts, batches or lengths, so that speeds cannot be compared.
    """
    settings, new_settings = before.about["settings"], after.about["settings"]
    if different := _differences(settings, new_settings, SETTINGS_OF_WORK):
        raise ValueError(
            f"The reports are not of the same work ({'; '.join(different)}), so their speeds cannot be compared. "
            "Measure both with the same prompts, `--limit`, `--batch-size` and `--max-new-tokens`."
        )
    notes = _differences(settings, new_settings, SETTINGS_TO_TELL)
    notes += _differences(before.about["machine"], after.about["machine"], list(before.about["machine"]))
    columns = (
        "method",
        "tokens/s\nbefore",
        "after",
        "change",
        "faster\non",
        "p",
        "tokens/\nforward\nbefore",
        "after",
        "same\nafter",
    )
    table = make_table(*columns)
    old = {(entry.method, entry.temperature): entry for entry in before.summaries()}
    new = {(entry.method, entry.temperature): entry for entry in after.summaries()}
    for key, entry in new.items():
        previous = old.get(key)
        if previous is None:
            notes.append(f"{entry.label} is only in the report after.")
            continue
        ratios = _ratios(before, after, entry)
        if previous.tokens_per_second is None or entry.tokens_per_second is None or not ratios:
            notes.append(f"{entry.label}: {entry.refused or previous.refused}")
            continue
        was, now = previous.tokens_per_second[1], entry.tokens_per_second[1]
        forwards = [
            "" if value is None else f"{value:.2f}"
            for value in (previous.tokens_per_forward, entry.tokens_per_forward)
        ]
        faster, slower = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
        cells: list[str | Text] = [entry.label, speed_text(was), speed_text(now)]
        cells += [with_quartiles(quartiles(ratios), change_text, dash=" .. "), f"{faster}/{len(ratios)}"]
        cells += [f"{sign_test(faster, slower):.1g}", *forwards]
        table.add_row(*cells, f"{entry.identical}/{entry.compared}" if entry.compared else "")
    notes += [f"{old[key].label} is only in the report before." for key in old if key not in new]
    return with_notes(table, notes)


def _ratios(before: Report, after: Report, entry: Summary) -> list[float]:
    """Speed after over speed before, on each batch that both have."""
    old, new = (
        {
            run["batch"]: run["tokens"] / run["seconds"]
            for run in report.runs
            if is_of(run, entry) and run.get("tokens")
        }
        for report in (before, after)
    )
    return [new[batch] / old[batch] for batch in sorted(old.keys() & new.keys())]


def _differences(before: dict[str, Any], after: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What two reports say of these; nothing of what one of them does not know."""
    return [
        f"{name} is {before[name]!r} before, {after[name]!r} after"
        for name in names
        if name in before and name in after and before[name] != after[name]
    ]
