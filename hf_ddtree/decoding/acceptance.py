"""Which path of a tree the target takes.

The target's own choice is made at each visited node, exactly as standard decoding makes it, and the path goes on to
the child that holds the chosen token. So the emitted tokens are those of standard decoding under greedy search, and
have their distribution under sampling: a deterministic tree needs no rejection sampling, and as the path goes on with
probability equal to the children's total mass, no lossless scheme accepts more.

Rows in lockstep take one step at a time, all of them, as the rows of a batch do in standard decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..tree.draft_tree import DraftTree
from .choosing import Chooser
from .sequences import RowGroup


def accept_in_lockstep(
    trees: Sequence[DraftTree], logits: Tensor, chooser: Chooser, group: RowGroup, paths: Sequence[list[int]]
) -> None:
    """Walks from the roots for as long as every row's tree holds what is emitted, and emits every choice.

    Args:
        trees: The trees that were verified; their roots are the last emitted tokens.
        logits: `(rows, n, vocab)`, the target's logits after each node.
        chooser: Makes the target's choices.
        group: Takes the emitted tokens.
        paths: For each row the root alone; the visited nodes are appended one by one, so that they are right even when
            a processor, a streamer or a stopping criterion raises.
    """
    chooser.set_logits(logits)
    while True:
        emitted = None if chooser.chooses_per_node else group.token_ids
        tokens = group.append(chooser.choose([path[-1] for path in paths], emitted))
        if group.finished:
            return
        children = [tree.child_with_token(path[-1], token) for tree, path, token in zip(trees, paths, tokens)]
        if None in children:
            return
        for path, child in zip(paths, children):
            assert child is not None
            path.append(child)
