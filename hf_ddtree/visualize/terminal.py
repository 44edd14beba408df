"""Draws a draft tree in the terminal, whatever characters that has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from rich.tree import Tree

from ..tree.draft_tree import DraftTree
from ..validation import describe_type, require_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BARS = "▁▂▃▄▅▆▇█"
CHECK_MARK = "✓"
# What is drawn where the console's encoding lacks a character.
_REPLACEMENTS = str.maketrans({CHECK_MARK: "*", **{bar: str(height) for height, bar in enumerate(BARS, start=1)}})


class EncodableText:
    """Text for `rich` in characters that the console's encoding has: marks get simpler, others become escapes.

    Args:
        parts: Texts with their styles.
    """

    def __init__(self, *parts: tuple[str, str]) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(*((encodable(text, options.encoding), style) for text, style in self.parts))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, encodable(str(self), options.encoding))


def encodable(text: str, encoding: str) -> str:
    """The text in characters that an encoding has."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_REPLACEMENTS).encode(encoding, "backslashreplace").decode(encoding)
    return text


def draw_tree(
    tree: DraftTree,
    tokenizer: PreTrainedTokenizerBase | None = None,
    accepted_path: Sequence[int] = (),
    next_token_id: int | None = None,
) -> Tree:
    """Draws a tree for `rich.print`, each node with its token and the probability that the drafter gives to its path.

    Args:
        tree: What to draw.
        tokenizer: Gives the text of tokens; their ids are drawn without it.
        accepted_path: The nodes that the target accepted, which are marked.
        next_token_id: The target's own pick below the last of `accepted_path`, drawn as one more node.

    Raises:
        TypeError: If `tree` is no tree, or `tokenizer` none.
        ValueError: If `accepted_path` holds something else than nodes of the tree.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(
            f"`tree` must be a `DraftTree`, but is {describe_type(tree)}. Those of a call are "
            "`out.ddtree_stats.trees[round][row]`."
        )
    if tokenizer is not None:
        require_tokenizer(tokenizer)
    if wrong := [node for node in accepted_path if node not in range(len(tree))]:
        raise ValueError(
            f"`accepted_path` holds {wrong[0]!r}, but the tree has nodes 0 to {len(tree) - 1}. Those of a call are "
            "`out.ddtree_stats.accepted_paths[round][row]`."
        )
    parents = tree.parents.tolist()
    probabilities = tree.log_probs.exp().tolist()
    accepted = set(accepted_path)

    def token(token_id: int) -> str:
        return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))

    drawn: list[Tree] = []
    for node, token_id in enumerate(tree.token_ids.tolist()):
        style = "bold green" if node in accepted else "dim"
        if node == 0:
            drawn.append(Tree(EncodableText((token(token_id), style)), guide_style="dim"))
            continue
        mark = f" {CHECK_MARK}" if node in accepted else ""
        label = EncodableText((token(token_id), style), (f"  {probabilities[node]:.1%}", "dim"), (mark, style))
        drawn.append(drawn[parents[node]].add(label))
    if accepted_path and next_token_id is not None:
        drawn[accepted_path[-1]].add(
            EncodableText((token(next_token_id), "bold yellow"), ("  the target's pick", "dim"))
        )
    return drawn[0]
