"""`hf-ddtree demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from .options import DeviceMap, Dtype, Prompt, usage_error
from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..tree.draft_tree import DraftTree
    from .comparison import Contestant, Run


def demo(
    target: Annotated[
        str | None,
        typer.Option(
            help="A model of your own: a repository of the Hub or a folder.", show_default="the pair that ships"
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Its drafter: a repository of the Hub, a folder or `mtp`.", show_default="none: prompt lookup"
        ),
    ] = None,
    prompt: Prompt = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many of those that ship.")] = 3,
    budget: Annotated[int, typer.Option(min=1, help="Most nodes drafted in a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Sample on every prompt, with the same seed.")] = False,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Generate by standard decoding and by ddtree, side by side, and compare tokens and time.

    Without `--target` the pair that ships completes code that it has never seen.
    The exit status is 1 if a token differs in float32.
    """
    from transformers.utils import logging

    from .comparison import compare, conclude, encode, warm_up
    from .loading import choose_prompts

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = make_console()
    try:
        setting = _load(target, drafter, budget, dtype, device_map)
        chosen = choose_prompts(setting.tokenizer, prompt, prompts)
        warm_up(setting.model, encode(setting.model, setting.tokenizer, chosen[0][1]), setting.contestants)
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error

    def run(title: str, text: str, **options: Any) -> list[Run]:
        console.rule(Text(title, style="bold"))
        console.print(Text(text.strip("\n"), style="dim"), soft_wrap=True)
        console.print()
        inputs = encode(setting.model, setting.tokenizer, text)
        options["max_new_tokens"] = max_new_tokens
        return compare(console, setting.model, setting.tokenizer, inputs, setting.contestants, options)

    how = ", sampled, each with the same seed"
    runs = [
        run(f"{place} of {len(chosen)}: {title}{how * sample}", text, do_sample=sample, **setting.stopping)
        for place, (title, text) in enumerate(chosen, start=1)
    ]
    title, text = chosen[0]
    sampled = [] if sample else [run(f"{title}{how}", text, do_sample=True)]
    console.rule("[bold]one round's tree")
    _draw_best_round(console, setting.tokenizer, [of_prompt[1] for of_prompt in runs])
    console.rule("[bold]result")
    console.print(_result_table(setting.contestants, runs, sampled))
    conclude(console, setting.model, [*runs, *sampled])


class _Setting(NamedTuple):
    """What is compared: the target, and the methods, of which the first is standard decoding."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    contestants: list[Contestant]
    stopping: dict[str, Any]


def _load(target: str | None, drafter: str | None, budget: int, dtype: str, device_map: str | None) -> _Setting:
    from ..demo import END_OF_FUNCTION
    from .comparison import Contestant
    from .loading import load_pair

    model, tokenizer, loaded = load_pair(target, drafter, dtype, device_map)
    knobs = {"generation_strategy": "ddtree", "tree_budget": budget, "return_trees": True}
    lookup = Contestant("prompt lookup", "green", {**knobs, "tree_lookup": True})
    contestants = [Contestant("standard decoding", "cyan")]
    if loaded is not None:
        contestants.append(Contestant("ddtree", "green", {**knobs, "assistant_model": loaded}))
    stopping = {"stop_strings": list(END_OF_FUNCTION), "tokenizer": tokenizer} if target is None else {}
    return _Setting(model, tokenizer, [*contestants, lookup], stopping)


def _result_table(contestants: Sequence[Contestant], runs: list[list[Run]], sampled: list[list[Run]]) -> Table:
    table = Table("", "tokens/s", "speedup", "tokens per\nforward", "same\ntokens")
    for of_all, suffix in ((runs, ""), (sampled, ", sampled")):
        if not of_all:
            continue
        standard = [of_prompt[0] for of_prompt in of_all]
        for place, contestant in enumerate(contestants):
            own = [of_prompt[place] for of_prompt in of_all]
            lengths = [length for run in own if run.stats is not None for length in run.stats.accepted_lengths]
            same = sum(run.token_ids == other.token_ids for run, other in zip(own, standard))
            table.add_row(
                contestant.title + suffix,
                f"{_speed(own):.1f}",
                f"{_speed(own) / _speed(standard):.2f}x" if place else "",
                f"{sum(lengths) / len(lengths):.2f}" if lengths else "" if place else "1.00",
                f"{same} of {len(own)}" if place else "",
            )
    return table


def _speed(runs: list[Run]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def _draw_best_round(console: Console, tokenizer: PreTrainedTokenizerBase, runs: list[Run]) -> None:
    """Draws the round that accepted most of those whose path leaves the drafter's best chain, if any does."""
    from ..visualize import CHECK_MARK, draw_tree, encodable

    rounds = []
    for run in runs:
        if run.stats is None or run.stats.trees is None or run.stats.accepted_paths is None:
            continue
        roots = [int(trees[0].token_ids[0]) for trees in run.stats.trees]
        for trees, paths, next_root in zip(run.stats.trees, run.stats.accepted_paths, [*roots[1:], None]):
            if trees[0].num_drafted:
                rounds.append((trees[0], paths[0], next_root))
    if not rounds:
        console.print(
            "The output ended before a tree was drafted: the forward over the prompt gives the first token, and "
            "nothing was there to draft the others from."
        )
        return
    tree, path, next_token_id = max(rounds, key=lambda entry: (_leaves_best_chain(*entry[:2]), len(entry[1])))
    console.print(draw_tree(tree, tokenizer, path, next_token_id))
    console.print(
        f"[dim]Of {tree.num_drafted} drafted tokens, the target accepted {len(path) - 1} "
        f"({encodable(CHECK_MARK, console.encoding)}) and then picked its own, all in one forward. Percentages are "
        "the drafter's, for the whole path."
    )


def _leaves_best_chain(tree: DraftTree, path: list[int]) -> bool:
    """Whether some node of the path is not the most probable child of its parent, which comes first."""
    return any(tree.children(parent)[0] != child for parent, child in zip(path, path[1:]))
