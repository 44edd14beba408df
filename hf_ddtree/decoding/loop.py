"""The decoding loop: prefill, then rounds of propose, verify, accept, commit and stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..attention import dispatch
from ..budget.policy import BudgetPolicy, RoundCost, checked_nodes
from ..candidate_generators.base import TreeCandidateGenerator
from ..candidate_generators.context import VerifiedRound
from ..candidate_generators.tree_checks import checked_trees
from ..devices import builds_on_device
from ..interop.generation import is_callers_cache, kwargs_after_prefill, prefill, prompt_length
from ..interop.versions import cache_of
from ..output import DDTreeStats
from ..recording.call import CallRecording
from ..target.cache_rows import CommittedRows
from ..target.commit_in_graph import GreedyRows
from ..target.compiled import compiled_forward, num_graphs
from ..target.features import FeatureRecorder
from ..target.inputs import attention_windows
from ..target.model import CachedModel, Verification
from ..target.past_recording import keeps_past
from ..target.preallocation import growing
from ..target.requirements import check_cache
from ..target.rollback import refuse_further_use, undone_on_error
from ..target.static_cache import most_drafted
from ..target.weights import execution_device, num_embeddings
from ..tree.draft_tree import DraftTree
from .acceptance import accept_in_lockstep
from .acceptance_on_device import ChoicesOnDevice
from .batch import Batch
from .choosing import Chooser
from .distributed import Processes
from .unseen_rounds import UnseenRounds

PADDING_AT_ONCE = 64


@dataclass
class Round:
    """One round under way.

    Attributes:
        trees: One per row.
        num_cached: Tokens in the cache before it, of the longest row.
        num_drafted: Drafted nodes of the largest tree to verify.
        num_graphs: Graphs that were compiled before it.
        draft_seconds: Time to propose the trees and to choose their size, None if nothing was asked for.
        proposed_at: When the trees were there, by `time.perf_counter`.
        unfinished: Rows that are not finished before it.
        verification: The target's forward over the trees.
        device_choices: The target's choices, if they are made already.
        paths: The accepted nodes of each row, from the root on; empty for a row that is finished before the round.
        error: What a processor, a criterion, a streamer or Ctrl-C raised while accepting.
    """

    trees: list[DraftTree]
    num_cached: int
    num_drafted: int
    num_graphs: int
    draft_seconds: float | None
    proposed_at: float
    unfinished: set[int]
    verification: Verification = field(init=False)
    device_choices: ChoicesOnDevice | None = None
    paths: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None


class TreeDecoder:
    """Extends the sequences of all rows until they must stop, and leaves the cache as standard decoding leaves it.

    Args:
        model: The target.
        batch: All rows.
        chooser: Makes the target's choices.
        generator: Proposes trees.
        policy: Decides how many nodes each round is worth.
        stats: Where to count what is done.
        processes: Those that run the target together with this one.
        recording: Keeps what is decoded; None if nothing does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        chooser: Chooser,
        generator: TreeCandidateGenerator,
        policy: BudgetPolicy,
        stats: DDTreeStats,
        processes: Processes,
        recording: CallRecording | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._chooser = chooser
        self._generator = generator
        self._policy = policy
        self._stats = stats
        self._processes = processes
        self._recording = recording
        self._vocab_size = num_embeddings(model)
        self._target: CachedModel
        self._unseen: UnseenRounds

    def decode(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        """Decodes all rows.

        Args:
            generation_config, model_kwargs: As `generate()` prepared them; the latter are updated in place.
        """
        cache = cache_of(model_kwargs)
        self._is_callers_cache = is_callers_cache(cache)
        self._is_returned = generation_config.return_dict_in_generate or self._is_callers_cache
        dispatch.install(self._model)
        recorder = FeatureRecorder(self._model, self._generator.feature_layers)
        try:
            with self._undone_on_error(cache):
                outputs = self._prefill(generation_config, model_kwargs, recorder)
            self._emit_first(outputs)
            del outputs
            with self._marked_on_error(), growing(cache), self._target.recording_past():
                while not self._stop():
                    self.run_round()
                self._finish()
        finally:
            recorder.close()

    def run_round(self) -> None:
        """One round. Any exception while accepting is raised after the commit of what was accepted before it."""
        current = self._propose()
        with self._undone_on_error(self._target.cache, self._target.rows):
            self._verify(current)
            self._accept(current)
            self._commit(current)
            if current.error is None:
                self._report(current)
        if current.error is not None:
            raise current.error

    def _prefill(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], recorder: FeatureRecorder
    ) -> ModelOutput:
        """Feeds the prompt."""
        model, batch = self._model, self._batch
        prompt, attention_mask = batch.token_ids(), model_kwargs.get("attention_mask")
        num_cached = int(cache_of(model_kwargs).get_seq_length())
        is_whole = prompt_length(generation_config, model_kwargs) == prompt.shape[1]
        self._generator.start(prompt[:, : num_cached if is_whole else 0], num_cached)
        reduce = self._generator.reduce_features
        with recorder.recording_prompt(reduce if self._recording is None else self._recording.keeping(reduce)):
            through_all_layers = bool(recorder.layer_ids) and self._generator.reads_whole_prompt
            outputs = prefill(model, prompt, generation_config, model_kwargs, through_all_layers)
        self._stats.target_forwards += 1
        self._unseen = UnseenRounds(prompt, attention_mask, recorder.take_prompt(), reduce, self._chooser.do_sample)
        model_kwargs.update(kwargs_after_prefill(outputs, model_kwargs, model))
        cache = cache_of(model_kwargs)
        check_cache(cache)
        rows = CommittedRows(int(cache.get_seq_length()), model_kwargs, len(prompt), execution_device(model))
        forward = compiled_forward(model, generation_config, model_kwargs)
        self._target = CachedModel(model, model_kwargs, rows, recorder, forward, keeps_past(cache))
        self._windows = attention_windows(model, cache)
        return outputs

    def _emit_first(self, outputs: ModelOutput) -> None:
        """Emits one token per row from the prefill's outputs."""
        prompt, logits = self._batch.token_ids(), outputs.logits[:, -1:]
        last = prompt[:, -1].tolist() if prompt.shape[1] else [0] * len(prompt)
        trees, paths = [DraftTree.root_only(token) for token in last], [[0] for _ in last]
        self._emit_along_paths(trees, logits, self._choose_on_device(trees, logits), paths)
        self._batch.first.keep_prefill(outputs)
        self._generator.observe(VerifiedRound(trees, logits, paths))

    def _propose(self) -> Round:
        """Asks the policy and the generator for trees, and cuts them to the nodes that are worth verifying."""
        start = time.perf_counter()
        rows, unfinished = self._target.rows, self._batch.unfinished_rows
        num_cached = rows.num_cached
        is_disabled = self._policy.drafting_disabled
        asked = self._policy.nodes_to_draft(num_cached, self._batch.num_rows)
        most_nodes = self._processes.most(checked_nodes(self._policy, "nodes_to_draft", asked))
        if is_disabled and not most_nodes:
            self._stats.count_disabled()
        if most_nodes:
            context = self._unseen.take(self._batch, self._target.committed)
            with self._stats.stage("draft"):
                proposed = self._generator.propose(context, most_nodes)
            if self._generator.needs_checks:
                proposed = checked_trees(proposed, context.roots, self._vocab_size)
            trees = self._cut(proposed, unfinished, most_nodes)
        else:
            trees = [DraftTree.root_only(root) for root in self._batch.last_tokens()]
        now = time.perf_counter()
        return Round(
            trees=trees,
            num_cached=num_cached,
            num_drafted=max(tree.num_drafted for tree in trees),
            num_graphs=num_graphs(),
            draft_seconds=now - start if most_nodes else None,
            proposed_at=now,
            unfinished=unfinished,
        )

    def _cut(self, trees: list[DraftTree], unfinished: set[int], most_nodes: int) -> list[DraftTree]:
        """The nodes of proposed trees that are worth verifying, the same in all processes that run the target.

        No more than were asked for, whatever a generator proposes.
        """
        num_cached = self._target.rows.num_cached
        trees = self._batch.within_length(trees)
        asked = self._policy.nodes_to_verify([trees[row] for row in sorted(unfinished)] or trees, num_cached)
        size = checked_nodes(self._policy, "nodes_to_verify", asked)
        trees = _best_nodes(trees, min(size, most_nodes, most_drafted(self._target.cache, num_cached)))
        return self._batch.with_padding(self._processes.agree_on_trees(trees))

    def _verify(self, current: Round) -> None:
        """One forward of the target over the trees, and a second over the roots where a drafted token gives NaN.

        On an accelerator the accepted paths are found here as well, and `_accept` emits along them. With nothing
        drafted and all rows equally long the forward is one of standard decoding, which commits the roots.
        """
        target, is_drafted = self._target, current.num_drafted > 0
        with self._stats.stage("verify"):
            if is_drafted or not target.rows.are_equally_long or self._batch.has_finished_group:
                self._set_verification(current, target.verify(current.trees, self._greedy_rows()))
            else:
                self._set_verification(current, target.step(current.trees))
            if self._processes.any(is_drafted and (current.device_choices or current.verification).has_nan):
                # NaN in one branch spoils the others. Standard decoding never feeds that branch.
                if current.device_choices is not None:
                    current.device_choices.rewind_rng(0)
                target.discard(current.verification.tree_pass, len(current.trees))
                current.trees = [DraftTree.root_only(int(tree.token_ids[0])) for tree in current.trees]
                self._stats.target_forwards += 1
                self._set_verification(current, target.verify(current.trees))

    def _set_verification(self, current: Round, verification: Verification) -> None:
        current.verification = verification
        current.device_choices = self._choose_on_device(current.trees, verification.logits, verification)

    def _accept(self, current: Round) -> None:
        """Emits what the target chooses along a path per row."""
        current.paths = [[0] for _ in current.trees]
        with self._stats.stage("accept"):
            try:
                self._emit_along_paths(
                    current.trees, current.verification.logits, current.device_choices, current.paths
                )
            except BaseException as error:
                current.error = error

    def _commit(self, current: Round) -> None:
        """Commits the accepted paths to the cache."""
        with self._stats.stage("commit"):
            self._target.commit(current.verification.tree_pass, current.paths)

    def _report(self, current: Round) -> None:
        """Tells the output, the generator, the statistics and the policy about the round."""
        verification, paths = current.verification, current.paths
        self._batch.first.keep_round(verification.outputs, paths, self._windows)
        emitted = self._batch.emitted_along(paths)
        of_unfinished = [tokens if row in current.unfinished else None for row, tokens in enumerate(emitted)]
        self._unseen.add(verification.features, paths, of_unfinished)
        if self._recording is not None:
            self._recording.add(verification.features, paths, current.unfinished)
        self._generator.observe(VerifiedRound(current.trees, verification.logits, paths))
        self._stats.count(current.trees, paths, verification.logits)
        if num_graphs() == current.num_graphs:  # else the round took as long as the compiler
            self._policy.observe(
                RoundCost(
                    num_cached=current.num_cached,
                    num_rows=self._batch.num_rows,
                    num_drafted=current.num_drafted,
                    accepted=[max(0, len(path) - 1) for path in paths],
                    draft_seconds=current.draft_seconds,
                    verify_seconds=time.perf_counter() - current.proposed_at,
                )
            )

    def _stop(self) -> bool:
        """Whether all rows are finished, in all processes. Criteria were asked as each token was emitted."""
        return not self._processes.any(not self._batch.finished)

    def _finish(self) -> None:
        """Tells the generator what it has not seen, and makes the rows of a returned cache equally long."""
        self._generator.finish(self._unseen.take(self._batch, self._target.committed))
        if self._is_returned:
            self._pad_to_longest()
        self._stats.draft_forwards = self._generator.num_forwards
        self._stats.stage_seconds["build"] = self._generator.build_seconds
        self._stats.stage_seconds["draft"] -= self._generator.build_seconds

    def _emit_along_paths(
        self,
        trees: Sequence[DraftTree],
        logits: Tensor,
        device_choices: ChoicesOnDevice | None,
        paths: Sequence[list[int]],
    ) -> None:
        """Accepts a path of every unfinished group of rows and emits its tokens; `paths` of the others become empty.

        Args:
            trees: One per row.
            logits: `(batch, n, vocab)`.
            device_choices: The target's choices, if they are made already.
            paths: For each row the root alone; extended in place.
        """
        unfinished = [group for group in self._batch.groups if not group.finished]
        with_path = {row for group in unfinished for row in group.indices}
        for row, path in enumerate(paths):
            if row not in with_path:
                path.clear()
        try:
            for group in unfinished:
                rows = slice(group.indices[0], group.indices[-1] + 1)
                if device_choices is not None:
                    device_choices.emit(group, paths[rows])
                else:
                    accept_in_lockstep(trees[rows], logits[rows], self._chooser, group, paths[rows])
        finally:
            if device_choices is not None:
                device_choices.rewind_rng(max(map(len, paths)))

    def _choose_on_device(
        self, trees: Sequence[DraftTree], logits: Tensor, verification: Verification | None = None
    ) -> ChoicesOnDevice | None:
        """The target's choices at all nodes if the logits are on an accelerator and the choices can be made ahead."""
        tree_pass = None if verification is None else verification.tree_pass
        accepted = None if tree_pass is None else tree_pass.accepted
        if accepted is None and not (builds_on_device(logits.device) and self._chooser.chooses_ahead):
            return None
        tree_batch = tree_pass.tree_batch if tree_pass is not None and logits.shape[1] > 1 else None
        groups, pad_tokens = self._batch.groups, self._batch.pad_tokens
        return ChoicesOnDevice(self._chooser, logits, trees, tree_batch, groups, pad_tokens, accepted)

    def _greedy_rows(self) -> GreedyRows | None:
        """The rows, if what is accepted of each can be committed before it is emitted."""
        groups, end_tokens = self._batch.groups, self._batch.first.ends_by_tokens
        are_independent = all(len(group.indices) == 1 for group in groups)
        if end_tokens is None or not (are_independent and self._chooser.is_argmax and self._processes.is_one):
            return None
        # An error while emitting would leave the caller more than was emitted.
        return None if self._is_callers_cache else GreedyRows([not group.finished for group in groups], end_tokens)

    def _pad_to_longest(self) -> None:
        """Feeds padding to rows that finished early, as standard decoding does, until all rows are equally long."""
        target = self._target
        last, pad_token = self._batch.last_tokens(), self._batch.first.pad_token
        while self._processes.any(not target.rows.are_equally_long):
            longest = target.rows.num_cached
            at_once = min(PADDING_AT_ONCE, 1 + most_drafted(target.cache, longest))
            missing = [min(longest - length, at_once) for length in target.rows.lengths]
            trees = [DraftTree.chain([token] + [pad_token] * (count - 1)) for token, count in zip(last, missing)]
            target.commit(target.verify(trees).tree_pass, [list(range(count)) for count in missing])
            last = [pad_token if count else token for token, count in zip(last, missing)]
            self._stats.target_forwards += 1

    def _undone_on_error(self, cache: Cache, rows: CommittedRows | None = None) -> AbstractContextManager[None]:
        """Puts a cache that the caller has passed in back to what is committed if something ends a round early."""
        return undone_on_error(cache, rows) if self._is_callers_cache else nullcontext()

    @contextmanager
    def _marked_on_error(self) -> Iterator[None]:
        """If an exception leaves a caller's cache with rows of unequal length, makes any further use of it raise."""
        try:
            yield
        except BaseException:
            if self._is_callers_cache and not self._target.rows.are_equally_long:
                refuse_further_use(self._target.cache)
            raise


def _best_nodes(trees: Sequence[DraftTree], size: int) -> list[DraftTree]:
    """The trees of each one's `size` most probable drafted nodes."""
    if not any(tree.num_drafted for tree in trees):
        return list(trees)
    if size == 0:
        return [DraftTree.root_only(int(tree.token_ids[0])) for tree in trees]
    return [tree.truncate(size) for tree in trees]
