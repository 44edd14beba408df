"""All rows of a batch, in lockstep or independent of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..tree.draft_tree import DraftTree
from .sequences import RowGroup


class Batch:
    """The rows of a batch in groups: those of one group are in lockstep, and groups are independent.

    Args:
        groups: One of all rows, or one per row.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = list(groups)
        self.num_rows = sum(len(group.indices) for group in groups)

    @property
    def first(self) -> RowGroup:
        """The first group. If scores or hidden states are kept, there is only this group."""
        return self.groups[0]

    @property
    def finished(self) -> bool:
        """Whether all rows are finished."""
        return all(group.finished for group in self.groups)

    @property
    def has_finished_group(self) -> bool:
        """Whether some group takes no more tokens."""
        return any(group.finished for group in self.groups)

    @property
    def unfinished_rows(self) -> set[int]:
        """Indices of the rows that are not finished."""
        return {row for group in self.groups for row, unfinished in zip(group.indices, group.unfinished) if unfinished}

    @property
    def num_emitted(self) -> list[int]:
        """How many tokens each row has emitted, padding left out."""
        return [count for group in self.groups for count in group.num_emitted]

    @property
    def pad_tokens(self) -> dict[int, int]:
        """The finished rows that standard decoding pads, and their padding token."""
        return {
            row: group.pad_token
            for group in self.groups
            for row, is_padded in zip(group.indices, group.is_padded)
            if is_padded
        }

    @property
    def tokens_left(self) -> int | None:
        """Most tokens that a row may still emit; None if no length is set."""
        left = [group.tokens_left for group in self.groups if not group.finished]
        known = [count for count in left if count is not None]
        return max(known, default=0) if len(known) == len(left) else None

    def token_ids(self, pad_token: int = 0, pad_left: bool = True) -> Tensor:
        """`(batch, length)` int64, the tokens of all rows; shorter ones are padded."""
        if len(self.groups) == 1:
            return self.first.token_ids
        rows = [group.token_ids[0] for group in self.groups]
        length = max(map(len, rows))
        missing = [length - len(row) for row in rows]
        sides = [(count, 0) if pad_left else (0, count) for count in missing]
        return torch.stack([pad(row, side, value=pad_token) for row, side in zip(rows, sides)])

    def last_tokens(self) -> list[int]:
        """The last token of every row, as the host knows it."""
        return [token for group in self.groups for token in group.steps[-1]]

    def emitted_along(self, paths: Sequence[list[int]]) -> list[list[int]]:
        """For each row the tokens that its path's nodes emitted."""
        emitted: list[list[int]] = []
        for group in self.groups:
            first = len(group.steps) - len(paths[group.indices[0]])
            emitted += [[tokens[place] for tokens in group.steps[first:]] for place in range(len(group.indices))]
        return emitted

    def within_length(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Cuts off nodes too deep to be emitted under the length limit, whose positions are never reached."""
        trees = list(trees)
        for group in self.groups:
            if group.tokens_left is not None and not group.finished:
                for row in group.indices:
                    trees[row] = trees[row].limit_depth(group.tokens_left - 1)
        return trees

    def with_padding(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Replaces the trees of finished rows: by padding as deep as the others in lockstep, or by a root."""
        return [
            tree
            for group in self.groups
            for tree in _with_padding(group, trees[group.indices[0] : group.indices[-1] + 1])
        ]

    def sequences(self) -> Tensor:
        """`(batch, length)` int64, the tokens of all rows as `generate()` returns them, padded at the right."""
        return self.token_ids(self.first.pad_token, pad_left=False).clone()

    def details(self) -> dict[str, Any]:
        """The fields of `generate()`'s output that are made from rows: sequences, and what is kept per token."""
        kept = {name: getattr(self.first, name) for name in ("scores", "logits", "hidden_states", "attentions")}
        return {"sequences": self.sequences()} | {
            name: None if of_tokens is None else tuple(of_tokens) for name, of_tokens in kept.items()
        }

    def end_stream(self) -> None:
        """Tells the streamer that nothing follows."""
        for group in self.groups:
            group.end_stream()


def _with_padding(group: RowGroup, trees: Sequence[DraftTree]) -> list[DraftTree]:
    """The trees of a group's rows, with those of finished rows replaced."""
    roots = group.steps[-1]
    if group.finished:
        return [DraftTree.root_only(root) for root in roots]
    is_padded = group.is_padded
    if not any(is_padded):
        return list(trees)
    depth = max(tree.depth for tree, pads in zip(trees, is_padded) if not pads)
    return [
        DraftTree.chain([root] + [group.pad_token] * depth) if pads else tree
        for root, tree, pads in zip(roots, trees, is_padded)
    ]
