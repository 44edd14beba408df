"""The DFlash 2 drafter: DFlash with convolutions inside the block, and a selector that scores pairs of neighbours.

The convolutions are a cheap second way for a slot to see the slots before it. The selector scores how well a candidate
token follows the one before it, which the slots' own distributions cannot tell, as all slots are predicted at once.
Weights are named as in the checkpoints that z-lab publishes (`architectures: ["DFlash2DraftModel"]`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers import initialization as init

from ..dflash.model import DFlashDraftModel, DFlashLayer
from .config import DFlash2Config


class GroupedDynamicConvolution(nn.Module):
    """Two causal depthwise convolutions along a block, one before and one after what they surround.

    A kernel is the sum of a learnt part, with one weight per channel and tap, and of a part computed from the first
    convolution's input, with one weight per group of channels, tap and slot. Tap `j` reads the slot `j` before.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.taps, self.block_size = config.conv_kernel_size, config.block_size
        self.groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def kernels(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Both kernels, each `(batch, length, taps, hidden_size)`, from `(batch, length, hidden_size)`."""
        dynamic = self.kernel_projection(hidden_states).unflatten(-1, (2, self.taps, self.groups, 1))
        kernels = dynamic + self.base_kernel.unflatten(-1, (self.groups, -1))
        return kernels.flatten(-2).unbind(2)

    def convolve(self, hidden_states: Tensor, kernel: Tensor) -> Tensor:
        """`(batch, length, hidden_size)`, each block of `block_size` slots by itself."""
        blocks = hidden_states.unflatten(1, (-1, min(hidden_states.shape[1], self.block_size)))
        windows = F.pad(blocks, (0, 0, self.taps - 1, 0)).unfold(2, self.taps, 1).flip(-1)
        return (windows.flatten(1, 2) * kernel.transpose(2, 3)).sum(-1)


class DFlash2Layer(DFlashLayer):
    """A DFlash layer with convolutions around its attention and around its MLP."""

    def __init__(self, config: DFlash2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_conv = GroupedDynamicConvolution(config)
        self.mlp_conv = GroupedDynamicConvolution(config)

    def forward(self, hidden_states: Tensor, *attention_args: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(self.attention_conv.convolve(normed, before), *attention_args)
        hidden_states = hidden_states + self.attention_conv.convolve(attended, after)
        normed = self.post_attention_layernorm(hidden_states)
        before, after = self.mlp_conv.kernels(normed)
        transformed = self.mlp(self.mlp_conv.convolve(normed, before))
        return hidden_states + self.mlp_conv.convolve(transformed, after)


class CandidateSelector(nn.Module):
    """How well token `c` at a slot follows token `p` at the slot before: `<pred(p) * proj(h), succ(c)>`.

    It is added to the slot's logit of `c`; `h` is the slot's hidden state.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden_states: Tensor, predecessors: Tensor, successors: Tensor) -> Tensor:
        """Scores of all pairs.

        Args:
            hidden_states: `(..., hidden_size)`.
            predecessors: `(..., p)` int64.
            successors: `(..., c)` int64.

        Returns:
            `(..., p, c)`.
        """
        projected = self.hidden_projection(hidden_states)
        before = F.embedding(predecessors, self.predecessor_codebook) * projected[..., None, :]
        return before @ F.embedding(successors, self.successor_codebook).mT


class DFlash2DraftModel(DFlashDraftModel):
    """The DFlash drafter with convolutions and a candidate selector. `forward` is that of `DFlashDraftModel`; a pass
    longer than `block_size` holds several blocks, each of that size.

    A new one does what a `DFlashDraftModel` does: its convolutions are the identity, the selector's scores are zero.
    """

    config_class = DFlash2Config
    is_conditional = True
    layer_class = DFlash2Layer
    _no_split_modules = ["DFlash2Layer"]

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def pair_scores(self, hidden_states: Tensor, root_ids: Tensor, candidates: Tensor) -> Tensor:
        """What the selector adds to the logit of every candidate after every candidate of the slot before.

        Args:
            hidden_states: `(batch, depth, hidden_size)`, of the slots to predict, in order.
            root_ids: `(batch,)` int64, the predecessor at the first slot.
            candidates: `(batch, depth, k)` int64, on any device.

        Returns:
            `(batch, depth, k, k)` float32 on the device of `candidates`, by predecessor, then by candidate. At the
            first slot all rows are the root's.
        """
        first = root_ids.to(candidates.device)[:, None, None].expand_as(candidates[:, :1])
        predecessors = torch.cat((first, candidates[:, :-1]), dim=1)
        pair = torch.stack((predecessors, candidates)).to(self.device)
        scores = self.candidate_selector(hidden_states.to(self.device, self.dtype), pair[0], pair[1])
        return scores.to(candidates.device, torch.float32)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicConvolution):
            init.zeros_(module.kernel_projection.weight)
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
        elif isinstance(module, CandidateSelector):
            # Their products are of the order of 1 / sqrt(rank), so that scores grow slowly at first.
            scale = self.config.selector_rank**-0.25
            init.normal_(module.predecessor_codebook, std=scale)
            init.normal_(module.hidden_projection.weight, std=scale * self.config.hidden_size**-0.5)
            init.zeros_(module.successor_codebook)


AutoConfig.register(DFlash2Config.model_type, DFlash2Config, exist_ok=True)
AutoModel.register(DFlash2Config, DFlash2DraftModel, exist_ok=True)
