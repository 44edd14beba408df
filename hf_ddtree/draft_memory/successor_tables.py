"""What the target says after short contexts: next-token distributions, learned from every verified node.

Each context, the last one, two or three tokens, has a slot with its most probable successors. A slot begins with what
the next shorter context says, and each observation `p` of the target's distribution moves it,

    P <- P + (p - P) / (N + a)    after    N <- d N + 1,

so `a` is what the shorter context weighs in observations, and older observations count less. Where the last token was
never seen, there is what followed the token before it (a skip), and what the target said lately.

Learning from rejected tokens is due to Token Recycling (arXiv:2408.08696), there for contexts of one token and without
probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Tokens of the longest context.
LONGEST_CONTEXT = 3
# Successors that a slot keeps.
WIDTH = 12
# What an observation still counts after one more of the same context.
DECAY = 0.9
# What a slot begins with, in observations: a shorter context, or nothing for a skip and for what was said lately.
PRIOR_WEIGHT, SKIP_PRIOR_WEIGHT = 0.7, 2.0
# Shares of a skip, and of what was said lately, where the last token was never seen.
SKIP_SHARE, LATELY_SHARE = 0.3, 0.1
# Observations below this are not worth an entry.
LEAST_OBSERVED = 0.002
# Bits of a token in the code of a context. A larger vocabulary folds, which costs accuracy alone.
TOKEN_BITS = 20
# Kinds of contexts, the two lowest bits of a code: the token before the last alone, or the last one, two or three.
SKIP, ONE, TWO, THREE = range(4)
# The slot of contexts that were never seen, and that of what was said lately in any context.
UNSEEN, LATELY = 0, 1
FIRST_CAPACITY = 1 << 12
# Observations that are merged at once; those of one context in them count alike.
MOST_AT_ONCE = 2048
BYTES_PER_SLOT = 8 * WIDTH + 8 + 160


class SuccessorTables:
    """Distributions of the next token after contexts of up to three tokens.

    Args:
        most_slots: Most contexts to keep, at `BYTES_PER_SLOT` each. Beyond, the half that was used longest ago goes.
        longest_context: Tokens of the longest context, at most 3.
    """

    def __init__(self, most_slots: int = 1 << 17, longest_context: int = LONGEST_CONTEXT) -> None:
        self.most_slots = most_slots
        self.longest_context = longest_context
        self._clock = 0
        self._slot_of: dict[int, int] = {}
        self._next_slot = LATELY + 1
        self._tokens = np.zeros((FIRST_CAPACITY, WIDTH), dtype=np.int32)
        self._probs = np.zeros((FIRST_CAPACITY, WIDTH), dtype=np.float32)
        self._counts = np.zeros(FIRST_CAPACITY, dtype=np.float32)
        self._used_at = np.zeros(FIRST_CAPACITY, dtype=np.int32)

    def __len__(self) -> int:
        """Number of contexts that are kept."""
        return len(self._slot_of)

    def successors(self, context: Sequence[int]) -> tuple[list[int], list[float]]:
        """The most probable next tokens after a context, and their probabilities, falling.

        Args:
            context: The last three tokens, the newest last; -1 where there is none.
        """
        third, second, last = (1 + token & _MASK for token in context)
        slot_of = self._slot_of
        pair = (second << TOKEN_BITS | last) << 2
        # Codes of contexts longer than the longest are never in the table.
        slot = (
            slot_of.get(third << (2 * TOKEN_BITS + 2) | pair | THREE)
            or slot_of.get(pair | TWO)
            or slot_of.get(last << 2 | ONE)
        )
        if slot:
            self._used_at[slot] = self._clock
            return self._tokens[slot].tolist(), self._probs[slot].tolist()
        skip = slot_of.get(second << 2 | SKIP, UNSEEN)
        found: dict[int, float] = {}
        for slot, share in ((skip, SKIP_SHARE), (LATELY, LATELY_SHARE)):
            for token, prob in zip(self._tokens[slot].tolist(), self._probs[slot].tolist()):
                found[token] = found.get(token, 0.0) + share * prob
        tokens = sorted(found, key=lambda token: -found[token])
        return tokens, [found[token] for token in tokens]

    def teach(self, contexts: np.ndarray, token_ids: np.ndarray, probs: np.ndarray) -> None:
        """Learns what the target said.

        Args:
            contexts: `(n, 3)` int64, the last three tokens, the newest last; -1 where there is none.
            token_ids: `(n, k)` integers, the most probable next tokens.
            probs: `(n, k)` float32, their probabilities.
        """
        for start in range(0, len(contexts), MOST_AT_ONCE):
            part = slice(start, start + MOST_AT_ONCE)
            self._teach(contexts[part], token_ids[part], probs[part])

    def _teach(self, contexts: np.ndarray, token_ids: np.ndarray, probs: np.ndarray) -> None:
        kinds = 1 + self.longest_context
        self._make_room(kinds * len(contexts))
        self._clock += 1
        said = probs[:, 0] >= LEAST_OBSERVED
        contexts, token_ids, probs = contexts[said], token_ids[said], probs[said]
        if not len(probs):
            return
        codes = _codes_of(contexts)[:, :kinds]
        tokens, begun = self._rows_of(codes)
        unique, first, inverse, repeats = np.unique(
            codes.ravel(), return_index=True, return_inverse=True, return_counts=True
        )
        slots = self._slots_for(unique)
        is_skip = unique & 3 == SKIP
        prior = np.where(is_skip, np.float32(SKIP_PRIOR_WEIGHT), np.float32(PRIOR_WEIGHT))
        kept, added = self._count(slots, repeats, prior)
        tokens, begun = tokens.reshape(-1, tokens.shape[-1])[first], begun.reshape(-1, begun.shape[-1])[first]
        item_weights = added[inverse].reshape(-1, kinds, 1) * probs[:, None, :]
        item_tokens = np.broadcast_to(token_ids[:, None, :], item_weights.shape)
        owners = np.broadcast_to(inverse.reshape(-1, kinds, 1), item_weights.shape)
        is_kept = begun > 0
        is_new = np.broadcast_to((probs >= LEAST_OBSERVED)[:, None, :], item_weights.shape)
        self._merge(
            slots,
            np.concatenate((np.broadcast_to(np.arange(len(slots))[:, None], begun.shape)[is_kept], owners[is_new])),
            np.concatenate((tokens[is_kept], item_tokens[is_new])),
            np.concatenate(((begun * kept[:, None])[is_kept], item_weights[is_new])),
        )
        self._teach_lately(token_ids, probs)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What `set_arrays` takes: codes, tokens, probabilities and counts of all contexts, the used ones last."""
        codes, slots = (np.array(list(part), dtype=np.int64) for part in (self._slot_of, self._slot_of.values()))
        order = self._used_at[slots].argsort(kind="stable")
        codes, slots = codes[order], slots[order]
        return {
            "codes": codes,
            "tokens": self._tokens[slots],
            "probs": self._probs[slots],
            "counts": self._counts[slots],
        }

    def set_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes what `to_arrays` gave, as much of it as there is room for.

        Raises:
            KeyError: If an array is missing.
            ValueError: If they are not of the right kind and size.
        """
        codes, tokens, probs, counts = (arrays[name] for name in ("codes", "tokens", "probs", "counts"))
        shapes = (len(codes),), (len(codes), WIDTH), (len(codes), WIDTH), (len(codes),)
        dtypes = np.int64, np.int32, np.float32, np.float32
        for array, shape, dtype in zip((codes, tokens, probs, counts), shapes, dtypes):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"an array is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")
        if not ((probs >= 0) & (probs <= 2)).all() or not ((counts >= 0) & (counts < 1e6)).all() or (tokens < 0).any():
            raise ValueError("probabilities, counts or tokens are out of range")
        first = max(0, len(codes) - self.most_slots // 2)
        codes = codes[first:]
        self._slot_of, self._next_slot = {}, LATELY + 1
        self._make_room(len(codes))
        slots = self._slots_for(codes)
        self._tokens[slots], self._probs[slots], self._counts[slots] = tokens[first:], probs[first:], counts[first:]

    def _teach_lately(self, token_ids: np.ndarray, probs: np.ndarray) -> None:
        slot = np.array([LATELY])
        kept, added = self._count(slot, np.array([len(probs)]), np.zeros(1, dtype=np.float32))
        tokens = np.concatenate((self._tokens[LATELY], token_ids.ravel()))
        weights = np.concatenate((self._probs[LATELY] * kept, (probs * added).ravel()))
        self._merge(slot, np.zeros(len(tokens), dtype=np.int64), tokens, weights)

    def _rows_of(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and probabilities `(n, kinds, 2 * WIDTH)` of each context's slot, or what a new one begins with."""
        slots = self._find(codes)
        tokens = np.zeros((*codes.shape, 2 * WIDTH), dtype=np.int32)
        probs = np.zeros((*codes.shape, 2 * WIDTH), dtype=np.float32)
        tokens[..., :WIDTH], probs[..., :WIDTH] = self._tokens[slots], self._probs[slots]
        unseen = slots == UNSEEN
        new = unseen[:, ONE]
        tokens[new, ONE, :WIDTH], tokens[new, ONE, WIDTH:] = tokens[new, SKIP, :WIDTH], self._tokens[LATELY]
        probs[new, ONE, :WIDTH] = SKIP_SHARE * probs[new, SKIP, :WIDTH]
        probs[new, ONE, WIDTH:] = LATELY_SHARE * self._probs[LATELY]
        for kind in range(TWO, codes.shape[1]):
            new = unseen[:, kind]
            tokens[new, kind], probs[new, kind] = tokens[new, kind - 1], probs[new, kind - 1]
        return tokens, probs

    def _count(self, slots: np.ndarray, repeats: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts `repeats` observations of each slot; what its old distribution and each of them weigh then."""
        fading = DECAY**repeats
        old = fading * self._counts[slots]
        counts = old + (1 - fading) / (1 - DECAY)
        self._counts[slots] = counts
        self._used_at[slots] = self._clock
        kept = ((old + prior) / (counts + prior)).astype(np.float32)
        return kept, (1 - kept) / repeats.astype(np.float32)

    def _merge(self, slots: np.ndarray, owners: np.ndarray, tokens: np.ndarray, weights: np.ndarray) -> None:
        """Sets each slot to the sums of its entries' weights by token, the largest `WIDTH` of them."""
        keys = owners << 32 | tokens
        order = keys.argsort()
        keys = keys[order]
        starts = np.concatenate(([True], keys[1:] != keys[:-1])).nonzero()[0]
        sums, keys = np.add.reduceat(weights[order], starts), keys[starts]
        owners = keys >> 32
        order = (2.0 * owners - sums).argsort()
        ranks = np.arange(len(order)) - owners.searchsorted(np.arange(len(slots)))[owners]
        kept = ranks < WIDTH
        order, rows, ranks = order[kept], slots[owners[kept]], ranks[kept]
        self._probs[slots] = 0
        self._tokens[rows, ranks] = keys[order] & 0xFFFFFFFF
        self._probs[rows, ranks] = sums[order]

    def _find(self, codes: np.ndarray) -> np.ndarray:
        """The slot of each code, `UNSEEN` where it has none."""
        get = self._slot_of.get
        return np.array([get(code, UNSEEN) for code in codes.ravel().tolist()], dtype=np.int64).reshape(codes.shape)

    def _slots_for(self, codes: np.ndarray) -> np.ndarray:
        """The slot of each of some distinct codes, a new one where it has none."""
        slots = self._find(codes)
        new = (slots == UNSEEN).nonzero()[0]
        slots[new] = np.arange(self._next_slot, self._next_slot + len(new))
        self._slot_of.update(zip(codes[new].tolist(), slots[new].tolist()))
        self._next_slot += len(new)
        self._counts[slots[new]] = 0
        return slots

    def _make_room(self, num_new: int) -> None:
        """Sees to it that so many new contexts can be added."""
        if self._next_slot + num_new > self.most_slots:
            self._drop_half()
        capacity = len(self._counts)
        if self._next_slot + num_new <= capacity:
            return
        more = max(capacity, num_new)
        self._tokens, self._probs, self._counts, self._used_at = (
            np.concatenate((part, np.zeros((more, *part.shape[1:]), dtype=part.dtype)))
            for part in (self._tokens, self._probs, self._counts, self._used_at)
        )

    def _drop_half(self) -> None:
        """Drops the half of the contexts that was used longest ago."""
        codes, slots = (np.array(list(part), dtype=np.int64) for part in (self._slot_of, self._slot_of.values()))
        newest = np.argsort(-self._used_at[slots], kind="stable")[: len(slots) // 2]
        self._keep(codes[newest], slots[newest])

    def _keep(self, codes: np.ndarray, slots: np.ndarray) -> None:
        first, end = LATELY + 1, LATELY + 1 + len(slots)
        for part in (self._tokens, self._probs, self._counts, self._used_at):
            part[first:end] = part[slots]
        self._slot_of = dict(zip(codes.tolist(), range(first, end)))
        self._next_slot = end


_MASK = (1 << TOKEN_BITS) - 1


def _codes_of(contexts: np.ndarray) -> np.ndarray:
    """`(n, 4)` int64, the code of each kind of context."""
    third, second, last = (contexts + 1 & _MASK).T
    pair = second << TOKEN_BITS | last
    codes = np.stack((second, last, pair, third << 2 * TOKEN_BITS | pair), axis=1)
    return codes << 2 | np.arange(4)
