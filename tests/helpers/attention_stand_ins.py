"""Stand-ins on the CPU for attention kernels that need a GPU, as strict about masks as these are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import flash_attention as flash_integration
from transformers.integrations import flex_attention as flex_integration

IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "flex_attention")


@contextmanager
def running_with(model: PreTrainedModel, implementation: str) -> Iterator[PreTrainedModel]:
    """A copy of the model that runs with one of `IMPLEMENTATIONS`."""
    twin = copy.deepcopy(model)
    twin.config.get_text_config()._attn_implementation_internal = implementation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_integration, "_flash_attention_forward", _flash_attention)
        patch.setattr(flex_integration, "compile_friendly_flex_attention", _flex_attention)
        patch.setattr(masking_utils, "create_block_mask", _block_mask)
        yield twin


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`(batch, queries, heads, d)` of queries, keys and values in this order of dimensions."""
    assert attention_mask is None or attention_mask.ndim == 2, "flash attention takes no mask of queries by keys"
    groups = query.shape[2] // key.shape[2]
    keys, values = (states.repeat_interleave(groups, dim=2).permute(0, 2, 1, 3) for states in (key, value))
    scores = query.permute(0, 2, 1, 3) @ keys.mT * (softmax_scale or 1 / math.sqrt(query.shape[-1]))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(key.shape[1] - query_length, key.shape[1])[:, None] - torch.arange(key.shape[1])
    visible = (behind >= 0) if is_causal else torch.ones_like(behind, dtype=torch.bool)
    if sliding_window is not None:
        visible = visible & (behind < sliding_window)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -key.shape[1] :].bool()
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return (weights @ values).transpose(1, 2)


def _flex_attention(*args: Any, training: bool = False, **kwargs: Any) -> Any:
    """Not compiled, which would take longer than all tests of it."""
    return flex_attention(*args, **kwargs)


def _block_mask(*args: Any, **kwargs: Any) -> Any:
    return create_block_mask(*args, **kwargs | {"_compile": False})
