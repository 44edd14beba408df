"""The interface of everything that proposes trees."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput

from ..compat import CACHE_KEY, captured_layers, hidden_states_of
from ..draft_tree import DraftTree


@dataclass(frozen=True)
class DraftContext:
    """What a generator may know when it proposes the trees of a round.

    Attributes:
        input_ids: `(batch, length)` int64, every token so far; the last one of each row is its root, which the target
            has not seen yet. Rows that are behind are padded at the left.
        root_positions: For each row, the number of tokens that the target has seen, padding included. More than
            `length - 1` after a prompt of embeddings.
        features: `(batch, tokens, len(feature_layers) * hidden_size)`, what the target's hooked layers gave for the
            tokens committed since the last call, aligned at the left. None if the generator hooks no layers, or is
            asked outside of tree decoding.
        num_features: For each row, how many entries of `features` are its own; they end right before its root.
        attention_mask: `(batch, length)` bool, False where `input_ids` hold padding. None if they hold none, or
            only in front of rows that are behind.
        emitted: For each row, the tokens that it has emitted since the last call; none if it had finished. Empty
            before there was a round, or outside of tree decoding.
        last_tokens: For each row the last of `input_ids`, if the host knows them; see `roots`.
    """

    input_ids: Tensor
    root_positions: Sequence[int]
    features: Tensor | None = None
    num_features: Sequence[int] = ()
    attention_mask: Tensor | None = None
    emitted: Sequence[Sequence[int]] = ()
    last_tokens: Sequence[int] = ()

    @property
    def roots(self) -> list[int]:
        """The token of each row's root; without asking the device of `input_ids` if the host knows them."""
        return list(self.last_tokens) or self.input_ids[:, -1].tolist()


@dataclass
class KnownSequences:
    """The sequences that a drafter knows something of, to tell in a later call whether they go on.

    Attributes:
        input_ids: `(batch, length)`, the tokens that were drafted for.
        root_positions: For each row, how many tokens of it the target's cache held at last.
        drafter: What the drafter is like; another one starts anew.
    """

    input_ids: Tensor | None = None
    root_positions: list[int] = field(default_factory=list)
    drafter: tuple[Any, ...] = ()

    def continues(self, drafter: tuple[Any, ...], cached_ids: Tensor, num_cached: int) -> bool:
        """Whether this is the drafter's state of what the target's cache holds, as far as can be told.

        Args:
            drafter: What the drafter is like.
            cached_ids: `(batch, num_cached)`, the tokens; `(batch, 0)` if they are not known.
            num_cached: Their number.
        """
        if self.drafter != drafter or self.input_ids is None or self.root_positions != [num_cached] * len(cached_ids):
            return False
        # Both end at the same token, but either may lack the first ones. The root, which is last, is never cached.
        known = self.input_ids[:, :-1]
        length = min(known.shape[1], cached_ids.shape[1])
        return torch.equal(known[:, known.shape[1] - length :], cached_ids[:, cached_ids.shape[1] - length :])


