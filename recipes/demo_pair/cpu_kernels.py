"""Qwen3.5's operators in a form that a CPU trains several times faster; same results to rounding error.

The depthwise convolution's backward in torch is slow on a CPU: here it is four shifted products. The gated delta rule
inverts its small triangular systems by matrix products, in chunks of 32, and knows the inverse's derivative, instead
of calling a triangular solver. Norms and the gated activation are fused by `torch.compile`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK, BLOCK = 32, 16


@torch.compile(dynamic=True)
def shifted_convolution(hidden: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: `(batch, channels, length)`, `(channels, kernel)` -> like `hidden`."""
    length, kernel = hidden.shape[-1], weight.shape[-1]
    padded = F.pad(hidden, (kernel - 1, 0))
    return F.silu(sum(padded[..., i : i + length] * weight[:, i, None] for i in range(kernel)))


@torch.compile(dynamic=True)
def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * weight


@torch.compile(dynamic=True)
def gated_rms_norm(hidden: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * weight * F.silu(gate)


@torch.compile(dynamic=True)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def causal_conv1d(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_):
    if bias is not None or activation != "silu":
        raise ValueError("this convolution knows no bias and no activation but SiLU")
    return shifted_convolution(hidden, weight)


class InverseOfUnitLower(torch.autograd.Function):
    """`(I + strict)^-1` for strictly lower triangular `(..., 32, 32)`.

    Halves of 16 by repeated squaring (exact: the 16th power is zero), then the two are joined by the block formula.
    Squaring all 32 rows at once would lose digits where many keys are alike.
    """

    @staticmethod
    def forward(ctx, strict: Tensor) -> Tensor:
        diagonal = torch.stack([strict[..., :BLOCK, :BLOCK], strict[..., BLOCK:, BLOCK:]], dim=-3)
        power, inverse = -diagonal, torch.eye(BLOCK, dtype=strict.dtype, device=strict.device) - diagonal
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        result = torch.zeros_like(strict)
        result[..., :BLOCK, :BLOCK], result[..., BLOCK:, BLOCK:] = inverse.unbind(-3)
        result[..., BLOCK:, :BLOCK] = -(inverse[..., 1, :, :] @ strict[..., BLOCK:, :BLOCK] @ inverse[..., 0, :, :])
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT)


def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_) -> tuple:
    """The gated delta rule from a zero state; shapes as `torch_chunk_gated_delta_rule`, heads equal in number."""
    batch, length, heads, key_dim = key.shape
    query, key = (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    padding = -length % CHUNK
    query, key, value = (
        F.pad(x.float().transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for x in (query, key, value)
    )
    g, beta = (F.pad(x.float().transpose(1, 2), (0, padding)).unflatten(2, (-1, CHUNK)) for x in (g, beta))

    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    weighted_key, query = key * beta[..., None], query * key_dim**-0.5
    products = torch.cat([weighted_key, query], dim=-2) @ key.mT
    strict, attention = products[..., :CHUNK, :] * decay, products[..., CHUNK:, :] * decay
    inverse = InverseOfUnitLower.apply(strict.tril(-1))
    solved = inverse @ torch.cat([value * beta[..., None], weighted_key * from_start], dim=-1)
    written, read = solved.split([value.shape[-1], key_dim], dim=-1)

    readers = torch.cat([read, query * from_start], dim=-2).unbind(2)
    written, attention, keys = written.unbind(2), attention.unbind(2), (key * to_end).mT.unbind(2)
    chunk_decay = total[..., -1].exp()[..., None, None].unbind(2)
    state, outputs = value.new_zeros(batch, heads, key_dim, value.shape[-1]), []
    for i in range(len(readers)):
        known, carried = (readers[i] @ state).chunk(2, dim=-2)
        new = written[i] - known
        outputs.append(carried + attention[i] @ new)
        state = state * chunk_decay[i] + keys[i] @ new
    output = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return output.transpose(1, 2), None


def recurrent_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **_
) -> tuple[Tensor, Tensor]:
    """One token: `query`, `key` and `value` are `(batch, 1, heads, dim)`, the state `(batch, heads, key_dim, dim)`."""
    key_dim = key.shape[-1]
    query, key = (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key, value = (x.float().transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    g, beta = (x.float().transpose(1, 2).flatten(0, 1)[..., None] for x in (g, beta))
    state = initial_state.float().flatten(0, 1) * g.exp()
    state.baddbmm_(key.mT, (value - key @ state) * beta)
    output = (query * key_dim**-0.5) @ state
    state = state.view(initial_state.shape)
    return output.view(*state.shape[:2], 1, -1).transpose(1, 2), state


def install_for_decoding() -> None:
    """Uses matrix products for single-token steps with a cache."""
    modeling_qwen3_5.torch_recurrent_gated_delta_rule = recurrent_gated_delta_rule


def install_for_training() -> None:
    """Uses the fast operators for training; a forward with a cache needs the originals."""
    modeling_qwen3_5.causal_conv1d_fn = causal_conv1d
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    modeling_qwen3_5.Qwen3_5RMSNorm.forward = lambda self, x: rms_norm(x, 1.0 + self.weight, self.eps)
    modeling_qwen3_5.Qwen3_5RMSNormGated.forward = lambda self, x, gate: gated_rms_norm(
        x, gate, self.weight, self.variance_epsilon
    )
    modeling_qwen3_5.Qwen3_5MLP.forward = lambda self, x: self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
