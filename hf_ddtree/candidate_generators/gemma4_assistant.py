"""Trees from Gemma 4's assistants, which attend to the target's own keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.mask import to_additive
from ..configuration import DDTreeConfig
from ..devices import on_device
from ..drafters.gemma4_assistant.checkpoint import check_assistant_fits, layers_to_read
from ..interop.models import attention_implementation
from ..target.committed_cache import CommittedCache
from ..target.layers import decoder_layers, window_of
from ..target.weights import execution_device
from ..tree.candidates import best_tokens
from ..tree.draft_tree import DraftTree
from ..tree.growing_tree import GrowingTree
from .base import end_tokens_of
from .context import DraftContext
from .levelwise import DEFAULT_DRAFT_LENGTH, LevelwiseTreeCandidateGenerator


class Gemma4AssistantTreeCandidateGenerator(LevelwiseTreeCandidateGenerator):
    """Expands a tree level by level with an assistant of Gemma 4: one forward for all nodes of a level.

    A node's input is the target's embedding of its token and a state of the token before it: the target's
    final-normalised one above the root, the assistant's own output below. Every node attends to the target's keys of
    the committed tokens, from the root's position, and to no other node. So nothing is kept from round to round.

    Transformers' own loop lets the assistant see keys of drafted tokens that were rejected in the last round as well,
    and through a sliding window up to two tokens more than the target sees.

    Args:
        drafter: The assistant.
        target_model: The target, a Gemma 4.
        config: Shape, width and depth of the trees; five levels if `draft_length` does not say otherwise.
        state: None, as there is none.

    Raises:
        ValueError: If the assistant does not fit the target.
        TypeError: If there is a state, which is then another drafter's.
    """

    reads_whole_prompt = False

    def __init__(
        self,
        drafter: PreTrainedModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: None = None,
    ) -> None:
        super().__init__()
        check_assistant_fits(drafter, target_model)
        if state is not None:
            raise TypeError(
                f"`draft_state` is a `{type(state).__name__}`, but a {type(drafter).__name__} keeps no state. Leave "
                "it out."
            )
        self.drafter = drafter
        self.feature_layers = (len(decoder_layers(target_model)) - 1,)
        self.end_tokens = end_tokens_of(target_model)
        self._set_knobs(config, DEFAULT_DRAFT_LENGTH)
        self._norm = target_model.get_decoder().norm
        self._embeddings = target_model.get_input_embeddings()
        target_config, read = target_model.config.get_text_config(), layers_to_read(target_model)
        kinds = set(drafter.config.get_text_config().layer_types)
        self._layers = {kind: (read[kind], window_of(target_config, kind)) for kind in kinds}
        self._is_eager = attention_implementation(drafter.config.get_text_config()) == "eager"
        self._device = execution_device(drafter)

    @torch.no_grad()
    def reduce_features(self, features: Tensor) -> Tensor:
        """The states that the assistant is fed with."""
        return self._norm(features).to(self._device, self.drafter.dtype)

    @torch.no_grad()
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        trees = self._new_trees(context.roots, budget)
        if context.features is None or context.target_cache is None:
            return [tree.tree() for tree in trees]
        last = on_device([max(count - 1, 0) for count in context.num_features], context.features.device)
        states = context.features[torch.arange(len(trees), device=last.device), last][:, None]
        levels = self._levels(trees, states, context.target_cache, self._width(budget))
        return self._grow(trees, levels, context.tokens_left)

    def _levels(
        self, trees: list[GrowingTree], states: Tensor, target_cache: CommittedCache, width: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each level the candidates after the frontiers.

        Args:
            trees: One tree per row.
            states: `(batch, 1, hidden_size)`, the target's of the tokens before the roots.
            target_cache: What holds the target's keys.
            width: Most candidates below a node.
        """
        attended = self._attended(target_cache)
        while True:
            sizes = [len(tree.frontier) for tree in trees]
            nodes = np.zeros((2, len(trees), max(sizes)), dtype=np.int64)
            for row, (tree, size) in enumerate(zip(trees, sizes)):
                nodes[:, row, :size] = tree.frontier_tokens, tree.frontier_parents
            tokens, parents = on_device(torch.from_numpy(nodes), self._device)
            states = states.gather(1, parents[..., None].expand(-1, -1, states.shape[-1]))
            outputs = self._run(tokens, states, **attended)
            states = self.drafter.post_projection(outputs)
            is_node = np.arange(max(sizes)) < np.array(sizes)[:, None]
            rows, places = on_device(torch.from_numpy(np.stack(is_node.nonzero())), self._device)
            yield self._candidates(outputs[rows, places], width)

    def _attended(self, target_cache: CommittedCache) -> dict[str, Any]:
        """What every node attends to in layers of each kind, through which mask, and from which position."""
        keys_and_values, masks = {}, {}
        for kind, (layer, window) in self._layers.items():
            *entries, seen = target_cache.read(layer, window)
            keys_and_values[kind] = tuple(entry.to(self._device, self.drafter.dtype) for entry in entries)
            mask = seen[:, None, None].to(self._device)
            masks[kind] = to_additive(mask, self.drafter.dtype) if self._is_eager else mask
        position_ids = target_cache.rows.root_position_ids().to(self._device)
        return {"shared_kv_states": keys_and_values, "attention_mask": masks, "position_ids": position_ids}

    def _run(self, tokens: Tensor, states: Tensor, position_ids: Tensor, **attended: Any) -> Tensor:
        """The assistant's hidden states `(batch, n, its hidden_size)` for nodes `(batch, n)` and the states before."""
        embeddings = self._embeddings(tokens.to(execution_device(self._embeddings))).to(states)
        position_ids = position_ids.expand(-1, tokens.shape[1])
        self.num_forwards += 1
        return self.drafter.model(
            inputs_embeds=self.drafter.pre_projection(torch.cat((embeddings, states), dim=-1)),
            position_ids=position_ids,
            use_cache=False,
            # Layers that read keys of others drop all tokens but the last ones of a number: none are dropped of these.
            logits_to_keep=torch.arange(tokens.shape[1], device=self._device),
            **attended,
        ).last_hidden_state

    def _candidates(self, hidden_states: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens after outputs `(nodes, hidden_size)`, as `top_candidates` gives them.

        An assistant with an ordered vocabulary scores the tokens of the likeliest clusters alone; others are never
        drafted.
        """
        drafter = self.drafter
        if drafter.masked_embedding is None:
            return self.best_on_host(drafter.lm_head(hidden_states), width)
        clusters = drafter.masked_embedding
        best = clusters.centroids(hidden_states).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        token_ids = clusters.token_ordering.long().view(clusters.num_centroids, -1)[best].flatten(1)
        logits = (drafter.lm_head.weight[token_ids] @ hidden_states[..., None])[..., 0]
        log_probs, places = best_tokens(logits, width)
        log_probs, token_ids = self.on_host(log_probs, token_ids.gather(1, places))
        return log_probs, token_ids
