"""DSpark's heads: names and shapes of their weights, and what they make of a block by plain equations."""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import Any

import torch
from torch import Tensor

HEADS = ("vanilla", "gated", "rnn")
RANK = 8
SETTINGS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
Tensors = dict[str, Tensor]


def head_shapes(settings: dict[str, Any], hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of both heads, as `SETTINGS` says."""
    shapes: dict[str, tuple[int, ...]] = {}
    seen = hidden
    if settings["markov_rank"]:
        shapes |= {"markov_head.markov_w1.weight": (vocab, RANK), "markov_head.markov_w2.weight": (vocab, RANK)}
        seen += RANK if settings["confidence_head_with_markov"] else 0
        if settings["markov_head_type"] == "gated":
            shapes |= {"markov_head.gate_proj.weight": (RANK, hidden + RANK), "markov_head.gate_proj.bias": (RANK,)}
        elif settings["markov_head_type"] == "rnn":
            joint = "markov_head.joint_proj"
            shapes |= {f"{joint}.weight": (3 * RANK, 2 * RANK + hidden), f"{joint}.bias": (3 * RANK,)}
    if settings["enable_confidence_head"]:
        shapes |= {"confidence_head.proj.weight": (1, seen), "confidence_head.proj.bias": (1,)}
    return shapes


def sharpen(tensors: Tensors) -> None:
    """Makes rather sure what follows a token, so that trees are deep."""
    if "markov_head.markov_w2.weight" in tensors:
        tensors["markov_head.markov_w2.weight"] *= 12
    if "confidence_head.proj.bias" in tensors:
        tensors["confidence_head.proj.bias"] += 2


def plain_step(tensors: Tensors, head: str, hidden: Tensor, token: int, state: Tensor) -> tuple[Tensor, Tensor, float]:
    """One step of the heads by their equations: the bias, the next state and the confidence."""
    embedded = tensors["markov_head.markov_w1.weight"][token]
    w2 = tensors["markov_head.markov_w2.weight"]
    features = torch.cat((hidden, embedded))
    confidence = torch.sigmoid(
        tensors["confidence_head.proj.weight"][0] @ features + tensors["confidence_head.proj.bias"][0]
    ).item()
    if head == "vanilla":
        return w2 @ embedded, state, confidence
    if head == "gated":
        weight, bias = tensors["markov_head.gate_proj.weight"], tensors["markov_head.gate_proj.bias"]
        return w2 @ (torch.sigmoid(weight @ features + bias) * embedded), state, confidence
    joint = tensors["markov_head.joint_proj.weight"] @ torch.cat((state, embedded, hidden))
    gate, candidate, output = (joint + tensors["markov_head.joint_proj.bias"]).split(RANK)
    gate = torch.sigmoid(gate)
    return w2 @ torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate), confidence


@torch.no_grad()
def plain_tree(
    tensors: Tensors, head: str, hidden: Tensor, logits: Tensor, root: int, budget: int
) -> dict[tuple[int, ...], float]:
    """The most probable prefixes under the heads' distributions, scaled by confidence, with log-probabilities.

    Args:
        tensors: The drafter's weights.
        head: The kind of Markov head.
        hidden: `(depth, hidden_size)`, of the slots to predict.
        logits: `(depth, vocab)`, without the head.
        root: The root's token.
        budget: How many prefixes.
    """
    order = count()

    def children(prefix: tuple[int, ...], log_prob: float, state: Tensor) -> list[tuple[Any, ...]]:
        depth = len(prefix)
        if depth == len(hidden):
            return []
        bias, state, confidence = plain_step(tensors, head, hidden[depth], ([root, *prefix])[-1], state)
        probs = (logits[depth] + bias).softmax(-1)
        share = min(1.0, confidence / (probs**2).sum().item())
        return [
            (-(log_prob + math.log(share * p)), next(order), (*prefix, token), state)
            for token, p in enumerate(probs.tolist())
        ]

    heap = children((), 0.0, torch.zeros(RANK))
    heapq.heapify(heap)
    found: dict[tuple[int, ...], float] = {}
    while len(found) < budget:
        cost, _, prefix, state = heapq.heappop(heap)
        found[prefix] = -cost
        for child in children(prefix, -cost, state):
            heapq.heappush(heap, child)
    return found
