"""For tests and benchmarks: candidate generators whose accuracy is set and not learned, and near ties told apart."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .candidate_generators.base import TreeCandidateGenerator
from .candidate_generators.context import DraftContext
from .tree.build import build_tree
from .tree.draft_tree import DraftTree
from .tree.shape import TreeShape


class OracleTreeCandidateGenerator(TreeCandidateGenerator):
    """Hides standard decoding's continuation among branches with other tokens.

    Tests with a drafter that is never right test rejection alone. This one is right as often as it is told to be, and
    what is right is never the first child of its parent, so that the accepted path is never a prefix of the tree.

    Args:
        sequences: `(batch, length)` or `(length,)`, tokens of the prompts and of standard decoding's outputs.
        vocab_size: Distractors are drawn from the tokens below.
        accuracy: Probability that the tree holds the right token at a depth, given that it does at all smaller ones.
        max_depth: Depth of the deepest node.
        max_children: Most children of a node.
        seed: Seed of the generator's own random numbers.
    """

    def __init__(
        self,
        sequences: Tensor,
        vocab_size: int,
        accuracy: float = 0.8,
        max_depth: int = 8,
        max_children: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._sequences = torch.atleast_2d(sequences).tolist()
        self._vocab_size = vocab_size
        self._accuracy = accuracy
        self._max_depth = max_depth
        self._max_children = max_children
        self._random = random.Random(seed)

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        lengths = [min(position + 1, context.input_ids.shape[1]) for position in context.root_positions]
        rows = [ids[-length:].tolist() for ids, length in zip(context.input_ids, lengths)]
        return [self._propose(emitted, sequence, budget) for emitted, sequence in zip(rows, self._sequences)]

    def _propose(self, emitted: list[int], sequence: list[int], budget: int) -> DraftTree:
        truth = sequence[len(emitted) :] if emitted == sequence[: len(emitted)] else []
        depth_limit = self._random.randint(1, self._max_depth)
        tokens, parents, depths, log_probs = [emitted[-1]], [-1], [0], [0.0]
        on_truth: int | None = 0
        while len(tokens) <= budget:
            growing = [node for node in range(len(tokens)) if depths[node] < depth_limit and node not in parents]
            if on_truth is not None and (on_truth not in growing or self._random.random() > self._accuracy):
                on_truth = None
            if not growing:
                break
            # The right path is drafted first, so that the budget does not cut it.
            parent = on_truth if on_truth is not None else self._random.choice(growing)
            right = truth[depths[parent]] if on_truth is not None and depths[parent] < len(truth) else None
            room = budget + 1 - len(tokens)
            children = self._distinct_tokens(self._random.randint(1, self._max_children), without=right)[:room]
            if right is None:
                on_truth = None
            else:
                place = self._random.randint(1, len(children)) if len(children) < room else len(children) - 1
                children[place:place] = [right]
                children = children[:room]
                on_truth = len(tokens) + place
            for child in children:
                tokens.append(child)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                log_probs.append(log_probs[parent] - self._random.random())
        return DraftTree.from_parents(tokens, parents, log_probs)

    def _distinct_tokens(self, count: int, without: int | None) -> list[int]:
        candidates = [token for token in range(self._vocab_size) if token != without]
        return self._random.sample(candidates, min(count, len(candidates)))


class SetAccuracyGenerator(TreeCandidateGenerator):
    """Drafts like a calibrated drafter: at each position the right token has rank `r` with probability `a (1 - a)^r`.

    Which rank it has is the same whenever the position is drafted, so that chains and trees get the same drafts.

    Args:
        sequence: `(length,)`, tokens of the prompt and of standard decoding's output.
        vocab_size: What else it drafts is drawn from the tokens below.
        accuracy: `a`, how often its first guess at a position is right.
        shape: As in `DDTreeConfig.tree_shape`.
        horizon: How many positions it drafts.
        top_k: How many candidates each has.
        seed: Seed of the generator's own random numbers.
    """

    def __init__(
        self,
        sequence: Tensor,
        vocab_size: int,
        accuracy: float,
        shape: TreeShape = "best_first",
        horizon: int = 15,
        top_k: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._sequence = sequence.tolist()
        self._vocab_size = vocab_size
        self._shape: TreeShape = shape
        self._horizon = horizon
        self._random = random.Random(seed)
        self._ranks = [int(math.log(1 - self._random.random(), 1 - accuracy)) for _ in self._sequence]
        log_probs = [math.log(accuracy) + rank * math.log(1 - accuracy) for rank in range(top_k)]
        self._log_probs = torch.tensor(log_probs).expand(horizon, -1)

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        emitted = context.input_ids[0].tolist()
        is_true = emitted == self._sequence[: len(emitted)]
        log_probs, token_ids = self.candidates(len(emitted) if is_true else len(self._sequence))
        return [build_tree(log_probs, token_ids, emitted[-1], budget, self._shape)]

    def candidates(self, position: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens `(horizon, top_k)` at a position and those that follow, best first."""
        top_k = self._log_probs.shape[1]
        truth = zip(self._sequence[position:], self._ranks[position:])
        token_ids = []
        for right, rank in islice(chain(truth, repeat((-1, top_k))), self._horizon):
            drawn = self._random.sample(range(self._vocab_size), top_k + 1)
            candidates = [token for token in drawn if token != right][:top_k]
            if rank < top_k:
                candidates[rank] = right
            token_ids.append(candidates)
        return self._log_probs, torch.tensor(token_ids)


