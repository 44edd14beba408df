"""Trees from a target's own multi-token-prediction (MTP) layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..attention.mask import to_additive, tree_attention_mask
from ..attention.tree_pass import TreePass
from ..configuration import DDTreeConfig
from ..devices import on_device
from ..drafters.mtp.model import MTPDrafter, check_mtp_drafter_fits, wrap_mtp_model
from ..interop.models import attention_implementation
from ..interop.versions import CACHE_KEY
from ..target.cache_rows import CommittedRows
from ..target.commit import commit
from ..target.layers import decoder_layers
from ..target.preallocation import preallocate
from ..target.weights import embedding_rows, execution_device, head_logits, num_embeddings
from ..tree.draft_tree import DraftTree
from ..tree.growing_tree import GrowingTree
from ..tree.tree_batch import TreeBatch
from .base import end_tokens_of
from .context import DraftContext
from .known_sequences import KnownSequences
from .levelwise import DEFAULT_DRAFT_LENGTH, LevelwiseTreeCandidateGenerator

# Most tokens per row that enter a layer at once; each sees the mask of a tree.
TOKENS_AT_ONCE = 512


class _OneLayerCache(DynamicCache):
    """The cache of one layer, whatever its number."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states, 0, *args, **kwargs)


@dataclass
class _Stream:
    """What an MTP layer keeps of the committed tokens.

    Attributes:
        cache: Its keys and values.
        rows: The committed entries of each row.
        tokens: Per row the tokens that are not cached, the root last.
        hidden_states: Per row the hidden states that are paired with them, `(len(tokens), hidden_size)`.
    """

    cache: DynamicCache
    rows: CommittedRows
    tokens: list[list[int]]
    hidden_states: list[Tensor]


@dataclass
class MTPState(KnownSequences):
    """What the layers keep of the sequences; passed with the target's cache from one `generate()` call to the next.

    Attributes:
        streams: One per layer.
    """

    streams: list[_Stream] = field(default_factory=list)


