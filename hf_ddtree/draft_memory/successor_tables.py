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
KIND_BITS = 2
# The slot of contexts that were never seen, and that of what was said lately in any context.
UNSEEN, LATELY = 0, 1
FIRST_CAPACITY = 1 << 12
# Observations that are looked at together; those of one context in them count alike.
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
        self._slot_of = _Slots()
        self._tokens = np.zeros((FIRST_CAPACITY, WIDTH), dtype=np.int32)
        self._tokens[: LATELY + 1] = -1
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
        slot = self.slot_of(context)
        if slot:
            return self._tokens[slot].tolist(), self._probs[slot].tolist()
        skip = self._slot_of.get((context[1] + 1 & _MASK) << KIND_BITS | SKIP, UNSEEN)
        found: dict[int, float] = {}
        for slot, share in ((skip, SKIP_SHARE), (LATELY, LATELY_SHARE)):
            for token, prob in zip(self._tokens[slot].tolist(), self._probs[slot].tolist()):
                found[token] = found.get(token, 0.0) + share * prob
        tokens = sorted(found, key=lambda token: -found[token])
        return tokens, [found[token] for token in tokens]

    def slot_of(self, context: Sequence[int]) -> int:
        """The slot of the longest context that is known, 0 if none is; it holds until the tables are taught again.

        Args:
            context: As of `successors`.
        """
        third, second, last = context
        third, second, last = third + 1 & _MASK, second + 1 & _MASK, last + 1 & _MASK
        slot_of = self._slot_of.get
        pair = (second << TOKEN_BITS | last) << KIND_BITS
        # Codes of contexts longer than the longest are never in the table.
        slot = (
            slot_of(third << 2 * TOKEN_BITS + KIND_BITS | pair | THREE)
            or slot_of(pair | TWO)
            or slot_of(last << KIND_BITS | ONE, UNSEEN)
        )
        if slot:
            self._used_at[slot] = self._clock
        return slot

    def entry(self, slot: int) -> tuple[list[int], list[float], float]:
        """The most probable next tokens of a slot, their probabilities, falling, and the number of observations, of
        which older ones count less."""
        return self._tokens[slot].tolist(), self._probs[slot].tolist(), float(self._counts[slot])

    def teach(self, contexts: np.ndarray, token_ids: np.ndarray, probs: np.ndarray) -> None:
        """Learns what the target said.

        Args:
            contexts: `(n, 3)` int64, the last three tokens, the newest last; -1 where there is none.
            token_ids: `(n, k)` integers, the most probable next tokens, distinct.
            probs: `(n, k)` float32, their probabilities, falling.
        """
        said = probs[:, 0] >= LEAST_OBSERVED
        if not said.all():
            contexts, token_ids, probs = contexts[said], token_ids[said], probs[said]
        for start in range(0, len(contexts), MOST_AT_ONCE):
            part = slice(start, start + MOST_AT_ONCE)
            self._teach(contexts[part], token_ids[part, :WIDTH].astype(np.int32), probs[part, :WIDTH])

    def _teach(self, contexts: np.ndarray, token_ids: np.ndarray, probs: np.ndarray) -> None:
        codes = _codes_of(contexts)[:, : 1 + self.longest_context]
        self._make_room(codes.size)
        self._clock += 1
        first_new = self._slot_of.next_slot
        order = codes.argsort(axis=None, kind="stable")
        in_order = codes.ravel()[order]
        is_start = np.concatenate(([True], in_order[1:] != in_order[:-1]))
        starts = is_start.nonzero()[0]
        slots = self._slots_of(in_order[starts])
        self._used_at[slots] = self._clock
        slot_at = np.empty(codes.size, dtype=np.int64)
        slot_at[order] = slots[is_start.cumsum() - 1]
        begun, shares = self._begun(slot_at.reshape(codes.shape), first_new)
        firsts = order[starts]
        at, kinds = np.divmod(order, codes.shape[1])
        repeats = np.diff(starts, append=len(order))
        observed = _means(at, starts, repeats, token_ids, probs)
        self._move(slots, begun[firsts], shares[firsts], _PRIORS[kinds[starts]], repeats, *observed)
        self._move_lately(token_ids, probs)

    def _begun(self, slots: np.ndarray, first_new: int) -> tuple[np.ndarray, np.ndarray]:
        """For each context, from the shortest on, the slot that it goes on from, and its share.

        A new one begins with the next shorter one, that of one token with a part of the skip, or of what was said
        lately.
        """
        begun, shares = slots.T.copy(), np.ones(slots.T.shape, dtype=np.float32)
        is_new = begun >= first_new
        begun[SKIP] = np.where(is_new[SKIP], UNSEEN, begun[SKIP])
        begun[ONE] = np.where(is_new[ONE], np.where(is_new[SKIP], LATELY, begun[SKIP]), begun[ONE])
        shares[ONE] = np.where(is_new[ONE], np.where(is_new[SKIP], LATELY_SHARE, SKIP_SHARE), 1.0)
        for kind in range(TWO, len(begun)):
            begun[kind] = np.where(is_new[kind], begun[kind - 1], begun[kind])
            shares[kind] = np.where(is_new[kind], shares[kind - 1], 1.0)
        return begun.T.ravel(), shares.T.ravel()

    def _move(
        self,
        slots: np.ndarray,
        begun: np.ndarray,
        shares: np.ndarray,
        priors: np.ndarray,
        repeats: np.ndarray,
        token_ids: np.ndarray,
        probs: np.ndarray,
    ) -> None:
        """Moves the distribution of each of some distinct slots towards the mean of its observations.

        Args:
            slots: `(m,)`.
            begun: `(m,)`, the slot of the distribution that it moves from.
            shares: `(m,)`, what that is multiplied with.
            priors: `(m,)`, what it weighs without observations.
            repeats: `(m,)`, how many observations it is the mean of.
            token_ids: `(m, WIDTH)` int32.
            probs: `(m, WIDTH)` float32.
        """
        fading = DECAY ** repeats.astype(np.float32)
        old_counts = fading * self._counts[slots]
        counts = old_counts + (1.0 - fading) / (1.0 - DECAY)
        self._counts[slots] = counts
        moved = 1.0 - (old_counts + priors) / (counts + priors)
        tokens = np.concatenate((self._tokens.take(begun, axis=0), token_ids), axis=1)
        begun_with = self._probs.take(begun, axis=0) * ((1.0 - moved) * shares)[:, None]
        weights = np.concatenate((begun_with, probs * moved[:, None]), axis=1)
        # Slots become the last axis, as NumPy is slow along short ones.
        tokens, weights = np.ascontiguousarray(tokens.T), np.ascontiguousarray(weights.T)
        old, new = weights[:WIDTH], weights[WIDTH:]
        same = tokens[:WIDTH, None] == tokens[None, WIDTH:]
        old += np.einsum("wkm,km->wm", same, new)
        new[same.any(axis=0)] = 0.0
        # Weights above tokens in one integer are sorted at once: the bits of positive floats rise with them.
        packed = ~weights.view(np.int32).astype(np.int64) << 32 | tokens
        packed[weights <= 0.0] = _NOTHING
        best = np.sort(packed.T, axis=1)[:, :WIDTH]
        self._tokens[slots] = best
        self._probs[slots] = (~(best >> 32)).astype(np.int32).view(np.float32)

    def _move_lately(self, token_ids: np.ndarray, probs: np.ndarray) -> None:
        """Moves what was said lately towards the mean of some observations."""
        kept = DECAY ** len(probs)
        tokens = np.concatenate((self._tokens[LATELY], token_ids.ravel()))
        weights = np.concatenate((self._probs[LATELY] * kept, probs.ravel() * ((1.0 - kept) / len(probs))))
        tokens, places = np.unique(tokens, return_inverse=True)
        sums = np.bincount(places, weights)
        best = sums.argsort()[: -WIDTH - 1 : -1]
        self._tokens[LATELY, : len(best)], self._probs[LATELY, : len(best)] = tokens[best], sums[best]

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

    @property
    def largest_token(self) -> int:
        """The largest token that is a successor; -1 if there is none."""
        return int(self._tokens.max(initial=-1))

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
        in_range = (probs >= 0) & (probs <= 2) & ((tokens >= 0) | (tokens == -1) & (probs == 0))
        if not in_range.all() or not ((counts >= 0) & (counts < 1e6)).all():
            raise ValueError("probabilities, counts or tokens are out of range")
        first = max(0, len(codes) - self.most_slots // 2)
        codes = codes[first:]
        self._slot_of.clear()
        self._make_room(len(codes))
        slots = self._slots_of(codes)
        self._tokens[slots], self._probs[slots], self._counts[slots] = tokens[first:], probs[first:], counts[first:]

    def _slots_of(self, codes: np.ndarray) -> np.ndarray:
        """The slot of each code, a new one where it has none."""
        return np.fromiter(map(self._slot_of.__getitem__, codes.tolist()), dtype=np.int64, count=len(codes))

    def _make_room(self, num_new: int) -> None:
        """Makes room for this many new contexts."""
        if self._slot_of.next_slot + num_new > self.most_slots:
            self._drop_half()
        capacity = len(self._counts)
        if self._slot_of.next_slot + num_new > capacity:
            more = max(capacity, num_new)
            self._tokens, self._probs, self._counts, self._used_at = (
                np.concatenate((part, np.zeros((more, *part.shape[1:]), dtype=part.dtype)))
                for part in (self._tokens, self._probs, self._counts, self._used_at)
            )

    def _drop_half(self) -> None:
        """Drops the half of the contexts that was used longest ago."""
        codes, slots = (np.array(list(part), dtype=np.int64) for part in (self._slot_of, self._slot_of.values()))
        newest = np.argsort(-self._used_at[slots], kind="stable")[: len(slots) // 2]
        codes, slots = codes[newest], slots[newest]
        end = LATELY + 1 + len(slots)
        for part in (self._tokens, self._probs, self._counts, self._used_at):
            part[LATELY + 1 : end] = part[slots]
        self._counts[end:] = 0
        self._slot_of = _Slots(zip(codes.tolist(), range(LATELY + 1, end)))


class _Slots(dict[int, int]):
    """The slot of each code; gives those that have none the next one."""

    @property
    def next_slot(self) -> int:
        return LATELY + 1 + len(self)

    def __missing__(self, code: int) -> int:
        slot = self[code] = self.next_slot
        return slot


_MASK = (1 << TOKEN_BITS) - 1
# By kind of context: what a slot weighs before it was observed.
_PRIORS = np.array([SKIP_PRIOR_WEIGHT, PRIOR_WEIGHT, PRIOR_WEIGHT, PRIOR_WEIGHT], dtype=np.float32)
# An entry of probability 0 and token -1.
_NOTHING = -1


def _codes_of(contexts: np.ndarray) -> np.ndarray:
    """`(n, 4)` int64, the code of each kind of context."""
    codes = np.empty((len(contexts), 4), dtype=np.int64)
    third, second, last = (contexts + 1 & _MASK).T
    codes[:, SKIP] = second
    codes[:, ONE] = last
    codes[:, TWO] = second << TOKEN_BITS | last
    codes[:, THREE] = third << 2 * TOKEN_BITS | codes[:, TWO]
    return codes << KIND_BITS | np.arange(4)


def _means(
    at: np.ndarray, starts: np.ndarray, repeats: np.ndarray, token_ids: np.ndarray, probs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each group of observations, its `WIDTH` most probable tokens.

    Args:
        at: `(items,)`, which observation; groups are consecutive.
        starts: `(m,)`, where each group begins.
        repeats: `(m,)`, how many it has.
        token_ids: `(n, k)` int32.
        probs: `(n, k)` float32.

    Returns:
        Tokens `(m, WIDTH)` int32 and probabilities `(m, WIDTH)` float32, 0 where there are fewer.
    """
    tokens = np.zeros((len(starts), WIDTH), dtype=np.int32)
    means = np.zeros((len(starts), WIDTH), dtype=np.float32)
    first = at[starts]
    tokens[:, : token_ids.shape[1]], means[:, : probs.shape[1]] = token_ids[first], probs[first]
    groups = (repeats > 1).nonzero()[0]
    if not len(groups):
        return tokens, means
    owners = np.repeat(np.arange(len(groups)), repeats[groups])
    items = at[np.repeat(repeats > 1, repeats)]
    weights = probs[items] / repeats[groups][owners, None]
    keys = (owners[:, None] << 32 | token_ids[items]).ravel()
    order = keys.argsort()
    keys = keys[order]
    new = np.concatenate(([True], keys[1:] != keys[:-1])).nonzero()[0]
    sums, keys = np.add.reduceat(weights.ravel()[order], new), keys[new]
    owners = keys >> 32
    # Each group's tokens by falling probability.
    order = (2.0 * owners - sums).argsort()
    ranks = np.arange(len(order)) - owners.searchsorted(np.arange(len(groups)))[owners]
    kept = ranks < WIDTH
    order, rows, ranks = order[kept], groups[owners[kept]], ranks[kept]
    means[groups] = 0.0
    tokens[rows, ranks], means[rows, ranks] = keys[order] & 0xFFFFFFFF, sums[order]
    return tokens, means