@dataclass(frozen=True)
class Comparison:
    """Tree decoding's output next to standard decoding's, where both are subject to rounding.

    Attributes:
        step: The first token that differs, counted from the first generated one; None if all are equal.
        gap: By how much standard decoding's logit of its own token there is above that of the other; None if none
            differs, infinite if one output ends there.
        deviation: Greatest difference between their logits, up to the first token that differs and at it.
        noise: Greatest difference that rounding makes without any tree: between the logits of standard decoding's
            tokens fed one at a time and fed all together.
    """

    step: int | None
    gap: float | None
    deviation: float
    noise: float


def _check_has_logits(name: str, output: Any) -> None:
    advice = "Generate both with `return_dict_in_generate=True, output_logits=True`."
    if not hasattr(output, "sequences"):
        raise TypeError(
            f"`{name}` must be an output of `generate()` with logits, but is a `{type(output).__name__}`. {advice}"
        )
    if not getattr(output, "logits", None):
        raise ValueError(f"`{name}` has no logits to compare. {advice}")
    if len(output.sequences) > 1:
        raise ValueError(f"`{name}` has {len(output.sequences)} rows, but must have one. Compare prompt by prompt.")


@torch.no_grad()
def compare(model: PreTrainedModel, plain: GenerateDecoderOnlyOutput, tree: GenerateDecoderOnlyOutput) -> Comparison:
    """Compares tree decoding's output with standard decoding's in a precision where rounding can tip near ties.

    Both are computed from other sums of the same terms. If rounding moves no logit by more than `noise`, a token can
    only differ where standard decoding's two candidates are at most `2 * noise` apart.

    Args:
        model: The target.
        plain, tree: What `generate()` returned for one prompt without padding, by greedy search with
            `return_dict_in_generate=True` and `output_logits=True`: standard decoding's output, and tree decoding's.

    Raises:
        ValueError: If an output has no logits, or is of several rows.
        TypeError: If an output is a tensor of tokens alone.
    """
    for name, output in (("plain", plain), ("tree", tree)):
        _check_has_logits(name, output)
    one_at_a_time, by_tree = (torch.cat(output.logits).float() for output in (plain, tree))
    first = plain.sequences.shape[1] - len(one_at_a_time)
    together = model(plain.sequences[:, :-1]).logits[0, first - 1 :].float()
    tokens, other_tokens = (output.sequences[0, first:].tolist() for output in (plain, tree))
    step = gap = None
    if tokens != other_tokens:
        shorter = min(len(tokens), len(other_tokens))
        step = next((step for step in range(shorter) if tokens[step] != other_tokens[step]), shorter)
        # Where one output ends and the other continues, logits do not tell why.
        ends = step == shorter
        gap = math.inf if ends else float(one_at_a_time[step, tokens[step]] - one_at_a_time[step, other_tokens[step]])
    compared = min(len(tokens), len(other_tokens), math.inf if step is None else step + 1)
    return Comparison(
        step=step,
        gap=gap,
        deviation=float((by_tree[:compared] - one_at_a_time[:compared]).abs().max()),
        noise=float((together - one_at_a_time).abs().max()),
    )
