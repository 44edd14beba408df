"""The Domino drafter: DFlash layers, and a head that corrects each slot by a recurrence over the branch.

Weights are named as in the checkpoints of SpecForge.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ..sequential_head import SequentialHeadDraftModel
from .config import DominoConfig


class DominoDraftModel(SequentialHeadDraftModel):
    """The Domino drafter. `forward` is that of `DFlashDraftModel`.

    With the target's embedding `x` of a node's token, the state `s` of its parent (0 in front of the root) and the
    hidden state `h` of the slot that predicts the node's children, the node's state and the bias on that slot are

        s' = GRU(x, s)
        W2 SiLU(W1 [h; s'])

    The children of nodes above `pure_draft_prefix_len` have no bias.
    """

    config_class = DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        self.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )
        self.post_init()

    def start_states(self, num_rows: int) -> Tensor:
        return torch.zeros((num_rows, self.config.gru_hidden_dim), device=self.device, dtype=self.dtype)

    def correct(
        self, hidden_states: Tensor, token_ids: Tensor, states: Tensor, depth: int, target_embeddings: nn.Embedding
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        embedded = self.embed(token_ids, target_embeddings)
        states = self.prefix_gru(embedded[:, None], states[None].contiguous())[1][0]
        if depth < self.config.pure_draft_prefix_len:
            return None, None, states
        return self.embed_proj(torch.cat((hidden_states.to(self.dtype), states), dim=-1)), None, states


AutoConfig.register(DominoConfig.model_type, DominoConfig, exist_ok=True)
AutoModel.register(DominoConfig, DominoDraftModel, exist_ok=True)
