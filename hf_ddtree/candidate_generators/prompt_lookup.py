"""Trees without a drafter: from what the text repeats, and from what the target said about every node so far."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..draft_memory import DraftMemory
from ..draft_memory.match_accuracy import MATCH_LENGTHS, MatchAccuracy
from ..draft_memory.ngram_index import NgramIndex
from ..draft_memory.successor_tables import LONGEST_CONTEXT, SuccessorTables
from ..tree.candidates import on_host
from ..tree.draft_tree import DraftTree
from .base import TreeCandidateGenerator, end_tokens_of
from .context import DraftContext, VerifiedRound

# The least length of a match that is called long.
LONG_MATCH = 8
# Most matches in a text that are followed, the longest and most recent ones.
MOST_MATCHES = 6
# Probability that what followed in the prompt is taught with.
TEXT_PROBABILITY = 0.9
# Most children of a node; the least and the highest probability of one, given its parent.
MOST_CHILDREN, LEAST_PROBABILITY, HIGHEST_PROBABILITY = 6, 0.001, 0.999
# Paths that are less probable count as this probable.
LEAST_PATH = 1e-30
# Next tokens that are learned from each node.
NUM_LEARNED = 8
# Tokens of the vocabulary whose best is looked for together.
BLOCK = 64
# How many of the last tokens tell whether a sequence continues.
NUM_COMPARED = 16


class Match(NamedTuple):
    """A place in a text where the last tokens of a sequence occurred before.

    Attributes:
        tokens: The text.
        end: Place of the last of them.
        period: After how many more tokens what follows begins again, as a loop does.
        length: How many of them match, at least.
        accuracy: How often matches in such a text were right.
    """

    tokens: Sequence[int]
    end: int
    period: int
    length: int
    accuracy: MatchAccuracy

    def next_token(self, depth: int) -> int:
        """What followed, and `depth` tokens; negative at the end of the text."""
        return self.tokens[self.end + 1 + depth % self.period]


class _Said(NamedTuple):
    """What the target said in a round: per row and node the most probable next tokens."""

    trees: Sequence[DraftTree]
    probs: Tensor
    token_ids: Tensor
    num_emitted: list[int]


class PromptLookupTreeCandidateGenerator(TreeCandidateGenerator):
    """Drafts without a drafter what the text repeats and what the target said before, as one estimate.

    Where the last tokens, four or more of them, occurred before in the prompt or the output, what followed there is
    likely to follow again. With matches that go on with tokens `t_1`, `t_2`, ..., the longest and most recent first,
    and trust `w_i` in a match of its length,

        q(t) = sum over t_i = t of (1 - w_1) ... (1 - w_{i-1}) w_i + (1 - w_1) (1 - w_2) ... P(t),

    where `P` are the successors of the last one to three tokens (`SuccessorTables`), learned from what the target said
    at each verified node, rejected ones included, and from the prompt. Trust is learned from the prompt while it is
    indexed, and from the output. A tree's nodes are the most probable paths; it fills the budget.

    Rows of a batch learn from each other, calls only by a `DraftMemory`.

    Args:
        target_model: The target. A branch ends with any of its end-of-sequence tokens.
        config: Shape, width and depth of the trees, what they are made from, and the longest match.
        memory: What earlier calls left, and where this one leaves what it learns.

    Raises:
        ValueError: If the memory is of another vocabulary.
    """

    learns = True

    def __init__(
        self, target_model: PreTrainedModel, config: DDTreeConfig | None = None, memory: DraftMemory | None = None
    ) -> None:
        super().__init__()
        self.config = config or DDTreeConfig()
        self.end_tokens = end_tokens_of(target_model)
        self._uses_text = self.config.tree_lookup != "target"
        self._uses_target = self.config.tree_lookup != "text"
        self._memory = memory
        if memory is not None:
            memory.check_vocabulary(target_model.get_input_embeddings().num_embeddings)
        self._said: list[_Said] = []
        self._finished: list[bool] = []
        self._taken_in: weakref.ref[DraftContext] | None = None
        self._forget(0)

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        self._forget(len(cached_ids))

    def observe(self, verified: VerifiedRound) -> None:
        if self._uses_target:
            probs, token_ids = most_probable(verified.logits, NUM_LEARNED)
            self._said.append(_Said(verified.trees, probs, token_ids, list(map(len, verified.paths))))

    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self.take_in(context)
        return self.build(context, budget)

    def take_in(self, context: DraftContext) -> None:
        """Takes in what has been emitted; once for each context."""
        if self._taken_in is not None and self._taken_in() is context:
            return
        with self.building(), self.locked():
            finished = [self._has_finished(context, row) for row in range(len(self._indices))]
            self._take_in(context)
            self._finished = finished if len(finished) == len(self._indices) else [False] * len(self._indices)
        self._taken_in = weakref.ref(context)

    def learn(self) -> None:
        """Learns from what the target said since the last context, once this one is taken in."""
        with self.building(), self.locked():
            self._learn_what_was_said()

    @property
    def repeats(self) -> bool:
        """Whether a long match is followed from the root of some row, once the context is taken in."""
        with self.locked():
            return any(
                match.length >= LONG_MATCH and not finished
                for index, finished in zip(self._indices, self._finished)
                for match in self._matches(index)[:1]
            )

    def build(self, context: DraftContext, budget: int, least_probability: float = 0.0) -> list[DraftTree]:
        """The trees, once the context is taken in, of nodes whose paths are at least this probable."""
        with self.building(), self.locked():
            self._learn_what_was_said()
            return [
                DraftTree.root_only(root) if self._finished[row] else self._build(row, budget, least_probability)
                for row, root in enumerate(context.roots)
            ]

    def locked(self) -> AbstractContextManager[Any]:
        """While it is entered, no other call changes the tables."""
        return nullcontext() if self._memory is None else self._memory.lock

    @property
    def tables(self) -> SuccessorTables:
        """What the target said."""
        return self._tables

    def last_tokens(self, row: int) -> tuple[int, ...]:
        """The last three tokens of a row, -1 where there is none, once the context is taken in."""
        return (-1, -1, *self._indices[row].tokens[-3:])[-3:]

    def unread(self) -> list[Tensor]:
        """What the target said since the last context, on its device."""
        return [tensor for said in self._said for tensor in (said.probs, said.token_ids)]

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Takes what `unread` gave, brought to the CPU."""
        self._said = [
            _Said(said.trees, probs, token_ids, said.num_emitted)
            for said, probs, token_ids in zip(self._said, tensors[::2], tensors[1::2])
        ]

    def finish(self, context: DraftContext) -> None:
        if self._memory is not None:
            self.take_in(context)
            self.learn()
            with self._memory.lock:
                for index in self._indices:
                    self._memory.add_text(index.tokens)

    def _forget(self, num_rows: int) -> None:
        longest = min(LONGEST_CONTEXT, self.config.max_matching_ngram_size or LONGEST_CONTEXT)
        self._tables = SuccessorTables(longest_context=longest) if self._memory is None else self._memory.tables
        self._accuracy = MatchAccuracy()
        self._followed: dict[int, tuple[list[int], int]] = {}  # per row what the longest match of a memory predicted
        self._indices = [self._new_index() for _ in range(num_rows)]
        self._said, self._finished = [], []
        self._taken_in = None

    def _new_index(self) -> NgramIndex:
        longest = self.config.max_matching_ngram_size or MATCH_LENGTHS[-1]
        lengths = MATCH_LENGTHS if self._uses_text else ()
        return NgramIndex([length for length in lengths if length <= longest])

    def _take_in(self, context: DraftContext) -> None:
        """Learns from what has been emitted."""
        if len(self._indices) != len(context.input_ids):
            self._forget(len(context.input_ids))
        learned_by_target = bool(self._said)
        for row, root in enumerate(context.roots):
            tokens = self._indices[row].tokens
            if self._has_finished(context, row):
                continue
            if tokens and context.emitted and (tokens[-1], *context.emitted[row])[-1] == root:
                self._extend(row, context.emitted[row], learned_by_target)
                continue
            text = context.sequence(row).tolist()
            compared = min(len(tokens), NUM_COMPARED)
            if compared and text[len(tokens) - compared : len(tokens)] == tokens[-compared:]:
                self._extend(row, text[len(tokens) :], learned_by_target)
            else:
                self._indices[row] = self._new_index()
                self._extend(row, text, False)

    def _has_finished(self, context: DraftContext, row: int) -> bool:
        return bool(self._indices[row].tokens and context.emitted and not context.emitted[row])

    def _extend(self, row: int, new_tokens: Sequence[int], learned_by_target: bool) -> None:
        index = self._indices[row]
        first = len(index.tokens)
        index.extend(new_tokens)
        for length, was_right in index.predictions(first - 1):
            if length:
                self._accuracy.observe(length, was_right)
        predicted, length = self._followed.pop(row, ([], 0))
        if self._memory is not None:
            self._memory.match_accuracy.observe_prediction(length, predicted, new_tokens)
        if not learned_by_target or not self._uses_target:
            self._teach_text(index.tokens, first)

    def _teach_text(self, tokens: Sequence[int], first: int) -> None:
        """Teaches the tokens from place `first` on as successors of those before them."""
        text = np.array([-1] * max(0, 3 - first) + list(tokens[max(0, first - 3) :]))
        contexts = np.stack((text[:-3], text[1:-2], text[2:-1]), axis=1)
        followed = contexts[:, 2] >= 0
        if followed.any():
            probs = np.full((int(followed.sum()), 1), TEXT_PROBABILITY, dtype=np.float32)
            self._tables.teach(contexts[followed], text[3:][followed, None], probs)

    def _learn_what_was_said(self) -> None:
        said, self._said = self._said, []
        # Each round's roots are known by the tokens that its path and the later ones emitted.
        roots = [len(index.tokens) - 1 for index in self._indices]
        contexts, token_ids, probs = [], [], []
        for one in reversed(said):
            of_round = [tensor.numpy() for tensor in on_host(one.token_ids, one.probs)]
            for row, (tree, num_emitted) in enumerate(zip(one.trees, one.num_emitted)):
                roots[row] -= num_emitted
                if num_emitted and roots[row] >= 0:
                    before = self._indices[row].tokens[max(0, roots[row] - 2) : roots[row]]
                    contexts.append(contexts_of(tree, before))
                    token_ids.append(of_round[0][row, : len(tree)])
                    probs.append(of_round[1][row, : len(tree)])
        if contexts:
            self._tables.teach(*map(np.concatenate, (contexts, token_ids, probs)))

    def _matches(self, index: NgramIndex) -> list[Match]:
        """What is followed from the root, the longest match first, and the most recent one among equals."""
        if not self._uses_text:
            return []
        tokens = index.tokens
        root = len(tokens) - 1
        found = [
            Match(tokens, end, root - end, length, self._accuracy) for end, length in index.occurrences(MOST_MATCHES)
        ]
        if self._memory is not None:
            texts, places = self._memory.matches(tokens[-MATCH_LENGTHS[-1] :], MOST_MATCHES)
            accuracy = self._memory.match_accuracy
            found += [Match(texts, end, len(texts) - 1 - end, length, accuracy) for end, length in places]
            found.sort(key=lambda match: -match.length)
        return found[:MOST_MATCHES]

    def _build(self, row: int, budget: int, least_probability: float) -> DraftTree:
        """The most probable paths, or under another shape the best chain first."""
        index = self._indices[row]
        root = index.tokens[-1]
        is_chain, is_spine_first = self.config.tree_shape == "chain", self.config.tree_shape == "spine_first"
        most_children = 1 if is_chain else min(self.config.tree_top_k or MOST_CHILDREN, MOST_CHILDREN)
        horizon, end_tokens, successors = self.config.draft_length or budget, self.end_tokens, self._tables.successors
        drafted, parents, probs = [root], [-1], [1.0]
        # Of each node whose children are wanted: their tokens and probabilities, and what leads to them.
        parts: dict[int, tuple[list[int], list[float], tuple[int, ...], Sequence[Match], int]] = {}
        # The best child of each node that is not drafted yet: whether it is off the spine, its path's probability,
        # negative, and its parent and rank among siblings.
        waiting: list[tuple[bool, float, int, int]] = []
        node, depth, on_spine, path_prob = 0, 0, is_spine_first, 1.0
        context: tuple[int, ...] = (-1, -1, *index.tokens[-3:])[-3:]
        matches: Sequence[Match] = self._matches(index)
        of_memory = next((match for match in matches if match.accuracy is not self._accuracy), None)
        if of_memory is not None:
            self._followed[row] = [of_memory.next_token(depth) for depth in range(horizon)], of_memory.length
        while True:
            if depth < horizon and (node == 0 or context[2] not in end_tokens):
                tokens, likely = self._with_matches(context, matches, depth) if matches else successors(context)
                if likely and likely[0] >= LEAST_PROBABILITY:
                    parts[node] = tokens, likely, context, matches, depth
                    path_prob *= min(likely[0], HIGHEST_PROBABILITY)
                    heappush(waiting, (not on_spine, -path_prob, node, 0))
            if not waiting:
                break
            off_spine, cost, parent, rank = heappop(waiting)
            on_spine, path_prob = not off_spine, -cost
            if path_prob < least_probability:
                break
            tokens, likely, context, matches, depth = parts[parent]
            token = tokens[rank]
            node = len(drafted)
            drafted.append(token)
            parents.append(parent)
            probs.append(path_prob)
            if node == budget:
                break
            rank += 1
            if rank < most_children and rank < len(likely) and likely[rank] >= LEAST_PROBABILITY:
                heappush(waiting, (True, -probs[parent] * likely[rank], parent, rank))
            if matches:
                matches = [match for match in matches if match.next_token(depth) == token]
            context = context[1], context[2], token
            depth += 1
        log_probs = np.log(np.maximum(probs, LEAST_PATH)).astype(np.float32)
        return DraftTree(*map(torch.from_numpy, (np.array(drafted), np.array(parents), log_probs)))

    def _with_matches(
        self, context: tuple[int, ...], matches: Sequence[Match], depth: int
    ) -> tuple[list[int], list[float]]:
        """The most probable next tokens, and their probabilities, falling."""
        tokens, probs = self._tables.successors(context)
        rest, shares = 1.0, {}
        for match in matches:
            token = match.next_token(depth)
            if token >= 0 and token not in shares:
                shares[token] = rest * match.accuracy(match.length + depth)
                rest -= shares[token]
        found = {token: rest * prob for token, prob in zip(tokens, probs)}
        for token, share in shares.items():
            found[token] = found.get(token, 0.0) + share
        tokens = sorted(found, key=found.__getitem__, reverse=True)
        return tokens, [found[token] for token in tokens]


