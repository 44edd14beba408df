"""All rows of a batch, in lockstep or independent of each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..tree.draft_tree import DraftTree
from .sequences import LockstepRows


class Batch:
    """The rows of a batch in groups: those of one group are in lockstep, and groups are independent.

    Args:
        groups: One of all rows, or one per row.
    """

    def __init__(self, groups: Sequence[LockstepRows]) -> None:
        self.groups = list(groups)
        self.num_rows = sum(len(group.rows) for group in groups)

    @property
    def first(self) -> LockstepRows:
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
        return {row for group in self.groups for row, unfinished in zip(group.rows, group.unfinished) if unfinished}

    @property
    def padding(self) -> dict[int, int]:
        """The finished rows that standard decoding pads, and their padding token."""
        return {row: group.pad_token for group in self.groups for row, pads in zip(group.rows, group.padding) if pads}

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
        return [token for group in self.groups for token in group.emitted[-1]]

    def emitted_along(self, paths: Sequence[list[int]]) -> list[list[int]]:
        """For each row the tokens that its path's nodes emitted."""
        emitted: list[list[int]] = []
        for group in self.groups:
            first = len(group.emitted) - len(paths[group.rows[0]])
            emitted += [[tokens[place] for tokens in group.emitted[first:]] for place in range(len(group.rows))]
        return emitted

    def within_length(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Cuts off nodes too deep to be emitted under the length limit, whose positions are never reached."""
        trees = list(trees)
        for group in self.groups:
            if group.tokens_left is not None and not group.finished:
                for row in group.rows:
                    trees[row] = trees[row].limit_depth(group.tokens_left - 1)
        return trees

    def with_padding(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Replaces the trees of finished rows: by padding as deep as the others in lockstep, or by a root."""
        trees = list(trees)
        for group in self.groups:
            if group.finished:
                for row in group.rows:
                    trees[row] = DraftTree.root_only(group.emitted[-1][0])
            elif any(padding := group.padding):
                depth = max(trees[row].depth for row, pads in zip(group.rows, padding) if not pads)
                for row, pads in zip(group.rows, padding):
                    if pads:
                        root = int(trees[row].token_ids[0])
                        trees[row] = DraftTree.chain([root] + [group.pad_token] * depth)
        return trees

    def end_stream(self) -> None:
        """Tells the streamer that nothing follows."""
        for group in self.groups:
            group.end_stream()