class TreeCandidateGenerator(CandidateGenerator):
    """Proposes a token tree a row and round.

    A generator that keeps something between rounds serves one `generate()` call at a time.

    Attributes:
        feature_layers: Decoder layers of the target, from 0, whose outputs the generator needs.
        build_seconds: Time spent on turning distributions into trees since the last `start`.
        num_forwards: Forwards of the drafter since the last `start`.
        state: What it knows of the sequences, for a later call that goes on with them; None if nothing.
        end_tokens: Where `get_candidates` ends a chain: the target's end-of-sequence tokens.
    """

    feature_layers: tuple[int, ...] = ()
    state: Any = None
    end_tokens: frozenset[int] = frozenset()
    build_seconds: float = 0.0
    num_forwards: int = 0
    default_budget: ClassVar[int] = 16
    # Where Transformers' own assisted decoding is.
    _num_candidates: int = 0
    _num_seen: int = 0

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        """Proposes one tree a row, with the row's last token as its root and at most `budget` drafted nodes.

        Must not draw from PyTorch's default random generator: sampling with a seed would give other tokens.
        """

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        """Called before the first round of a `generate()` call.

        Args:
            cached_ids: `(batch, num_cached)`, the tokens in the target's cache; `(batch, 0)` if the caller passed only
                those that follow.
            num_cached: Number of tokens in the target's cache. The generator hears nothing more of them.
        """
        self.build_seconds = 0.0
        self.num_forwards = 0

    def finish(self, context: DraftContext) -> None:
        """Called after the last round, with what `propose` would get now."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Counts the time that it takes as spent on building trees."""
        start = time.perf_counter()
        yield
        self.build_seconds += time.perf_counter() - start

    @property
    def requires_model_outputs(self) -> bool:
        """Whether Transformers' own assisted decoding must pass the target's outputs to `get_candidates`."""
        return bool(self.feature_layers)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What the target's forward is asked for then."""
        return {"output_hidden_states": captured_layers(self.feature_layers)}

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The most probable chain of the proposed tree, for Transformers' own assisted decoding.

        A generator that hooks layers drafts nothing before it has seen the target's outputs for the prompt.

        Args:
            input_ids: `(1, length)` int64.
            model_kwargs: As assisted decoding keeps them; passed if `requires_model_outputs`, as all that follows.
            model_outputs: Of the last forward, with the hidden states of the last candidates.
            is_first_iteration: Whether there has been no forward yet.
            n_last_matches: How many of the last candidates were accepted.

        Returns:
            `(1, length + drafted)`: `input_ids` and the drafted tokens; and None, as there are no draft logits, which
            makes Transformers accept a drafted token where the target chooses the same.
        """
        num_seen, features = input_ids.shape[1] - 1, None
        if self.requires_model_outputs and model_kwargs is not None:
            if is_first_iteration or model_outputs is None:
                self._num_candidates, self._num_seen = 0, model_kwargs[CACHE_KEY].get_seq_length()
                self.start(input_ids[:, : self._num_seen], self._num_seen)
                return input_ids, None
            features = self._features_of(model_outputs, model_kwargs, int(n_last_matches))
            num_seen = self._num_seen
        num_features = [] if features is None else [features.shape[1]]
        tree = self.propose(DraftContext(input_ids, [num_seen], features, num_features), self.default_budget)[0]
        tokens = tree.best_chain().token_ids[1:].tolist()
        ends = (place for place, token in enumerate(tokens, start=1) if token in self.end_tokens)
        tokens = tokens[: next(ends, len(tokens))]
        self._num_candidates = len(tokens)
        drafted = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat((input_ids, drafted), dim=1), None

    def _features_of(self, outputs: ModelOutput, model_kwargs: dict[str, Any], num_matches: int) -> Tensor:
        """`(1, tokens, features)` of what the last forward was fed and was kept, padding left out."""
        layers = [hidden_states_of(outputs, layer) for layer in self.feature_layers]
        length = layers[0].shape[1] - self._num_candidates + num_matches
        self._num_seen += length
        features = torch.cat([layer[:, :length].to(layers[0].device) for layer in layers], dim=-1)
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is None:
            return features
        # The mask reaches to the root, which follows the features.
        return features[:, attention_mask[0, -1 - length : -1].to(features.device, torch.bool)]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to update: what a generator learns it learns from `DraftContext`."""


def join_features(news: Sequence[tuple[Tensor | None, Sequence[int]]]) -> tuple[Tensor | None, list[int]]:
    """The features of several rounds, one after the other in each row.

    Args:
        news: For each round the `features` and `num_features` of a `DraftContext`.

    Returns:
        The same for all of them.
    """
    counts = [sum(of_row) for of_row in zip(*(counts for _, counts in news))]
    parts = [features for features, _ in news if features is not None]
    if not parts:
        return None, counts
    if len(parts) == 1:
        return parts[0], counts
    if len(counts) == 1:
        return torch.cat(parts, dim=1), counts
    rows = [
        torch.cat([part[row, : count[row]] for part, (_, count) in zip(parts, news)]) for row in range(len(counts))
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), counts


