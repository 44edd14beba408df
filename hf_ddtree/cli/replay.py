"""`hf-ddtree replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DeviceMap, Dtype, Prompt, usage_error
from .terminal import make_console

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .comparison import Contestant


def replay(
    output: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("replay.html"),
    target: Annotated[str, typer.Option(help="A repository of the Hub, a folder, or `demo`.")] = "demo",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Its drafter: a repository of the Hub, a folder or `mtp`.", show_default="none: prompt lookup"
        ),
    ] = None,
    prompt: Prompt = None,
    budget: Annotated[int, typer.Option(min=1, help="Most nodes drafted in a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Sample, each method with the same seed.")] = False,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Write a page that plays a generation round by round, and races standard decoding, a chain and a tree.

    The page is one file that needs no network. The three are run one after the other, each token with the time at
    which it came. The exit status is 1 if a token differs in float32.
    """
    if not output.parent.is_dir():
        raise typer.BadParameter(f"The folder {str(output.parent)!r} does not exist.", param_hint="--output")
    from transformers.utils import logging

    from ..visualize import Lane, save_html
    from .comparison import conclude, encode, run_once, warm_up
    from .loading import choose_prompts, load_pair
    from .streaming import Timekeeper

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = make_console()
    try:
        model, tokenizer, loaded = load_pair(target, drafter, dtype, device_map)
        ((_, text),) = choose_prompts(tokenizer, prompt, 1)
        inputs, contestants = encode(model, tokenizer, text), _contestants(loaded, budget)
        warm_up(model, inputs, contestants)
    except (ImportError, OSError, ValueError) as error:
        raise usage_error(error) from error
    runs, lanes = [], []
    for contestant in contestants:
        clock = Timekeeper()
        run, out = run_once(model, inputs, contestant, {"max_new_tokens": max_new_tokens, "do_sample": sample}, clock)
        console.print(f"{contestant.title}: {run.summary}")
        runs.append(run)
        lanes.append(Lane(contestant.title, run.token_ids, clock.seconds))
    save_html(out, tokenizer, output, race=lanes, model=model, drafter=loaded or "prompt lookup")
    console.print(f"Written to {output}: open it in a browser.", soft_wrap=True, markup=False)
    conclude(console, model, [runs])


def _contestants(drafter: PreTrainedModel | None, budget: int) -> list[Contestant]:
    """Standard decoding, a chain and a tree; the tree comes last and keeps its rounds."""
    from .comparison import Contestant

    drafting: dict[str, Any] = {"tree_lookup": True} if drafter is None else {"assistant_model": drafter}
    knobs = {"generation_strategy": "ddtree", "tree_budget": budget, **drafting}
    return [
        Contestant("standard decoding", "cyan"),
        Contestant("chain", "green", {**knobs, "tree_shape": "chain"}),
        Contestant("tree", "green", {**knobs, "return_trees": True}),
    ]
