"""The P-EAGLE drafter (arXiv:2602.01469): EAGLE-3's layers, which predict several tokens in one forward.

A token to predict enters as the embedding of a mask token, and a learnt vector stands for the features of the one
before it. It sees the context and the masks in front of it. Weights are named as in the checkpoints of the speculators
library.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ..calibration import Calibration
from ..eagle3.model import Eagle3DraftModel
from .config import PEagleConfig


class PEagleDraftModel(Eagle3DraftModel):
    """The P-EAGLE drafter. `forward` is that of `Eagle3DraftModel`.

    Attributes:
        calibration: The measured corrections of its probabilities.
    """

    config_class = PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.calibration = Calibration()
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_features * config.hidden_size))
        self.post_init()

    def masked_state(self) -> Tensor:
        """`(hidden_size,)`, the hidden state that enters with a mask token."""
        return self.project(self.mask_hidden)[0, 0]


AutoConfig.register(PEagleConfig.model_type, PEagleConfig, exist_ok=True)
AutoModel.register(PEagleConfig, PEagleDraftModel, exist_ok=True)
