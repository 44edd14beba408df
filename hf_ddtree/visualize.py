"""Draws a draft tree in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from .tree.draft_tree import DraftTree


def draw_tree(
    tree: DraftTree,
    tokenizer: PreTrainedTokenizerBase | None = None,
    accepted_path: Sequence[int] = (),
    next_token_id: int | None = None,
) -> Tree:
    """Draws a tree for `rich.print`, each node with its token and the probability that the drafter gave to its path.

    Args:
        tree: What to draw.
        tokenizer: Gives the text of tokens; their ids are drawn without it.
        accepted_path: The nodes that the target took, which are marked.
        next_token_id: The target's own pick below the last of `accepted_path`, drawn as one more node.
    """
    parents = tree.parents.tolist()
    probabilities = tree.log_probs.exp().tolist()
    accepted = set(accepted_path)

    def token(token_id: int) -> str:
        return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))

    drawn: list[Tree] = []
    for node, token_id in enumerate(tree.token_ids.tolist()):
        style = "bold green" if node in accepted else "dim"
        if node == 0:
            drawn.append(Tree(Text(token(token_id), style=style), guide_style="dim"))
            continue
        label = Text.assemble((token(token_id), style), (f"  {probabilities[node]:.1%}", "dim"))
        if node in accepted:
            label.append(" ✓", style)
        drawn.append(drawn[parents[node]].add(label))
    if accepted_path and next_token_id is not None:
        drawn[accepted_path[-1]].add(
            Text.assemble((token(next_token_id), "bold yellow"), ("  the target's pick", "dim"))
        )
    return drawn[0]
