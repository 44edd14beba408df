"""The decoding loop: prefill, then rounds of propose, verify, accept and commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..attention import dispatch
from ..attention.tree_pass import TreePass
from ..budget.policy import BudgetPolicy, RoundCost, checked_nodes
from ..candidate_generators import DraftContext, TreeCandidateGenerator, checked_trees, join_features
from ..devices import on_device, searches
from ..interop.generation import is_callers_cache, kwargs_after_prefill, prefill, prompt_length
from ..interop.versions import CACHE_KEY, cache_of
from ..output import DDTreeStats
from ..target.cache_rows import CommittedRows
from ..target.commit import commit
from ..target.compiled import compiled_forward, num_graphs
from ..target.features import FeatureRecorder
from ..target.forward import attention_windows, step, verify
from ..target.past_recording import recording_past
from ..target.preallocation import growing
from ..target.requirements import check_cache
from ..target.static_cache import most_drafted
from ..target.weights import execution_device
from ..tree.draft_tree import DraftTree
from .acceptance import Chooser, accept, follow
from .acceptance_on_device import LookAhead
from .distributed import Processes
from .sequences import RowGroup, gather_rows, last_tokens

PADDING_AT_ONCE = 64


def decode(
    model: PreTrainedModel,
    groups: Sequence[RowGroup],
    chooser: Chooser,
    generator: TreeCandidateGenerator,
    policy: BudgetPolicy,
    stats: DDTreeStats,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    processes: Processes,
) -> None:
    """Extends the sequences of all rows until they must stop; leaves the cache as plain decoding leaves it.

    Args:
        model: The target.
        groups: All rows of the batch.
        chooser: Makes the target's choices.
        generator: Who proposes trees.
        policy: How many nodes each round is worth.
        stats: Where to count what is done.
        generation_config, model_kwargs: As `generate()` prepared them; the latter are updated in place.
    """
    dispatch.install(model)
    vocab_size = model.get_input_embeddings().num_embeddings
    recorder = FeatureRecorder(model, generator.feature_layers)
    try:
        prompt = gather_rows(groups)
        num_cached = int(cache_of(model_kwargs).get_seq_length())
        is_whole = prompt_length(generation_config, model_kwargs) == prompt.shape[1]
        generator.start(prompt[:, : num_cached if is_whole else 0], num_cached)
        prompt_mask = _mask_of(prompt, model_kwargs.get("attention_mask"))
        with recorder.recording():
            outputs = prefill(model, prompt, generation_config, model_kwargs)
        stats.target_forwards += 1
        features, num_features = _without_padding(recorder.take(), model_kwargs.get("attention_mask"), len(prompt))
        model_kwargs.update(kwargs_after_prefill(outputs, model_kwargs, model))
        cache = cache_of(model_kwargs)
        check_cache(cache)
        rows = CommittedRows(int(cache.get_seq_length()), model_kwargs, len(prompt), execution_device(model))
        roots = [DraftTree.root_only(0) for _ in prompt]
        logits = outputs.logits[:, -1:]
        walk(groups, roots, logits, chooser, [[0] for _ in prompt], look_ahead(groups, roots, logits, chooser))
        groups[0].sequences.keep_prefill(outputs)
        del outputs

        forward = compiled_forward(model, generation_config, model_kwargs)
        windows = attention_windows(model, cache)
        news = [(features, num_features)]
        emitted: list[list[int]] = [[] for _ in prompt]
        with growing(cache), recording_past(cache):
            while processes.any(not all(group.sequences.finished for group in groups)):
                start = time.perf_counter()
                going_on = _rows_going_on(groups)
                asked = policy.nodes_to_draft(rows.num_cached, len(prompt))
                most_nodes = processes.most(checked_nodes(policy, "nodes_to_draft", asked))
                if most_nodes:
                    context = _context(groups, prompt_mask, rows, news, emitted)
                    news.clear()
                    emitted = [[] for _ in prompt]
                    with stats.stage("draft"):
                        trees = generator.propose(context, most_nodes)
                    trees = checked_trees(trees, context.roots, vocab_size)
                    trees = _within_length(trees, groups)
                    unfinished = [trees[row] for row in sorted(going_on)] or trees
                    size = checked_nodes(
                        policy, "nodes_to_verify", policy.nodes_to_verify(unfinished, rows.num_cached)
                    )
                    trees = _best_nodes(trees, min(size, most_drafted(cache, rows.num_cached)))
                    trees = _with_padding_rows(processes.agree_on_trees(trees), groups)
                else:
                    trees = [DraftTree.root_only(root) for root in last_tokens(groups)]
                drafted = time.perf_counter()
                graphs = num_graphs()
                num_cached, num_drafted = rows.num_cached, max(tree.num_drafted for tree in trees)
                with stats.stage("verify"):
                    if num_drafted == 0 and rows.are_level and not any(group.sequences.finished for group in groups):
                        verification = step(model, trees, rows, model_kwargs, recorder, forward)
                    else:
                        verification = verify(model, trees, rows, model_kwargs, recorder, forward)
                    ahead = look_ahead(groups, trees, verification.outputs.logits, chooser, verification.tree_pass)
                    has_nan = verification.has_nan if ahead is None else ahead.has_nan
                    if processes.any(has_nan and num_drafted > 0):
                        # A drafted token that gives NaN spoils the other branches, which plain decoding never sees.
                        commit(cache, verification, [[] for _ in trees], rows)
                        trees = [DraftTree.root_only(int(tree.token_ids[0])) for tree in trees]
                        verification = verify(model, trees, rows, model_kwargs, recorder, forward)
                        if ahead is not None:
                            ahead.settle(0)
                            ahead = look_ahead(groups, trees, verification.outputs.logits, chooser)
                paths = [[0] for _ in trees]
                try:
                    with stats.stage("accept"):
                        walk(groups, trees, verification.outputs.logits, chooser, paths, ahead)
                finally:
                    with stats.stage("commit"):
                        commit(cache, verification, paths, rows)
                groups[0].sequences.keep_round(verification.outputs, paths, windows)
                news.append(_features_of(verification.features, paths))
                for row, tokens in enumerate(_emitted_along(groups, paths)):
                    emitted[row] = emitted[row] + tokens if row in going_on else []
                stats.count(trees, paths)
                if num_graphs() == graphs:  # else the round took as long as the compiler
                    policy.observe(
                        RoundCost(
                            num_cached=num_cached,
                            num_rows=len(prompt),
                            num_drafted=num_drafted,
                            accepted=[max(0, len(path) - 1) for path in paths],
                            draft_seconds=drafted - start if most_nodes else None,
                            verify_seconds=time.perf_counter() - drafted,
                        )
                    )
            generator.finish(_context(groups, prompt_mask, rows, news, emitted))
            if _is_returned(cache, generation_config):
                stats.target_forwards += _pad_to_longest(model, groups, rows, model_kwargs, processes)
    finally:
        recorder.close()
    stats.draft_forwards = generator.num_forwards
    stats.stage_seconds["build"] = generator.build_seconds
    stats.stage_seconds["draft"] -= generator.build_seconds


def walk(
    groups: Sequence[RowGroup],
    trees: Sequence[DraftTree],
    logits: Tensor,
    chooser: Chooser,
    paths: Sequence[list[int]],
    ahead: LookAhead | None,
) -> None:
    """Accepts a path in every row that goes on and emits its tokens; `paths` of the others become empty.

    Args:
        groups: All rows of the batch.
        trees: One a row.
        logits: `(batch, n, vocab)`.
        chooser: Makes the target's choices.
        paths: For each row the root alone; extended in place.
        ahead: The target's choices, if they are made already.
    """
    going_on = [group for group in groups if not group.sequences.finished]
    for path in (paths[row] for group in groups if group not in going_on for row in group.rows):
        path.clear()
    try:
        for group in going_on:
            paths_of_group = [paths[row] for row in group.rows]
            if ahead is not None:
                follow(*ahead.of_rows(group.rows), group.sequences, paths_of_group)
                continue
            # Rows that walk together are those of the whole batch, or one.
            of_group = logits if len(groups) == 1 else logits[group.rows[0] : group.rows[0] + 1]
            accept([trees[row] for row in group.rows], of_group, chooser, group.sequences, paths_of_group)
    finally:
        if ahead is not None:
            ahead.settle(max(map(len, paths)))


def look_ahead(
    groups: Sequence[RowGroup],
    trees: Sequence[DraftTree],
    logits: Tensor,
    chooser: Chooser,
    tree_pass: TreePass | None = None,
) -> LookAhead | None:
    """The target's choices at all nodes if the logits are on an accelerator and no choice depends on others."""
    if not searches(logits.device) or not chooser.looks_ahead:
        return None
    padding = {
        row: group.sequences.pad_token
        for group in groups
        for row, pads in zip(group.rows, group.sequences.padding)
        if pads
    }
    if tree_pass is None or logits.shape[1] == 1:
        return LookAhead(chooser, logits, None, 0, padding)
    return LookAhead(chooser, logits, tree_pass.trees, max(int(tree.depths.max()) for tree in trees), padding)