def most_probable(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable next tokens, on the device of the logits.

    On the CPU the best of all blocks of the vocabulary are found first, as the best tokens lie in the best blocks: a
    few times as fast as PyTorch's top-k.

    Args:
        logits: `(..., vocab)`, any floating dtype.
        top_k: Number of tokens; a smaller vocabulary gives as many as it has.

    Returns:
        Their probabilities `(..., k)` float32, falling, 0 where the logits give no distribution, and their numbers
        `(..., k)` int64.
    """
    logits = logits.detach().float()
    vocab_size = logits.shape[-1]
    if logits.device.type != "cpu" or vocab_size % BLOCK or vocab_size < 2 * top_k * BLOCK:
        best, token_ids = logits.topk(min(top_k, vocab_size), dim=-1)
    else:
        blocks = logits.unflatten(-1, (-1, BLOCK))
        best_blocks = blocks.amax(dim=-1).topk(top_k, dim=-1).indices
        taken = blocks.gather(-2, best_blocks[..., None].expand(*best_blocks.shape, BLOCK))
        best, places = taken.flatten(-2).topk(top_k, dim=-1)
        token_ids = best_blocks.gather(-1, places // BLOCK) * BLOCK + places % BLOCK
    return (best - logits.logsumexp(dim=-1, keepdim=True)).exp().nan_to_num(0.0), token_ids


def contexts_of(tree: DraftTree, before: Sequence[int]) -> np.ndarray:
    """`(n, 3)` int64, the last three tokens at each node, its own the newest; -1 where there is none.

    Args:
        tree: The tree.
        before: The tokens before its root; the last two are looked at.
    """
    tokens = np.concatenate(((-1, -1, *before)[-2:], tree.token_ids.numpy()))
    # Two nodes stand for what is before the root; the parent of the older one is itself.
    parents = np.concatenate(((0, 0, 1), tree.parents.numpy()[1:] + 2))
    above = parents[2:]
    return np.stack((tokens[parents[above]], tokens[above], tokens[2:]), axis=1)
