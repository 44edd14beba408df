"""The output of `generate()`: that of standard decoding, and statistics."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .tree.draft_tree import DraftTree

STAGES = ("draft", "build", "verify", "accept", "commit")
ROWS_AT_ONCE = 32


@dataclass
class DDTreeStats:
    """Statistics of a `generate()` call.

    Attributes:
        target_forwards: Forwards of the target, the prefill included.
        draft_forwards: Forwards of the drafter.
        rounds: Rounds of decoding after the prefill.
        disabled_after: Rounds after which the budget policy disabled drafting, 0 if an earlier call of the same model
            and drafter did; None if drafting was never disabled.
        rounds_disabled: Rounds without a draft because drafting was disabled.
        accepted_lengths: Tokens emitted by each round, one entry per unfinished row. The prefill's token is not
            counted.
        tree_sizes: Drafted nodes of each round's trees, the root excluded, one entry per unfinished row.
        drafted_by_depth: Trees that have a node of depth 1, 2, and so on.
        accepted_by_depth: Trees whose accepted path has one.
        stage_seconds: Time in each stage, summed over all rounds: draft, build, verify, accept, commit. On a GPU the
            host's time: work that is still queued counts where the host waits for it.
        trees: The trees of each round, one per row, if `return_trees` asked for them.
        accepted_paths: For each of `trees`, the accepted nodes from the root on; empty for a finished row.
        target_probabilities: For each of `trees`, the probability that the target gives to each node's token after its
            parent, before logits processors; 1 for the root.
    """

    target_forwards: int = 0
    draft_forwards: int = 0
    rounds: int = 0
    disabled_after: int | None = None
    rounds_disabled: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    trees: list[list[DraftTree]] | None = field(default=None, repr=False)
    accepted_paths: list[list[list[int]]] | None = field(default=None, repr=False)
    target_probabilities: list[list[list[float]]] | None = field(default=None, repr=False)

    @classmethod
    def keeping_trees(cls) -> DDTreeStats:
        """Statistics that will have the trees of all rounds."""
        return cls(trees=[], accepted_paths=[], target_probabilities=[])

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of tokens that a row emits per verifying forward of the target."""
        return sum(self.accepted_lengths) / max(1, len(self.accepted_lengths))

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the trees with a node of depth 1, 2, and so on whose accepted path has one."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_by_depth, self.drafted_by_depth)]

    def count(self, trees: list[DraftTree], paths: list[list[int]], logits: Tensor | None = None) -> None:
        """Counts a round.

        Args:
            trees: One per row.
            paths: The accepted path of each row, empty for a finished one.
            logits: `(batch, n, vocab)`, the target's at each node, of which probabilities are kept if trees are.
        """
        self.target_forwards += 1
        self.rounds += 1
        for tree, path in zip(trees, paths):
            if path:
                self.accepted_lengths.append(len(path))
                self.tree_sizes.append(tree.num_drafted)
                self._count_depths(tree.depth, len(path) - 1)
        if self.trees is not None and self.accepted_paths is not None:
            self.trees.append(trees)
            self.accepted_paths.append(paths)
            if self.target_probabilities is not None and logits is not None:
                self.target_probabilities.append([_probabilities(*of_row) for of_row in zip(trees, logits)])

    def count_disabled(self) -> None:
        """Counts the round that begins as one without a draft, because drafting is disabled."""
        if self.disabled_after is None:
            self.disabled_after = self.rounds
        self.rounds_disabled += 1

    def summary(self) -> str:
        """What a log line says of the call."""
        drafted = sum(self.tree_sizes) / max(1, len(self.tree_sizes))
        text = (
            f"{self.target_forwards} forwards of the target, {self.tokens_per_forward:.2f} tokens per forward, "
            f"{drafted:.1f} nodes per tree"
        )
        if self.rounds_disabled:
            text += f", drafting disabled in {self.rounds_disabled} of {self.rounds} rounds"
        return text

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        seconds = sum(self.stage_seconds.values())
        rows = {
            "tokens per forward": f"{self.tokens_per_forward:.2f}",
            "nodes per tree": f"{sum(self.tree_sizes) / max(1, len(self.tree_sizes)):.1f}",
            "rounds": f"{self.rounds}",
            "forwards of the target": f"{self.target_forwards}",
            "forwards of the drafter": f"{self.draft_forwards}",
            "accepted at depth 1, 2, ...": " ".join(f"{share:.0%}" for share in self.acceptance_by_depth),
            **{name: f"{spent:.3f} s, {spent / (seconds or 1):.0%}" for name, spent in self.stage_seconds.items()},
        }
        lines = [f"<tr><th style='text-align: left'>{name}</th><td>{text}</td></tr>" for name, text in rows.items()]
        return f"<table>{''.join(lines)}</table>"

    def to_dict(self) -> dict[str, Any]:
        """All of it, `tokens_per_forward` and `acceptance_by_depth` included, in types that JSON knows."""
        trees: Any = self.trees and [[_tree_to_dict(tree) for tree in of_round] for of_round in self.trees]
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)} | {"trees": trees}
        values |= {"tokens_per_forward": self.tokens_per_forward, "acceptance_by_depth": self.acceptance_by_depth}
        return copy.deepcopy(values)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds[name] += time.perf_counter() - start

    def _count_depths(self, drafted: int, accepted: int) -> None:
        missing = [0] * (drafted - len(self.drafted_by_depth))
        self.drafted_by_depth += missing
        self.accepted_by_depth += missing
        for depth in range(drafted):
            self.drafted_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted


def _probabilities(tree: DraftTree, logits: Tensor) -> list[float]:
    """The probability of each node's token after its parent by `(n, vocab)` logits, 1 for the root."""
    parents, tokens = tree.parents[1:].to(logits.device), tree.token_ids[1:].to(logits.device)
    # A few rows at a time, as float32 takes more memory than the logits may have.
    totals = torch.cat([rows.float().logsumexp(-1) for rows in logits[: len(tree)].split(ROWS_AT_ONCE)])
    return [1.0, *(logits[parents, tokens].float() - totals[parents]).exp().tolist()]


def _tree_to_dict(tree: DraftTree) -> dict[str, list[Any]]:
    return {
        "token_ids": tree.token_ids.tolist(),
        "parents": tree.parents.tolist(),
        "log_probs": tree.log_probs.tolist(),
    }


@dataclass
class DDTreeOutput(GenerateDecoderOnlyOutput):
    """The output of `generate(return_dict_in_generate=True)`: that of standard decoding, and two more fields.

    Attributes:
        ddtree_stats: Statistics of the call.
        draft_state: The drafter's state. Pass it on together with the cache to continue the sequences.
    """

    ddtree_stats: DDTreeStats | None = None
    draft_state: Any = None
