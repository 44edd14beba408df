"""The interface of everything that proposes trees."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput

from ..configuration import DDTreeConfig
from ..interop.versions import CACHE_KEY, captured_layers, hidden_states_of
from ..tree.candidates import best_tokens, on_host
from ..tree.draft_tree import DraftTree
from ..tree.shape import TreeShape
from .context import DraftContext, VerifiedRound

# Drafted nodes of the tree whose best chain Transformers' own assisted decoding gets.
CHAIN_BUDGET = 16


class Unread(Protocol):
    """Something that has values to read from a device, in no hurry."""

    def unread(self) -> list[Tensor]:
        """The values, on their device."""

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Takes what `unread` gave, brought to the CPU."""


class TreeCandidateGenerator(CandidateGenerator):
    """Proposes a token tree per row and round.

    A generator that keeps something between rounds serves one `generate()` call at a time.

    Attributes:
        feature_layers: Decoder layers of the target, from 0, whose outputs the generator needs.
        reads_whole_prompt: Whether it needs their outputs for every token of a prompt, and not for the last one alone.
        build_seconds: Time spent on turning distributions into trees since the last `start`.
        num_forwards: Forwards of the drafter since the last `start`.
        state: What it knows of the sequences, for a later call that goes on with them; None if nothing.
        reads_along: What has values to read from the device, which come with this generator's own; or None.
        learns: Whether its drafts get better in the course of a call and cost little, so that `"auto"` must not pause.
        end_tokens: Where `get_candidates` ends a chain: the target's end-of-sequence tokens.
    """

    feature_layers: tuple[int, ...] = ()
    reads_whole_prompt: bool = True
    state: Any = None
    end_tokens: frozenset[int] = frozenset()
    reads_along: Unread | None = None
    learns: ClassVar[bool] = False
    build_seconds: float = 0.0
    num_forwards: int = 0
    default_shape: ClassVar[TreeShape] = "best_first"
    # Where Transformers' own assisted decoding is.
    _num_candidates: int = 0
    _num_seen: int = 0

    @property
    def needs_checks(self) -> bool:
        """Whether its trees must be checked: unless its class is one of the package's own."""
        return not type(self).__module__.startswith(f"{__package__}.")

    @abstractmethod
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        """Proposes one tree per row, with the row's last token as its root and at most `budget` drafted nodes.

        Must not draw from PyTorch's default random generator: sampling with a seed would give other tokens.
        """

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        """Called before the first round of a `generate()` call.

        Args:
            cached_ids: `(batch, num_cached)`, the tokens in the target's cache; `(batch, 0)` if the caller passed only
                those that follow.
            num_cached: Number of tokens in the target's cache. The generator is told nothing more of them.
        """
        self.build_seconds = 0.0
        self.num_forwards = 0

    def reduce_features(self, features: Tensor) -> Tensor:
        """What the generator needs of features, which is kept of a prompt in their place; all of them here.

        Args:
            features: `(batch, tokens, len(feature_layers) * hidden_size)`, of some tokens; those of a prompt come in
                parts.

        Returns:
            `(batch, tokens, size)`, on any device.
        """
        return features

    def observe(self, verified: VerifiedRound) -> None:
        """Called after each round, and after the prefill with the prompts' last tokens as roots; does nothing here."""

    def finish(self, context: DraftContext) -> None:
        """Called after the last round, with what `propose` would get now.

        Of the package's own generators also in place of `propose`, in a round that needs nothing of them.
        """

    def _set_knobs(self, config: DDTreeConfig | None, default_length: int, longest: int | None = None) -> None:
        """Keeps the knobs, with the generator's own shape and draft length where they are None.

        Args:
            config: The knobs; None for the defaults.
            default_length: Depth of the deepest node by default.
            longest: Depth of the deepest node that can be drafted; None for no limit.
        """
        self.config = config or DDTreeConfig()
        self._shape: TreeShape = self.config.tree_shape or self.default_shape
        length = self.config.draft_length or default_length
        self._draft_length = length if longest is None else min(length, longest)

    def on_host(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of one device, float32 or int64 that fit 32 bits, on the CPU, with one transfer.

        It also brings what `reads_along` has to read from the same device.
        """
        unread = [] if self.reads_along is None else self.reads_along.unread()
        if self.reads_along is None or any(tensor.device != tensors[0].device for tensor in unread):
            return on_host(*tensors)
        brought = on_host(*tensors, *unread)
        self.reads_along.bring(brought[len(tensors) :])
        return brought[: len(tensors)]

    def best_on_host(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """`top_candidates`, with what `reads_along` has to read."""
        log_probs, token_ids = self.on_host(*best_tokens(logits, top_k))
        return log_probs, token_ids

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
        tree = self.propose(DraftContext(input_ids, [num_seen], features, num_features), CHAIN_BUDGET)[0]
        tokens = tree.best_chain().token_ids[1:].tolist()
        ends = (place for place, token in enumerate(tokens, start=1) if token in self.end_tokens)
        tokens = tokens[: next(ends, len(tokens))]
        self._num_candidates = len(tokens)
        drafted = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat((input_ids, drafted), dim=1), None

    def _features_of(self, outputs: ModelOutput, model_kwargs: dict[str, Any], num_matches: int) -> Tensor:
        """`(1, tokens, size)`, reduced, of what the last forward was fed and was kept, padding left out."""
        layers = [hidden_states_of(outputs, layer) for layer in self.feature_layers]
        length = layers[0].shape[1] - self._num_candidates + num_matches
        self._num_seen += length
        features = torch.cat([layer[:, :length].to(layers[0].device) for layer in layers], dim=-1)
        features = self.reduce_features(features)
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is None:
            return features
        # The mask reaches to the root, which follows the features.
        return features[:, attention_mask[0, -1 - length : -1].to(features.device, torch.bool)]

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to update: what a generator learns it learns from `DraftContext`."""


def end_tokens_of(model: PreTrainedModel) -> frozenset[int]:
    """The end-of-sequence tokens in the model's generation config."""
    tokens = getattr(model.generation_config, "eos_token_id", None)
    return frozenset(() if tokens is None else [tokens] if isinstance(tokens, int) else tokens)
