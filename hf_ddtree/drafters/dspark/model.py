"""The DSpark drafter: DFlash layers, a Markov head that corrects each slot by the token before, and a confidence head.

Weights are named as in the checkpoints of DeepSpec, SpecForge and the speculators library.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ...target.weights import embedding_rows
from ..sequential_head import SequentialHeadDraftModel
from .config import DSparkConfig


class MarkovHead(nn.Module):
    """A bias on a slot's logits, given the token before it.

    With `e = W1[token]`, the hidden state `h` of the slot and a state `s` that is 0 at the root, it is

        vanilla   W2 e
        gated     W2 (sigmoid(gate_proj [h; e]) * e)
        rnn       W2 tanh(o), where [g; c; o] = joint_proj [s; e; h]
                  and s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head_type
        self.state_size = rank if self.kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def forward(self, hidden_states: Tensor, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The bias and the next states.

        Args:
            hidden_states: `(n, hidden_size)`, of the slots to predict.
            embedded: `(n, rank)`, `W1` of the tokens before them.
            states: `(n, state_size)`.

        Returns:
            `(n, vocab)` in the order of the drafter's vocabulary, and `(n, state_size)`.
        """
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat((hidden_states, embedded), dim=-1))) * embedded
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat((states, embedded, hidden_states), dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            states, embedded = gate * states + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return self.markov_w2(embedded), states


class ConfidenceHead(nn.Module):
    """The logit of the probability that a slot's token is accepted, given that those before it are."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """`(n,)` from `(n, num_features)`."""
        return self.proj(features).squeeze(-1)


class DSparkDraftModel(SequentialHeadDraftModel):
    """The DSpark drafter. `forward` is that of `DFlashDraftModel`."""

    config_class = DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        if config.owns_vocabulary:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.is_conditional = config.markov_rank > 0 or config.enable_confidence_head
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = None
        if config.enable_confidence_head:
            seen = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + seen)
        self.post_init()

    def embed(self, token_ids: Tensor, target_embeddings: nn.Embedding) -> Tensor:
        """As of `DFlashDraftModel`, by the drafter's own embeddings if it has them."""
        return super().embed(token_ids, self.embed_tokens if self.config.owns_vocabulary else target_embeddings)

    def start_states(self, num_rows: int) -> Tensor:
        size = 0 if self.markov_head is None else self.markov_head.state_size
        return torch.zeros((num_rows, size), device=self.device, dtype=self.dtype)

    def correct(
        self, hidden_states: Tensor, token_ids: Tensor, states: Tensor, depth: int, target_embeddings: nn.Embedding
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        hidden_states = hidden_states.to(self.dtype)
        bias, features = None, hidden_states
        if self.markov_head is not None:
            embedded = embedding_rows(self.markov_head.markov_w1, token_ids).to(self.device)
            bias, states = self.markov_head(hidden_states, embedded, states)
            if self.config.confidence_head_with_markov:
                features = torch.cat((hidden_states, embedded), dim=-1)
        if self.confidence_head is None:
            return bias, None, states
        return bias, nn.functional.logsigmoid(self.confidence_head(features).float()), states


AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
