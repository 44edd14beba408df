"""A generation as one HTML file that plays it round by round, without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import DDTreeOutput, DDTreeStats
from ..tree.draft_tree import DraftTree
from ..validation import describe_type, require_tokenizer
from .run_facts import run_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAGE = files("hf_ddtree") / "visualize" / "page"
REPLACEMENT_CHARACTER = "\ufffd"
# Tokens that are decoded together, so that spaces and characters of several tokens come out right.
DECODED_TOGETHER = 16
DIGITS = 4


@dataclass(frozen=True)
class Lane:
    """One method in a race.

    Attributes:
        title: What it is called.
        token_ids: The new tokens, in order.
        seconds: When each of them came, in seconds since the call of `generate()`.
    """

    title: str
    token_ids: Sequence[int]
    seconds: Sequence[float]


def save_html(
    output: DDTreeOutput,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    row: int = 0,
    race: Sequence[Lane] = (),
    *,
    model: PreTrainedModel | None = None,
    drafter: PreTrainedModel | str | None = None,
) -> None:
    """Writes a page that plays a generation round by round: its text, each draft tree, and what was accepted.

    The file holds all that it needs, and loads nothing.

    Args:
        output: What `generate(..., return_dict_in_generate=True, return_trees=True)` returned.
        tokenizer: Gives the text of tokens.
        path: Where to write the file.
        row: Which row of the batch.
        race: Methods of decoding with the times of their tokens, which the page plays on one clock.
        model: The target. With it the page says what it is, where it is, and which versions are installed.
        drafter: Its drafter, which the page then names as well; a text such as `"prompt lookup"` stands for itself.

    Raises:
        ValueError: If the output has no trees or no such row.
        TypeError: If `tokenizer` is none, or `race` holds something else than lanes.
        OSError: If the folder of `path` does not exist, or the file cannot be written.
    """
    stats = _stats_with_trees(output)
    if not isinstance(row, int) or not 0 <= row < len(output.sequences):
        last = len(output.sequences) - 1
        raise ValueError(f"`row` is {row!r}, but must be {f'from 0 to {last}' if last else '0'}, a row of the output.")
    require_tokenizer(tokenizer)
    if wrong := [lane for lane in race if not isinstance(lane, Lane)]:
        raise TypeError(f"`race` must hold `hf_ddtree.visualize.Lane`, but holds {describe_type(wrong[0])}.")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"The folder of `path`, {str(Path(path).parent)!r}, does not exist. Make it first.")
    generation = _generation(output, stats, tokenizer, row, race)
    generation["facts"] = run_facts(model, drafter)
    Path(path).write_text(_page(generation), encoding="utf-8")


def text_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with the last of them.

    Args:
        tokenizer: Gives the text.
        token_ids: The tokens.
        before: Those before them, of which the last is enough: some tokenizers drop a space where a text begins.
    """
    all_ids = [*before, *token_ids]
    pieces, start, known = [], 0, tokenizer.decode(list(before)) if before else ""
    for end in range(len(before) + 1, len(all_ids) + 1):
        text = tokenizer.decode(all_ids[start:end])
        if text.endswith(REPLACEMENT_CHARACTER) and end < len(all_ids):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        known = text
        if end - start > DECODED_TOGETHER:
            start = end - 1
            known = tokenizer.decode(all_ids[start:end])
    return pieces


def _stats_with_trees(output: DDTreeOutput) -> DDTreeStats:
    stats = getattr(output, "ddtree_stats", None)
    if stats is None or stats.trees is None or stats.accepted_paths is None:
        raise ValueError(
            f"`output`, {describe_type(output)}, holds no trees. Pass `return_dict_in_generate=True, "
            'return_trees=True` to `generate()` with `generation_strategy="ddtree"`, and its output here.'
        )
    return stats


def _generation(
    output: DDTreeOutput,
    stats: DDTreeStats,
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    race: Sequence[Lane],
) -> dict[str, Any]:
    """All that the page shows, in types that JSON knows."""
    prompt, new_tokens = _split(output, stats, row)
    while prompt and prompt[0] == tokenizer.pad_token_id:
        del prompt[0]
    rounds, emitted = [], 1
    assert stats.trees is not None and stats.accepted_paths is not None
    for index, (trees, paths) in enumerate(zip(stats.trees, stats.accepted_paths)):
        if not paths[row]:
            break
        emitted += len(paths[row])
        target = None if stats.target_probabilities is None else stats.target_probabilities[index][row]
        rounds.append(_round(trees[row], target, paths[row], new_tokens[emitted - 1]))
    used = sorted({token for of_round in rounds for token in (*of_round["tokens"], of_round["next"])})
    return {
        "prompt": tokenizer.decode(prompt) if prompt else "",
        "pieces": text_pieces(tokenizer, new_tokens, prompt[-1:]),
        "texts": {str(token): tokenizer.decode([token]) for token in used},
        "rounds": rounds,
        "race": [
            {
                "title": lane.title,
                "pieces": text_pieces(tokenizer, lane.token_ids, prompt[-1:]),
                "seconds": _rounded(lane.seconds),
            }
            for lane in race
        ],
    }


def _split(output: DDTreeOutput, stats: DDTreeStats, row: int) -> tuple[list[int], list[int]]:
    """A row's prompt and its new tokens: one of the prefill, and as many per round as its path has nodes."""
    assert stats.accepted_paths is not None
    emitted = [1 + sum(len(paths[other]) for paths in stats.accepted_paths) for other in range(len(output.sequences))]
    tokens = output.sequences[row].tolist()
    start = len(tokens) - max(emitted)
    return tokens[:start], tokens[start : start + emitted[row]]


def _round(tree: DraftTree, target: Sequence[float] | None, path: Sequence[int], next_token: int) -> dict[str, Any]:
    parents = tree.parents.tolist()
    log_probs = tree.log_probs.tolist()
    drafter = [1.0] + [math.exp(own - log_probs[parent]) for own, parent in zip(log_probs[1:], parents[1:])]
    return {
        "tokens": tree.token_ids.tolist(),
        "parents": parents,
        "drafter": _rounded(drafter),
        "target": None if target is None else _rounded(target),
        "path": list(path),
        "next": next_token,
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values]


def _page(generation: dict[str, Any]) -> str:
    parts = {name: (PAGE / f"replay.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    # Without `<` no text can end the element that holds the data.
    data = json.dumps(generation, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = parts["html"].replace("{{css}}", parts["css"]).replace("{{js}}", parts["js"])
    return page.replace("{{data}}", data)
