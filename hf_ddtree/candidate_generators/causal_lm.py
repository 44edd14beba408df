"""Trees from a causal language model: every node's children come from the distribution after its own branch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..attention import dispatch
from ..attention.tree_pass import TreePass
from ..configuration import DDTreeConfig
from ..devices import on_device
from ..drafters.causal_lm.checkpoint import check_causal_lm_fits
from ..interop.generation import prefill, prompt_positions
from ..interop.models import takes_logits_to_keep
from ..interop.versions import CACHE_KEY
from ..target.cache_rows import CommittedRows
from ..target.model import CachedModel
from ..target.preallocation import preallocate
from ..target.requirements import check_cache
from ..target.weights import execution_device, num_embeddings
from ..tree.draft_tree import DraftTree
from ..tree.growing_tree import GrowingTree
from .base import end_tokens_of
from .context import DraftContext
from .levelwise import DEFAULT_DRAFT_LENGTH, LevelwiseTreeCandidateGenerator

# Most tokens per row that enter a drafter with a filled cache in one forward; each sees the mask of a tree.
TOKENS_AT_ONCE = 256


@dataclass
class CausalLMState:
    """What the drafter keeps of the sequences; passed with the target's cache from one `generate()` call to the next.

    Attributes:
        drafter: Identifies the drafter; the state of another one is not used.
        sequences: Per row its tokens so far, `(length,)`, without padding; the last is the root.
        num_seen: Per row the number of tokens that the target had seen.
        rows, model_kwargs: What the drafter's cache holds, and the cache, as in decoding. None before the first draft.
        num_cached: Per row the number of its tokens in the cache.
        fed: The last trees that were fed and have not been committed.
    """

    drafter: tuple[Any, ...] = ()
    sequences: list[Tensor] = field(default_factory=list)
    num_seen: list[int] = field(default_factory=list)
    rows: CommittedRows | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    num_cached: list[int] = field(default_factory=list)
    fed: tuple[TreePass, Sequence[DraftTree]] | None = None

    def continues(self, sequences: Sequence[Tensor]) -> bool:
        """Whether each of the sequences continues the one that is known."""
        return len(sequences) == len(self.sequences) and all(
            torch.equal(sequence[: len(known)], known.to(sequence.device))
            for sequence, known in zip(sequences, self.sequences)
        )


class CausalLMTreeCandidateGenerator(LevelwiseTreeCandidateGenerator):
    """Expands a tree level by level: one forward of the drafter for all nodes of a level.

    A node's children are the most probable tokens after its own branch. By default the whole top-1 chain is in the
    tree, so that no chain of this length is accepted further, and the rest of the budget goes to the most
    probable of the other prefixes. The drafter runs on trees as the target does. Its cache holds what has been
    accepted: each forward feeds the frontier and its ancestors, and what the target accepts of the last ones fed is
    committed without being fed again. A chain of `n` tokens takes `n` forwards, as in Transformers' assisted decoding.

    Args:
        drafter: The drafter, on any device, in any dtype; may be the target itself.
        target_model: The target.
        config: Shape, width and depth of the trees; five levels if `draft_length` does not say otherwise.
        state: An earlier call's `draft_state`, if the sequences continue.

    Raises:
        ValueError: If the drafter has another vocabulary than the target, or cannot run on trees.
        TypeError: If the state is not of this kind.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: CausalLMState | None = None,
    ) -> None:
        super().__init__()
        check_causal_lm_fits(drafter, target_model)
        if state is not None and not isinstance(state, CausalLMState):
            raise TypeError(
                f"`draft_state` must be a former output's `draft_state` with a causal language model as drafter, but "
                f"is a `{type(state).__name__}`."
            )
        self.drafter = drafter
        self._set_knobs(config, DEFAULT_DRAFT_LENGTH)
        self.end_tokens = end_tokens_of(target_model)
        self._device = execution_device(drafter)
        text_config = drafter.config.get_text_config()
        self._kind = (
            *(type(drafter).__name__, text_config.name_or_path, self._device, drafter.dtype),
            # What a cache holds since inference mode may not be written to outside.
            *(text_config.num_hidden_layers, text_config.hidden_size, torch.is_inference_mode_enabled()),
        )
        if state is None or state.drafter != self._kind:
            state = CausalLMState(self._kind)
        self.state = state
        self._cached: CachedModel | None = None
        self._cached_elsewhere: list[Tensor] | None = None
        self._longest = getattr(text_config, "max_position_embeddings", None) or math.inf
        self._num_embeddings = num_embeddings(drafter)
        self._vocab_size = min(self._num_embeddings, num_embeddings(target_model))

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        self._cached_elsewhere = None
        if cached_ids.shape[1] < num_cached and self.state.num_seen:
            # The caller passes only what follows, so what the cache holds must be taken from the earlier call.
            longest = max(self.state.num_seen)
            if longest == num_cached and len(cached_ids) == len(self.state.sequences):
                self._cached_elsewhere = [
                    sequence[: len(sequence) - (seen == longest)]
                    for sequence, seen in zip(self.state.sequences, self.state.num_seen)
                ]

    def finish(self, context: DraftContext) -> None:
        if self.state.sequences:
            self._take_in(context)

    @torch.no_grad()
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self._take_in(context)
        state = self.state
        roots = [int(sequence[-1]) for sequence in state.sequences]
        if max(map(len, state.sequences)) + self._draft_length > self._longest:
            return [DraftTree.root_only(root) for root in roots]
        dispatch.install(self.drafter)
        if state.rows is None:
            self._prefill()
        trees = self._new_trees(roots, budget)
        with self._cached_drafter().recording_past():
            return self._grow(trees, self._levels(trees, self._width(budget)), context.tokens_left)

    def _levels(self, trees: list[GrowingTree], width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level the candidates after the frontiers."""
        yield self.best_on_host(self._feed_sequences(), width)
        while True:
            branches = [tree.branches() for tree in trees]
            logits = self._feed([tree for tree, _ in branches], [frontier for _, frontier in branches])
            yield self.best_on_host(logits, width)

    def _take_in(self, context: DraftContext) -> None:
        """Takes in the emitted tokens and commits the fed nodes among them; starts afresh with other sequences."""
        state = self.state
        sequences = self._sequences(context)
        if not state.continues(sequences):
            state = self.state = CausalLMState(self._kind)
        state.sequences, state.num_seen = sequences, list(context.root_positions)
        if state.fed is None:
            return
        paths = []
        for tree, sequence, num_cached in zip(state.fed[1], sequences, state.num_cached):
            new = sequence[num_cached:].tolist()
            path = [0] if len(new) > 1 else []
            for token in new[1:-1]:
                child = tree.child_with_token(path[-1], token)
                if child is None:
                    break
                path.append(child)
            paths.append(path)
        with self._cached_drafter().recording_past():
            self._commit(paths)

    def _sequences(self, context: DraftContext) -> list[Tensor]:
        """Per row its tokens so far, on the CPU."""
        if any(context.emitted) and len(context.emitted) == len(self.state.sequences):
            return [
                torch.cat((known, torch.tensor(emitted, dtype=torch.int64, device="cpu")))
                for known, emitted in zip(self.state.sequences, context.emitted)
            ]
        sequences = [context.sequence(row) for row in range(len(context.input_ids))]
        if self._cached_elsewhere is not None:
            sequences = [torch.cat(parts) for parts in zip(self._cached_elsewhere, sequences)]
        return sequences

    def _prefill(self) -> None:
        """Fills the drafter's cache with what precedes the roots."""
        state, drafter = self.state, self.drafter
        lengths = [len(sequence) - 1 for sequence in state.sequences]
        longest = max(1, *lengths)
        token_ids = torch.stack(
            [torch.nn.functional.pad(sequence[:-1], (longest - len(sequence) + 1, 0)) for sequence in state.sequences]
        ).to(self._device)
        kwargs: dict[str, Any] = {}
        if min(lengths) < longest:
            padding = longest - torch.tensor(lengths, device="cpu")[:, None]
            mask = torch.arange(longest + 1, device="cpu") >= padding
            kwargs["attention_mask"] = mask.long().to(self._device)
        up_to_root = torch.nn.functional.pad(token_ids, (0, 1))
        position_ids = prompt_positions(drafter, up_to_root, kwargs)
        state.rows = CommittedRows(longest, {**kwargs, "position_ids": position_ids}, len(lengths), self._device)
        if kwargs:
            kwargs["attention_mask"] = kwargs["attention_mask"][:, :-1]
        kwargs["position_ids"] = position_ids[..., :-1]
        kwargs[CACHE_KEY] = DynamicCache(config=drafter.config.get_text_config(decoder=True))
        kwargs["use_cache"] = True
        if takes_logits_to_keep(drafter):
            kwargs["logits_to_keep"] = 1
        prefill(drafter, self._known(token_ids), GenerationConfig(), kwargs)
        check_cache(kwargs[CACHE_KEY])
        preallocate(kwargs[CACHE_KEY])
        state.model_kwargs = {CACHE_KEY: kwargs[CACHE_KEY], "use_cache": True}
        state.num_cached = lengths
        self.num_forwards += 1

    def _feed_sequences(self) -> Tensor:
        """Feeds what is not in the cache yet, and commits it up to the roots.

        Returns:
            `(batch, vocab)`, the logits after the roots.
        """
        state = self.state
        while True:
            new = [sequence[cached:].tolist() for sequence, cached in zip(state.sequences, state.num_cached)]
            # All but the root, which the trees start from.
            counts = [min(len(tokens) - 1, TOKENS_AT_ONCE) for tokens in new]
            is_last = all(count == len(tokens) - 1 for count, tokens in zip(counts, new))
            chains = [tokens[: count + 1] for count, tokens in zip(counts, new)]
            logits = self._feed([DraftTree.chain(chain) for chain in chains], [[len(chain) - 1] for chain in chains])
            self._commit([list(range(count)) for count in counts])
            if is_last:
                return logits

    def _feed(self, trees: list[DraftTree], nodes: list[list[int]]) -> Tensor:
        """Runs the drafter on one tree per row, whose roots the cache does not hold.

        Returns:
            `(sum of len(nodes), vocab)`, the logits after these nodes of each row, one row after the other.
        """
        state = self.state
        if state.fed is not None:
            self._commit([[] for _ in trees])
        known = [DraftTree(self._known(tree.token_ids), tree.parents, tree.log_probs) for tree in trees]
        verification = self._cached_drafter().verify(known)
        assert verification.tree_pass is not None
        state.fed = verification.tree_pass, trees
        self.num_forwards += 1
        logits = verification.logits
        places = [(row, node) for row, of_row in enumerate(nodes) for node in of_row]
        rows, node_ids = on_device(torch.tensor(places, device="cpu"), logits.device).T
        return logits[rows, node_ids, : self._vocab_size]

    def _commit(self, paths: list[list[int]]) -> None:
        state = self.state
        assert state.fed is not None
        self._cached_drafter().commit(state.fed[0], paths)
        state.num_cached = [count + len(path) for count, path in zip(state.num_cached, paths)]
        state.fed = None

    def _cached_drafter(self) -> CachedModel:
        """The drafter with the cache of the state."""
        assert self.state.rows is not None
        if self._cached is None or self._cached.rows is not self.state.rows:
            self._cached = CachedModel(self.drafter, self.state.model_kwargs, self.state.rows)
        return self._cached

    def _known(self, token_ids: Tensor) -> Tensor:
        """The tokens, with token 0 in place of those that only the target's embedding table has."""
        return torch.where(token_ids < self._num_embeddings, token_ids, 0)