def _rows_going_on(groups: Sequence[RowGroup]) -> set[int]:
    return {row for group in groups for row, goes_on in zip(group.rows, group.sequences.unfinished) if goes_on}


def _emitted_along(groups: Sequence[RowGroup], paths: Sequence[list[int]]) -> list[list[int]]:
    """For each row the tokens that its path's nodes emitted."""
    emitted: list[list[int]] = [[] for _ in paths]
    for group in groups:
        for place, row in enumerate(group.rows):
            first = len(group.sequences.emitted) - len(paths[row])
            emitted[row] = [tokens[place] for tokens in group.sequences.emitted[first:]]
    return emitted


def _best_nodes(trees: Sequence[DraftTree], size: int) -> list[DraftTree]:
    """The trees of each one's `size` most probable drafted nodes."""
    if not any(tree.num_drafted for tree in trees):
        return list(trees)
    if size == 0:
        return [DraftTree.root_only(int(tree.token_ids[0])) for tree in trees]
    return [tree.truncate(size) for tree in trees]


def _within_length(trees: list[DraftTree], groups: Sequence[RowGroup]) -> list[DraftTree]:
    """Cuts off nodes too deep to be emitted under the length limit, whose positions plain decoding never reaches."""
    trees = list(trees)
    for group in groups:
        room = group.sequences.room
        if room is not None and not group.sequences.finished:
            for row in group.rows:
                trees[row] = trees[row].limit_depth(room - 1)
    return trees


