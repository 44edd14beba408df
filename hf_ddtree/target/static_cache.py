"""Static caches with memory for a tree, and trees padded to few sizes, so that few graphs are compiled."""

from __future__ import annotations

import sys

from transformers import StaticCache
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

# Drafted nodes of the smallest padded tree. Larger ones have twice as many, four times as many, and so on.
LEAST_DRAFTED = 4
# A layer with a window would drop keys to take a tree, and a rejected node does not give them back. So it keeps all.
WITH_ROOM = {
    StaticLayer: StaticLayer,
    StaticSlidingWindowLayer: StaticLayer,
    LinearAttentionAndStaticFullAttentionLayer: LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer: LinearAttentionAndStaticFullAttentionLayer,
}


def padded_size(num_nodes: int) -> int:
    """The number of nodes that a tree is padded to, its root included: 1, 5, 9, 17, 33 and so on."""
    return 1 if num_nodes == 1 else 1 + max(LEAST_DRAFTED, 1 << (num_nodes - 2).bit_length())


def make_room_for_trees(cache: StaticCache, num_tokens: int, most_drafted: int) -> None:
    """Makes an empty static cache hold the tokens of a call, and a tree after them.

    Args:
        cache: What `generate()` has made. Its attention layers are replaced by longer ones without a window.
        num_tokens: Tokens that standard decoding needs room for.
        most_drafted: Drafted nodes of the largest tree.
    """
    length = num_tokens + padded_size(1 + most_drafted)
    for index, layer in enumerate(cache.layers):
        if type(layer) in WITH_ROOM:
            num_states = getattr(layer, "number_of_states", 1)
            cache.layers[index] = WITH_ROOM[type(layer)](max_cache_len=length, number_of_states=num_states)


def buffer_length(cache: Cache) -> int | None:
    """Tokens that each attention layer has room for; None if the cache is not static or has none of these layers."""
    return next((layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)), None)


def most_drafted(cache: Cache, num_cached: int) -> int:
    """Drafted nodes of the largest tree that fits, once padded, after `num_cached` tokens."""
    length = buffer_length(cache)
    if length is None:
        return sys.maxsize
    free = length - num_cached - 1
    return 0 if free < LEAST_DRAFTED else 1 << (free.bit_length() - 1)
