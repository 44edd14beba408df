"""What a step of training needs in memory, by a dry run on tensors without contents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashConfig, DFlashDraftModel
from ..interop.allocations import PeakMemory, without_contents
from .block_loss import BlockLoss
from .config import TrainingConfig
from .documents import Rows
from .optimizers import build_optimizers


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step in one process.

    Attributes:
        target: The target's weights.
        drafter: The drafter's weights.
        optimizers: What the optimizers keep.
        on_its_way: What the step needs at most beside all these: features, what is kept for the gradient, logits,
            gradients. The forward of the target is over by then and not counted, nor what kernels need inside.
    """

    target: int
    drafter: int
    optimizers: int
    on_its_way: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.target + self.drafter + self.optimizers + self.on_its_way


def step_memory(
    drafter: DFlashDraftModel,
    target_model: PreTrainedModel,
    config: TrainingConfig,
    length: int,
    autocast: torch.dtype | None = None,
) -> StepMemory:
    """What a step will need, if every row has all its blocks.

    Two steps are run on tensors that have sizes alone, which takes a second and no memory.

    Args:
        drafter: The drafter, of which the parameters that take no gradient stay as they are.
        target_model: The target.
        config: The settings.
        length: Tokens of a row.
        autocast: What products are computed in; None for the drafter's own dtype.
    """
    device, trained = drafter.device, {name for name, one in drafter.named_parameters() if one.requires_grad}
    is_tied = drafter.config.draft_vocab_size is None
    weight = target_model.get_output_embeddings().weight
    target = sum(one.nbytes for one in _distinct([*target_model.parameters(), *target_model.buffers()]))
    with without_contents(), torch.device(device):
        embeddings, head = _lent(drafter.config, weight.dtype if is_tied else drafter.dtype)
        with PeakMemory() as memory:
            copy = type(drafter)(drafter.config).train()
            for name, parameter in copy.named_parameters():
                parameter.requires_grad_(name in trained)
            weights = memory.now
            lender: Any = SimpleNamespace(get_input_embeddings=lambda: embeddings, get_output_embeddings=lambda: head)
            loss = BlockLoss(copy, lender, config)
            optimizers = build_optimizers(copy.named_parameters(), config.learning_rate, config.weight_decay)
            cast = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
            for _ in range(2):  # only the second finds what the optimizers keep
                memory.peak = 0
                for _ in range(min(config.accumulation, 2)):
                    _run_part(loss, copy.config, config, length, target_model.dtype, cast)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            kept = memory.now - weights
            return StepMemory(target, weights, kept, memory.peak - weights - kept)


def _run_part(
    loss: BlockLoss,
    drafter: DFlashConfig,
    config: TrainingConfig,
    length: int,
    dtype: torch.dtype,
    cast: AbstractContextManager[Any],
) -> None:
    """One forward and its gradient."""
    shape = config.rows, length
    rows = Rows(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.ones(shape) > 0)
    features = torch.zeros(*shape, len(drafter.target_layer_ids or ()) * drafter.hidden_size, dtype=dtype)
    logits = torch.zeros(*shape, drafter.vocab_size, dtype=dtype) if config.distribution_share > 0 else None
    anchors = torch.zeros(config.rows, config.anchors, dtype=torch.int64)
    with cast:
        hidden_states = loss.draft(rows, features, anchors).flatten(0, 1).clone()  # as if some were chosen
        slots = hidden_states.shape[:2]
        labels = torch.zeros(slots, dtype=torch.int64)
        truth = None if logits is None else (logits, labels, labels)
        total, _ = loss.compare_blocks(hidden_states, labels, labels, torch.ones(slots) > 0, truth)
    total.backward()


def _lent(config: DFlashConfig, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Embeddings and head of the target's size."""
    embeddings = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    return embeddings.requires_grad_(False), head.requires_grad_(False)


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())
