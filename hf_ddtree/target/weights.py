"""Using the target's embeddings and output head wherever their weights are: offloaded, or sharded over processes.

Accelerate keeps offloaded weights elsewhere (`meta` in their place) and brings them in for the module's own forward.
Tensor parallelism leaves each process a part of them, and a forward that puts the parts together. FSDP leaves a part
as well, and gathers the whole in the forward of some module above. So weights are not simply there to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..interop.models import execution_devices


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: on the device of its first weight or, if that is offloaded, where hooks bring it."""
    device = _first_weight(module).device
    if device.type == "meta":
        for part in module.modules():
            for brought_to in execution_devices(part):
                if brought_to is not None:
                    return torch.device(brought_to)
    return device


def num_embeddings(model: PreTrainedModel) -> int:
    """The number of tokens that a model's input embeddings know, also where an adapter is wrapped around them."""
    parts = model.get_input_embeddings().modules()
    return next(part.num_embeddings for part in parts if hasattr(part, "num_embeddings"))


def embedding_rows(embeddings: nn.Embedding, token_ids: Tensor) -> Tensor:
    """The rows of an embedding's weights, without a factor or a norm that its forward may apply to them.

    If FSDP shards the weights, every process must call this at the same time.

    Args:
        embeddings: The embedding, on any device.
        token_ids: Integers of any shape.

    Returns:
        `(*token_ids.shape, hidden_size)`, where and in the dtype in which the embedding computes.
    """
    token_ids = token_ids.to(execution_device(embeddings))
    if not _has_wrapped_forward(embeddings):
        return F.embedding(token_ids, _whole(embeddings.weight))
    with _EmbeddingCalls() as calls:
        embeddings(token_ids)
    return calls.rows[-1]


def head_logits(head: nn.Module, hidden_states: Tensor) -> Tensor:
    """What an output head makes of hidden states.

    If FSDP shards the weights, every process must call this at the same time.

    Args:
        head: The head, on any device, quantized or not.
        hidden_states: `(..., hidden_size)`, on any device, in any floating dtype.

    Returns:
        `(..., vocab)`, where and in the dtype in which the head computes, or on the device of the hidden states if the
        head's weights are offloaded.
    """
    weight = _first_weight(head)
    if weight is None:
        return head(hidden_states)
    hidden_states = hidden_states.to(execution_device(head))
    if weight.is_floating_point():
        hidden_states = hidden_states.to(weight.dtype)
    if hasattr(weight, "full_tensor") and not _has_wrapped_forward(head):
        bias = getattr(head, "bias", None)
        return F.linear(hidden_states, _whole(weight), None if bias is None else _whole(bias))
    return head(hidden_states)


def _first_weight(module: nn.Module) -> Any:
    """The first of a module's parameters, None if it has none; asked first for `weight`, which is faster."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) else next(module.parameters(), None)


def _has_wrapped_forward(module: nn.Module) -> bool:
    """Whether accelerate or tensor parallelism has put a forward of theirs around the module's own."""
    return "forward" in vars(module)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process may hold a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class _EmbeddingCalls(TorchFunctionMode):
    """Keeps what `F.embedding` returns meanwhile, in this thread, put together if each process has a part of it.

    Attributes:
        rows: One tensor per call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.embedding:
            result = _whole(result)  # a DTensor can be put together only once
            self.rows.append(result)
        return result
