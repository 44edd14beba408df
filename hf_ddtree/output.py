"""What `generate()` returns: plain decoding's output, and what tree decoding did."""

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
    """What a `generate()` call did.

    Attributes:
        target_forwards: Forwards of the target, the prefill included.
        draft_forwards: Forwards of the drafter.
        accepted_lengths: Tokens emitted by each round, an entry a row that went on; the prefill's token is in none.
        tree_sizes: Drafted nodes of each round's trees, the root excluded, an entry a row that went on.
        stage_seconds: Time in each stage of all rounds together: draft, build, verify, accept, commit. On a GPU the
            host's time: work that is still queued counts where the host waits for it.
        trees: The trees of each round, one a row, if `return_trees` asked for them.
        accepted_paths: For each of `trees`, its nodes that the target took, from the root on; empty for a row that has
            finished.
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
        """Tokens emitted by each forward of the target that verified trees, on average over rows."""
        return sum(self.accepted_lengths) / max(1, len(self.accepted_lengths))

    def count(self, trees: list[DraftTree], paths: list[list[int]]) -> None:
        """Counts a round: its trees and the accepted paths, one a row, empty for a row that has finished."""
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
    """What `generate()` returns with `return_dict_in_generate=True`: as in plain decoding, and two fields more.

    Attributes:
        ddtree_stats: What the call did.
        draft_state: What the drafter knows of the sequences. Pass it on together with the cache when they go on.
    """

    ddtree_stats: DDTreeStats | None = None
    draft_state: Any = None