def checked_trees(trees: Any, roots: Sequence[int], vocab_size: int | None = None) -> list[DraftTree]:
    """Refuses trees of a candidate generator that would give wrong tokens.

    Args:
        trees: What `propose` returned.
        roots: For each row the last token of what it was given.
        vocab_size: How many tokens the target knows; None if that is checked later.

    Returns:
        The same trees as new objects: a generator may hand out one object again with other tokens written into it,
        which would not be what the object remembers of itself.

    Raises:
        TypeError: If it is no list of trees.
        ValueError: If the trees are not one a row, or one is no tree below the row's last token.
    """
    if not isinstance(trees, list | tuple) or not all(isinstance(tree, DraftTree) for tree in trees):
        raise TypeError(
            "The candidate generator's `propose` must return a list of `hf_ddtree.DraftTree`, one a row, but "
            f"returned {trees!r}."
        )
    if len(trees) != len(roots):
        raise ValueError(
            f"The candidate generator proposed {len(trees)} trees for {len(roots)} rows. `propose` must return "
            "one a row; `DraftTree.root_only(token)` is a tree with nothing drafted."
        )
    for tree, root in zip(trees, roots):
        _check_tree(tree, root, vocab_size)
    return [DraftTree(tree.token_ids, tree.parents, tree.log_probs) for tree in trees]


def _check_tree(tree: DraftTree, root: int, vocab_size: int | None) -> None:
    if not _is_vector(tree.token_ids) or not _is_vector(tree.parents, len(tree.token_ids)) or not len(tree):
        raise ValueError(
            "The candidate generator proposed a tree whose `token_ids` and `parents` are no vectors of int64 "
            "on the CPU, of the same length. Build trees with `DraftTree.from_parents`, which checks."
        )
    if len(tree) == 1 and _is_vector(tree.log_probs, 1, torch.float32):
        if (tree.token_ids.item(), tree.parents.item(), tree.log_probs.item()) == (root, -1, 0.0):
            return  # the root alone, as in most rounds of a lookup that finds nothing
    tokens, parents = tree.token_ids.numpy(), tree.parents.numpy()
    if tokens[0] != root:
        raise ValueError(
            f"The candidate generator proposed a tree whose root is token {tokens[0]}, but must be the last token "
            f"of `context.input_ids`, {root}."
        )
    if tokens.min() < 0 or (vocab_size is not None and tokens.max() >= vocab_size):
        allowed = "0 and above" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise ValueError(
            f"The candidate generator proposed a tree with tokens from {tokens.min()} to {tokens.max()}, but the "
            f"target knows {allowed}."
        )
    if parents[0] != -1 or (parents[1:] >= np.arange(1, len(parents))).any() or (parents[1:] < 0).any():
        raise ValueError(
            "The candidate generator proposed a tree whose parents are not in order: `parents[0]` must be -1 and "
            "every other node must come after its parent. Build trees with `DraftTree.from_parents`, which checks."
        )
    if not _is_vector(tree.log_probs, len(tree), torch.float32) or not _never_rise(tree.log_probs.numpy(), parents):
        raise ValueError(
            "The candidate generator proposed a tree with `log_probs` that are no vector of float32 on the CPU with "
            "one a node, are not 0 at the root, are no numbers, or are greater at a node than at its parent: they "
            "belong to whole paths. Build trees with `DraftTree.from_parents`, which checks."
        )


def _is_vector(part: Any, length: int | None = None, dtype: torch.dtype = torch.int64) -> bool:
    return (
        isinstance(part, Tensor)
        and part.ndim == 1
        and part.dtype == dtype
        and part.device.type == "cpu"
        and not part.requires_grad
        and (length is None or len(part) == length)
    )


def _never_rise(log_probs: np.ndarray, parents: np.ndarray) -> bool:
    """Whether they are 0 at the root and at most the parent's elsewhere; NaN compares to nothing."""
    return bool(log_probs[0] == 0 and (log_probs[1:] <= log_probs[parents[1:]]).all())