def _with_padding_rows(trees: list[DraftTree], groups: Sequence[RowGroup]) -> list[DraftTree]:
    """Replaces the trees of rows that have finished: by padding as deep as the others, or by nothing."""
    trees = list(trees)
    for group in groups:
        if group.sequences.finished:
            for row in group.rows:
                trees[row] = DraftTree.root_only(group.sequences.emitted[-1][0])
        elif any(padding := group.sequences.padding):
            depth = max(int(trees[row].depths.max()) for row, pads in zip(group.rows, padding) if not pads)
            for row, pads in zip(group.rows, padding):
                if pads:
                    root = int(trees[row].token_ids[0])
                    trees[row] = DraftTree.chain([root] + [group.sequences.pad_token] * depth)
    return trees


def _pad_to_longest(
    model: PreTrainedModel,
    groups: Sequence[RowGroup],
    rows: CommittedRows,
    model_kwargs: dict[str, Any],
    processes: Processes,
) -> int:
    """Feeds padding to the rows that finished early, as plain decoding does, so that the cache's rows are level.

    Returns:
        The number of forwards.
    """
    recorder = FeatureRecorder(model, ())
    newest = dict(enumerate(last_tokens(groups)))
    pad_token = groups[0].sequences.pad_token
    forwards = 0
    while processes.any(not rows.are_level):
        longest = rows.num_cached
        at_once = min(PADDING_AT_ONCE, 1 + most_drafted(cache_of(model_kwargs), longest))
        missing = [min(longest - length, at_once) for length in rows.lengths]
        trees = [DraftTree.chain([newest[row]] + [pad_token] * (count - 1)) for row, count in enumerate(missing)]
        verification = verify(model, trees, rows, model_kwargs, recorder)
        commit(model_kwargs[CACHE_KEY], verification, [list(range(count)) for count in missing], rows)
        newest = {row: pad_token if count else newest[row] for row, count in enumerate(missing)}
        forwards += 1
    return forwards


def _is_returned(cache: DynamicCache, generation_config: GenerationConfig) -> bool:
    return generation_config.return_dict_in_generate or is_callers_cache(cache)


def _context(
    groups: Sequence[RowGroup],
    prompt_mask: Tensor | None,
    rows: CommittedRows,
    news: Sequence[tuple[Tensor | None, list[int]]],
    emitted: Sequence[Sequence[int]],
) -> DraftContext:
    """What the generator may know now: all tokens, and the features of those committed since it was last asked."""
    token_ids, lengths = gather_rows(groups), tuple(rows.lengths)
    mask = _token_mask(prompt_mask, token_ids, lengths)
    return DraftContext(token_ids.clone(), lengths, *join_features(news), mask, emitted, last_tokens(groups))


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
        behind = max(lengths) - length
        row[:behind] = False
        row[behind : behind + len(of_prompt)] = of_prompt
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
