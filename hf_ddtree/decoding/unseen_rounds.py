"""What the candidate generator is told: all tokens, and the features of those committed since it was last asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..candidate_generators.context import DraftContext, join_features
from ..devices import on_device
from ..target.committed_cache import CommittedCache
from .batch import Batch


class UnseenRounds:
    """The rounds since the generator was last asked for trees; at first the prefill alone.

    Args:
        prompt: `(batch, length)` int64.
        attention_mask: `(batch, at least length)`, 0 where the prompts hold padding; None if they hold none.
        features: `(batch, tokens, size)`, what the features of the prompt were reduced to; None if none are recorded.
        reduce_features: The candidate generator's.
        do_sample: Whether the target's tokens are sampled.
    """

    def __init__(
        self,
        prompt: Tensor,
        attention_mask: Tensor | None,
        features: Tensor | None,
        reduce_features: Callable[[Tensor], Tensor],
        do_sample: bool,
    ) -> None:
        self._do_sample = do_sample
        self._prompt_mask = _mask_of(prompt, attention_mask)
        self._of_prompt = [_without_padding(features, attention_mask, len(prompt))]
        self._features: list[tuple[Tensor | None, list[int]]] = []
        self._reduce = reduce_features
        self._emitted: list[list[int]] = [[] for _ in prompt]

    def add(self, features: Tensor | None, paths: Sequence[list[int]], emitted: Sequence[list[int] | None]) -> None:
        """Adds a round.

        Args:
            features: `(batch, n, features)` of all nodes.
            paths: The accepted path of each row.
            emitted: For each row the tokens that it emitted; None for a row that had finished before.
        """
        self._features.append(_features_of(features, paths))
        self._emitted = [[] if new is None else old + new for old, new in zip(self._emitted, emitted)]

    def take(self, batch: Batch, committed: CommittedCache) -> DraftContext:
        """The context for the generator's next proposal; the rounds in it are then forgotten.

        Args:
            batch: All rows.
            committed: What the target's cache holds of them.
        """
        lengths = committed.rows.lengths
        token_ids = batch.token_ids()
        mask = _token_mask(self._prompt_mask, token_ids, lengths)
        of_rounds, counts = join_features(self._features)
        of_rounds = None if of_rounds is None else self._reduce(of_rounds)
        features, num_features = join_features([*self._of_prompt, *([(of_rounds, counts)] if counts else [])])
        emitted = self._emitted
        self._of_prompt, self._features, self._emitted = [], [], [[] for _ in lengths]
        return DraftContext(
            input_ids=token_ids.clone(),
            root_positions=tuple(lengths),
            features=features,
            num_features=num_features,
            attention_mask=mask,
            emitted=emitted,
            last_tokens=batch.last_tokens(),
            target_cache=committed,
            tokens_left=batch.tokens_left,
            do_sample=self._do_sample,
        )


def _mask_of(prompt: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """`(batch, length)` bool, which of the prompt's tokens are no padding; None if none are."""
    if attention_mask is None or prompt.shape[1] == 0:
        return None
    mask = attention_mask[:, attention_mask.shape[1] - prompt.shape[1] :].bool()
    return None if bool(mask.all()) else mask


def _token_mask(prompt_mask: Tensor | None, token_ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """The same of all tokens so far; rows of which less is committed are padded at the left."""
    if prompt_mask is None:
        return None
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    for row, of_prompt, length in zip(mask, prompt_mask, lengths):
        missing = max(lengths) - length
        row[:missing] = False
        row[missing : missing + len(of_prompt)] = of_prompt
    return mask


def _features_of(features: Tensor | None, paths: Sequence[list[int]]) -> tuple[Tensor | None, list[int]]:
    """The features of the paths' nodes, `(batch, longest, features)` aligned at the left, and each row's number."""
    counts = list(map(len, paths))
    if features is None:
        return None, counts
    if len(paths) == 1:
        if paths[0] == list(range(counts[0])):
            return features[:, : counts[0]], counts
        return features.index_select(1, on_device(paths[0], features.device)), counts
    longest = max(counts)
    index = on_device([path + [0] * (longest - len(path)) for path in paths], features.device)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1])), counts


def _without_padding(
    features: Tensor | None, attention_mask: Tensor | None, batch_size: int
) -> tuple[Tensor | None, list[int]]:
    """The features of the prompt's tokens, `(batch, longest, features)` aligned at the left, and each row's number."""
    if features is None:
        return None, [0] * batch_size
    length = features.shape[1]
    if attention_mask is None:
        return features, [length] * batch_size
    is_token = attention_mask[:, -length:].bool()
    counts = is_token.sum(dim=1).tolist()
    if min(counts) == length:
        return features, counts
    # A stable sort brings each row's tokens to the front without changing their order.
    index = is_token.int().argsort(dim=1, descending=True, stable=True)[:, : max(counts)].to(features.device)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1])), counts