class MTPTreeCandidateGenerator(LevelwiseTreeCandidateGenerator):
    """Expands a tree level by level with the target's MTP layers: one forward of one layer per level.

    For every committed token the layers get true hidden states: the first layer the target's, each other one the
    outputs of the layer before it. Below the root a node gets the output of the level above at its parent. A single
    layer is used again for every level, fed with its own output; of several, each is used for its own level.

    Args:
        drafter: The layers, from `hf_ddtree.load_drafter("mtp", target_model=...)`; Transformers' `MtpModel` will do.
        target_model: The target.
        config: Shape, width and depth of the trees. By default five levels, or as many as there are layers if there
            are several.
        state: An earlier call's `draft_state`, if the sequences continue.

    Raises:
        ValueError: If the layers are of another size than the target, or in training mode.
        TypeError: If the state is not of this kind.
    """

    def __init__(
        self,
        drafter: MTPDrafter | MtpModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: MTPState | None = None,
    ) -> None:
        if isinstance(drafter, MtpModel):
            drafter = wrap_mtp_model(drafter)
        check_mtp_drafter_fits(drafter, target_model)
        self._decoder = target_model.get_decoder()
        self._head: nn.Module = target_model.get_output_embeddings()
        last = len(decoder_layers(target_model)) - 1
        self._set_up(drafter, target_model, config, state, (last,), num_layers=len(drafter.layers))

    def _set_up(
        self,
        drafter: PreTrainedModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None,
        state: MTPState | None,
        feature_layers: tuple[int, ...],
        num_layers: int,
    ) -> None:
        """What a drafter of any kind needs that is fed with its own outputs below the root."""
        super().__init__()
        if state is not None and not isinstance(state, MTPState):
            raise TypeError(
                f"`draft_state` must be a former output's `draft_state` with the same kind of drafter, but is a "
                f"`{type(state).__name__}`."
            )
        self.drafter = drafter
        self.end_tokens = end_tokens_of(target_model)
        self.feature_layers = feature_layers
        self.state = state or MTPState()
        self._embeddings: nn.Embedding = target_model.get_input_embeddings()
        self._vocab_size = num_embeddings(target_model)
        self._device = execution_device(drafter)
        self._num_layers = num_layers
        longest = None if num_layers == 1 else num_layers
        self._set_knobs(config, longest or DEFAULT_DRAFT_LENGTH, longest)

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        config = self.drafter.config
        drafter = (config.name_or_path, config.hidden_size, self._num_layers, self._device, self.drafter.dtype)
        if num_cached == 0 or not self.state.continues(drafter, cached_ids, num_cached):
            self.state = MTPState(drafter=drafter)

    def finish(self, context: DraftContext) -> None:
        self._take_in(context)

    @torch.no_grad()
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self._take_in(context)
        roots = context.roots
        if not self.state.streams:
            return [DraftTree.root_only(root) for root in roots]
        trees = self._new_trees(roots, budget)
        return self._grow(trees, self._levels(trees, roots, self._width(budget)), context.tokens_left)

    def _levels(self, trees: list[GrowingTree], roots: list[int], width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level the candidates after the frontiers."""
        branches = [(DraftTree.root_only(root), [0]) for root in roots]
        inputs: list[Tensor] = []
        for level in itertools.count():
            fed = [tree for tree, _ in branches]
            outputs = self._run_level(level, fed, inputs)
            frontiers = [_rows_of(states, nodes) for states, (_, nodes) in zip(outputs, branches)]
            yield self._candidates(torch.cat(frontiers), width)
            branches = [tree.branches() for tree in trees]
            # A node's input is the output at its parent.
            inputs = [
                _rows_of(states, _places_of_parents(tree, before))
                for states, before, (tree, _) in zip(outputs, fed, branches)
            ]

    @torch.no_grad()
    def reduce_features(self, features: Tensor) -> Tensor:
        """The hidden states that the layers are fed with."""
        return self._decoder.norm(features).to(self._device, self.drafter.dtype)

    def _take_in(self, context: DraftContext) -> None:
        """Pairs the new tokens with what the features of the tokens before them were reduced to."""
        state = self.state
        state.input_ids, state.root_positions = context.input_ids, list(context.root_positions)
        if context.features is None:
            return
        hidden_states = context.features
        if not state.streams:
            state.streams = [self._new_stream(len(context.input_ids)) for _ in range(self._num_layers)]
        first = state.streams[0]
        for row, num_features in enumerate(context.num_features):
            if tokens := context.newest(row, num_features):
                first.tokens[row] += tokens
                new = hidden_states[row, num_features - len(tokens) : num_features]
                left = first.hidden_states[row]
                first.hidden_states[row] = torch.cat((left, new)) if len(left) else new

    def _new_stream(self, batch_size: int) -> _Stream:
        nothing = torch.zeros((0, self.drafter.config.hidden_size), device=self._device, dtype=self.drafter.dtype)
        positions = {"position_ids": torch.zeros((batch_size, 1), dtype=torch.long, device=self._device)}
        rows = CommittedRows(0, positions, batch_size, self._device)
        return _Stream(self._new_cache(), rows, [[] for _ in range(batch_size)], [nothing] * batch_size)

    def _run_level(self, level: int, trees: list[DraftTree], inputs: list[Tensor]) -> list[Tensor]:
        """Runs a level's layer on its new committed tokens and on one tree per row.

        Args:
            level: Distance of the deepest nodes from the root.
            trees: One tree per row, below the same root.
            inputs: Per row the hidden states that its nodes get, `(n, hidden_size)`; the root's is ignored, as it is a
                committed token.

        Returns:
            Per row the layer's outputs at the tree's nodes, `(n, hidden_size)`.
        """
        layer = min(level, self._num_layers - 1)
        stream = self.state.streams[layer]
        if level > layer:
            return self._run(layer, [0] * len(trees), trees, inputs)
        self._fill_empty_rows(layer, trees)
        while max(map(len, stream.tokens)) > TOKENS_AT_ONCE:
            self._run(layer, [min(len(tokens) - 1, TOKENS_AT_ONCE) for tokens in stream.tokens])
        return self._run(layer, [len(tokens) - 1 for tokens in stream.tokens], trees, inputs)

    def _run(
        self, layer: int, counts: list[int], trees: list[DraftTree] | None = None, inputs: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Runs a layer on the first `counts` of its new tokens, which it keeps, and on trees below the last of them.

        Its outputs for the kept tokens are the inputs of the next layer.

        Returns:
            Per row the outputs at the tree's nodes, `(n, hidden_size)`.
        """
        stream = self.state.streams[layer]
        fed = [
            DraftTree.chain(tokens[: max(count, 1)]) if trees is None else _below(tokens[:count], trees[row])
            for row, (tokens, count) in enumerate(zip(stream.tokens, counts))
        ]
        hidden_states = []
        for row, states in enumerate(stream.hidden_states):
            of_row = states[: counts[row] + 1] if trees is not None else states[: max(counts[row], 1)]
            hidden_states.append(torch.cat((of_row, inputs[row][1:])) if inputs else of_row)
        outputs = self._feed(layer, fed, hidden_states, counts)
        following = self.state.streams[layer + 1] if layer + 1 < self._num_layers else None
        for row, count in enumerate(counts):
            if following is not None and count:
                # The output for a token is paired with the token after it.
                following.tokens[row] += stream.tokens[row][1 : count + 1]
                following.hidden_states[row] = torch.cat((following.hidden_states[row], outputs[row][:count]))
            stream.tokens[row] = stream.tokens[row][count:]
            stream.hidden_states[row] = stream.hidden_states[row][count:]
        return [states[count:] for states, count in zip(outputs, counts)]

    def _fill_empty_rows(self, layer: int, trees: list[DraftTree]) -> None:
        """Gives the root a hidden state of zeros in rows that have none for it: rows of padding alone, and rows with
        too few tokens for the layer before."""
        stream = self.state.streams[layer]
        for row, tokens in enumerate(stream.tokens):
            if not tokens:
                stream.tokens[row] = trees[row].token_ids[:1].tolist()
                stream.hidden_states[row] = stream.hidden_states[row].new_zeros((1, self.drafter.config.hidden_size))

    def _feed(
        self, layer: int, trees: list[DraftTree], hidden_states: list[Tensor], counts: list[int]
    ) -> list[Tensor]:
        """One forward of a layer over one tree per row; keeps the first `counts` nodes of each in its cache.

        Returns:
            Per row the outputs, `(n, hidden_size)`.
        """
        stream, rows = self.state.streams[layer], self.state.streams[layer].rows
        tree_batch = TreeBatch.from_trees(trees, self._device)
        padded = nn.utils.rnn.pad_sequence(hidden_states, batch_first=True)
        outputs = self._run_layer(layer, tree_batch, rows, padded, stream.cache, counts)
        preallocate(stream.cache)
        commit(stream.cache, TreePass(tree_batch, rows.lengths), [list(range(count)) for count in counts], rows)
        self.num_forwards += 1
        return [states[: len(tree)] for states, tree in zip(outputs, trees)]

    def _new_cache(self) -> DynamicCache:
        """A cache for one layer."""
        return _OneLayerCache()

    def _run_layer(
        self,
        layer: int,
        tree_batch: TreeBatch,
        rows: CommittedRows,
        hidden_states: Tensor,
        cache: DynamicCache,
        num_committed: list[int],
    ) -> Tensor:
        """The outputs of a layer at the nodes of `tree_batch`, `(batch, n, hidden_size)`.

        The first `num_committed` nodes of each row are a chain of committed tokens, with the root below it.
        """
        position_ids = rows.root_position_ids() + tree_batch.depths
        embeddings = embedding_rows(self._embeddings, tree_batch.token_ids).to(self._device, self.drafter.dtype)
        return self.drafter(
            layer,
            inputs_embeds=embeddings,
            previous_hidden_state=hidden_states,
            position_embeddings=self._rotary(layer, embeddings, position_ids),
            attention_mask=self._mask(layer, tree_batch, rows),
            position_ids=position_ids,
            **{CACHE_KEY: cache},
        )

    def _candidates(self, hidden_states: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens after outputs `(nodes, hidden_size)`, as `top_candidates` gives them."""
        return self.best_on_host(head_logits(self._head, hidden_states)[..., : self._vocab_size], width)

    def _mask(self, layer: int, tree_batch: TreeBatch, rows: CommittedRows) -> Tensor:
        config = self.drafter.config
        layer_types = getattr(config, "layer_types", None)
        kind = "full_attention" if layer_types is None else layer_types[layer]
        window = config.sliding_window if kind == "sliding_attention" else None
        mask = tree_attention_mask(tree_batch, rows.num_cached, rows.mask(), window, window and rows.before_root())
        return to_additive(mask, self.drafter.dtype) if attention_implementation(config) == "eager" else mask

    def _rotary(self, layer: int, embeddings: Tensor, position_ids: Tensor) -> Any:
        rotary = getattr(self._decoder, "rotary_emb", None)
        if rotary is None:
            return None
        parameters = getattr(self.drafter.config, "rope_parameters", None) or {}
        if "mrope_section" in parameters:
            position_ids = position_ids[None].expand(3, -1, -1)  # text has the same position on every axis
        if any(isinstance(entry, dict) for entry in parameters.values()):
            return rotary(embeddings, position_ids, self.drafter.config.layer_types[layer])
        return rotary(embeddings, position_ids)


def _rows_of(states: Tensor, places: list[int]) -> Tensor:
    """`(len(places), hidden_size)`, some of `(n, hidden_size)` states."""
    return states[on_device(places, states.device)]


def _below(tokens: list[int], tree: DraftTree) -> DraftTree:
    """The tree with a chain of tokens above its root."""
    if not tokens:
        return tree
    token_ids = torch.cat((torch.tensor(tokens, device="cpu"), tree.token_ids))
    parents = torch.cat((torch.arange(-1, len(tokens) - 1, device="cpu"), tree.parents + len(tokens)))
    return DraftTree(token_ids, parents)


def _places_of_parents(tree: DraftTree, before: DraftTree) -> list[int]:
    """Where the parent of each node of `tree` stands in `before`, which lacks the deepest level; 0 for the root."""
    places, parents = [0], [0]
    for token, parent in zip(tree.token_ids.tolist()[1:], tree.parents.tolist()[1:]):
        parents.append(places[parent])
        place = before.child_with_token(places[parent], token)
        places.append(-1 if place is None else place)
    return parents
