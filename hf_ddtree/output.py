"""The output of `generate()`: that of standard decoding, and statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from .tree.draft_tree import DraftTree

STAGES = ("draft", "build", "verify", "accept", "commit")


@dataclass
class DDTreeStats:
    """Statistics of a `generate()` call.

    Attributes:
        target_forwards: Forwards of the target, the prefill included.
        draft_forwards: Forwards of the drafter.
        accepted_lengths: Tokens emitted by each round, one entry per unfinished row. The prefill's token is not
            counted.
        tree_sizes: Drafted nodes of each round's trees, the root excluded, one entry per unfinished row.
        stage_seconds: Time in each stage, summed over all rounds: draft, build, verify, accept, commit. On a GPU the
            host's time: work that is still queued counts where the host waits for it.
        trees: The trees of each round, one per row, if `return_trees` asked for them.
        accepted_paths: For each of `trees`, the accepted nodes from the root on; empty for a finished row.
    """

    target_forwards: int = 0
    draft_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    trees: list[list[DraftTree]] | None = None
    accepted_paths: list[list[list[int]]] | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of tokens that a row emits per verifying forward of the target."""
        return sum(self.accepted_lengths) / max(1, len(self.accepted_lengths))

    def count(self, trees: list[DraftTree], paths: list[list[int]]) -> None:
        """Counts a round: its trees and the accepted paths, one per row, empty for a finished row."""
        self.target_forwards += 1
        for tree, path in zip(trees, paths):
            if path:
                self.accepted_lengths.append(len(path))
                self.tree_sizes.append(tree.num_drafted)
        if self.trees is not None and self.accepted_paths is not None:
            self.trees.append(trees)
            self.accepted_paths.append(paths)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds[name] += time.perf_counter() - start


@dataclass
class DDTreeOutput(GenerateDecoderOnlyOutput):
    """The output of `generate(return_dict_in_generate=True)`: that of standard decoding, and two more fields.

    Attributes:
        ddtree_stats: Statistics of the call.
        draft_state: The drafter's state. Pass it on together with the cache to continue the sequences.
    """

    ddtree_stats: DDTreeStats | None = None
    draft_state: Any = None
