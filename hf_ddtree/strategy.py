"""Tree decoding as a decoding method of `generate()`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping
from transformers.utils import logging

from .arguments import GenerateArguments, check_mode
from .budget.auto import policy_for
from .budget.policy import BudgetPolicy, checked_nodes
from .candidate_generators import (
    CombinedTreeCandidateGenerator,
    DFlashTreeCandidateGenerator,
    PromptLookupTreeCandidateGenerator,
    TreeCandidateGenerator,
)
from .configuration import LOOKUP, DDTreeConfig
from .decoding.batch import Batch
from .decoding.choosing import PER_PATH_PROCESSORS, PER_TOKEN_PROCESSORS, Chooser
from .decoding.distributed import Processes
from .decoding.loop import TreeDecoder
from .decoding.sequences import RowGroup
from .draft_memory import DraftMemory
from .drafter_kinds import drafter_kind, make_candidate_generator
from .interop.generation import (
    is_callers_cache,
    is_synced,
    longest_static_cache,
    prompt_length,
    standard_decoding,
)
from .interop.versions import CACHE_KEY, cache_of
from .interop.wrappers import unwrapped
from .output import DDTreeOutput, DDTreeStats
from .recording import RecordingFolder
from .recording.call import CallRecording, start_recording
from .recording.folder import recording_folder
from .shared_drafters import shared_drafter
from .target.past_recording import keeps_past
from .target.requirements import check_cache, check_no_noise, check_processes, check_rotary_limit, check_target
from .target.static_cache import buffer_length, make_room_for_trees
from .validation import UnsupportedError, describe_type

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

logger = logging.get_logger(__name__)

# Processors and criteria that treat each row of a batch as if it were alone, whatever its length. Exact types: a
# subclass may do otherwise. A repetition penalty knows the padding of all rows.
ROW_WISE_PROCESSORS = (PER_TOKEN_PROCESSORS | PER_PATH_PROCESSORS | {logits_process.NoRepeatNGramLogitsProcessor}) - {
    logits_process.RepetitionPenaltyLogitsProcessor
}
ROW_WISE_CRITERIA = frozenset({stopping.EosTokenCriteria, stopping.MaxLengthCriteria})
OUTPUTS_OF_ALL_ROWS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class DDTreeDecoding:
    """A decoding method in the form that `generate(custom_generate=...)` takes. Made by `ddtree`.

    Attributes:
        falls_back: Whether calls that are not supported are decoded by the standard method, with one warning.

    The others are the arguments of `ddtree`, and its knobs in `config`.
    """

    config: DDTreeConfig
    assistant_model: PreTrainedModel | None = None
    candidate_generator: TreeCandidateGenerator | None = None
    draft_state: Any = None
    draft_memory: DraftMemory | None = None
    record_to: RecordingFolder | None = None
    streamer: BaseStreamer | None = None
    synced_gpus: bool | None = None
    falls_back: bool = False

    def with_arguments(self, **arguments: Any) -> DDTreeDecoding:
        """A copy with other arguments of `generate()`; those that are None stay as they are."""
        return replace(self, **{name: value for name, value in arguments.items() if value is not None})

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> DDTreeOutput | Tensor:
        """Decodes from the inputs that `generate()` prepared."""
        try:
            self._check_call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            generator, policy = self._drafting_for(model)
            _prepare_cache(model, input_ids, generation_config, model_kwargs, policy)
        except UnsupportedError as error:
            standard = standard_decoding(model, generation_config) if self.falls_back else None
            if standard is None:
                raise
            if self.streamer is not None and (generation_config.num_beams or 1) > 1:
                raise ValueError(
                    f"`streamer` is given, but `num_beams` is {generation_config.num_beams}: which beam is best is "
                    "known at the end, so there is nothing to stream. Set `num_beams=1`, or leave `streamer` out."
                ) from None
            warn_of_standard_decoding(error)
            call = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **model_kwargs}
            call |= {"generation_config": generation_config, "synced_gpus": is_synced(model, self.synced_gpus)}
            return standard(input_ids, **call, **({} if self.streamer is None else {"streamer": self.streamer}))
        past = keeps_past(cache_of(model_kwargs))
        batch = _make_batch(
            input_ids, logits_processor, stopping_criteria, generation_config, self.streamer, is_past_kept=past
        )
        processes = Processes(model, self.synced_gpus)
        chooser = Chooser(logits_processor, generation_config.do_sample, processes.agree)
        stats = DDTreeStats.keeping_trees() if self.config.return_trees else DDTreeStats()
        recording = self._start_recording(model, input_ids, generation_config, model_kwargs, generator, processes)
        decoder = TreeDecoder(model, batch, chooser, generator, policy, stats, processes, recording)
        decoder.decode(generation_config, model_kwargs)
        batch.end_stream()
        if recording is not None:
            recording.write(batch.sequences(), batch.num_emitted)
        logger.info(stats.summary())
        if not generation_config.return_dict_in_generate:
            return batch.sequences()
        cache = {CACHE_KEY: cache_of(model_kwargs)}
        return DDTreeOutput(**batch.details(), ddtree_stats=stats, draft_state=generator.state, **cache)

    def _check_call(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Refuses a target and a prepared call that cannot be exact."""
        if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
            raise ValueError(
                f"The prompt is empty: `input_ids` has the shape {tuple(input_ids.shape)}. Give at least one token, "
                "such as the one that texts begin with."
            )
        GenerateArguments.prepared(model, generation_config).check(bool(self.config.tree_lookup))
        check_mode(generation_config, logits_processor)
        check_processes(model, generation_config, self.synced_gpus)
        check_target(model)
        check_no_noise(model)
        check_rotary_limit(model, input_ids, stopping_criteria.max_length, model_kwargs["position_ids"])

    def _start_recording(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generator: TreeCandidateGenerator,
        processes: Processes,
    ) -> CallRecording | None:
        """What keeps the call's texts, if they are to be recorded and can be."""
        if self.record_to is None:
            return None
        if not processes.is_one:
            self.record_to.switch_off("the target is shared by several processes, and no one has its weights.")
        length = prompt_length(generation_config, model_kwargs)
        is_cold = cache_of(model_kwargs).get_seq_length() == 0
        is_whole = length == input_ids.shape[1] or (length is None and is_cold)
        return start_recording(self.record_to, model, input_ids, is_whole, model_kwargs, generator.feature_layers)

    def _drafting_for(self, model: PreTrainedModel) -> tuple[TreeCandidateGenerator, BudgetPolicy]:
        """What proposes trees for a target, and what decides on their size."""
        drafter = self.assistant_model if self.config.drafter is None else shared_drafter(self.config.drafter, model)
        generator = self._make_generator(model, drafter)
        return generator, policy_for(self.config.tree_budget, model, drafter, generator)

    def _make_generator(self, model: PreTrainedModel, drafter: PreTrainedModel | None) -> TreeCandidateGenerator:
        generator = self.candidate_generator
        if drafter is not None:
            generator = make_candidate_generator(drafter, model, self.config, self.draft_state)
        merges = bool(self.config.tree_lookup)
        takes_memory = isinstance(generator, DFlashTreeCandidateGenerator) and generator.wants_lookup
        if merges or (takes_memory and self.draft_memory is not None):
            config = self.config if merges else replace(self.config, tree_lookup="target")
            lookup = PromptLookupTreeCandidateGenerator(model, config, self.draft_memory)
            return lookup if generator is None else CombinedTreeCandidateGenerator(generator, lookup, config, merges)
        if self.draft_memory is not None:
            raise ValueError(
                "`draft_memory` is given, but nothing is drafted from it: this drafter knows by itself what follows "
                "what. Set `tree_lookup=True`, or leave it out."
            )
        assert generator is not None
        return generator


def ddtree(
    assistant_model: PreTrainedModel | None = None,
    *,
    candidate_generator: TreeCandidateGenerator | None = None,
    draft_state: Any = None,
    draft_memory: DraftMemory | None = None,
    record_to: str | os.PathLike[str] | RecordingFolder | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    **knobs: Any,
) -> DDTreeDecoding:
    """Tree decoding for `generate(custom_generate=hf_ddtree.ddtree(...))`, without patching Transformers.

    Args:
        assistant_model: The drafter.
        candidate_generator: Proposes the trees, instead of a drafter.
        draft_state: The `draft_state` of an earlier output, passed on together with its cache: the drafter's state.
            Without it, or if it belongs to other sequences than the cache, drafting starts cold.
        draft_memory: What `tree_lookup`, or a DFlash drafter without a selector, keeps from one call to the next.
            Hand it only to calls whose users may learn from the time of a call what others have written.
        record_to: A folder, or a `RecordingFolder`, to which prompts and outputs are written, to train a drafter on
            them. Texts with images or embeddings in the prompt, and after a cache whose tokens are not passed again,
            are left out.
        streamer: Gets the emitted tokens. Transformers does not pass its `streamer` argument on to custom decoding
            methods, so give it here as well.
        synced_gpus: Whether all processes must run their forwards together. Transformers does not pass this argument
            on either. By default true if FSDP shards the target.
        **knobs: Fields of `DDTreeConfig`, such as `tree_budget`.

    Raises:
        ValueError: If more than one of a drafter, its name and a generator is given, or none and no `tree_lookup`, or
            a knob has a value that is not allowed.
        TypeError: If the generator is not a `TreeCandidateGenerator`, `draft_state` is given where there is no drafter
            to use it, or a keyword argument is not a knob.
    """
    config = _config_of(knobs)
    proposers = {
        "assistant_model": assistant_model,
        "candidate_generator": candidate_generator,
        "drafter": config.drafter,
    }
    _check_proposers([name for name, value in proposers.items() if value is not None], config)
    if candidate_generator is not None:
        _check_type("candidate_generator", candidate_generator, TreeCandidateGenerator)
    if draft_memory is not None:
        _check_type("draft_memory", draft_memory, DraftMemory)
        if not config.tree_lookup and config.drafter is None and assistant_model is None:
            raise ValueError(
                "`draft_memory` is given, but nothing is drafted from it. Set `tree_lookup=True`, or leave it out."
            )
    if assistant_model is not None:
        assistant_model = unwrapped(assistant_model, "assistant_model")
        drafter_kind(assistant_model)
    elif draft_state is not None and config.drafter is None:
        _check_keeps_state(candidate_generator, draft_state)
    folder = None if record_to is None else recording_folder(record_to)
    return DDTreeDecoding(
        config, assistant_model, candidate_generator, draft_state, draft_memory, folder, streamer, synced_gpus
    )


def _config_of(knobs: dict[str, Any]) -> DDTreeConfig:
    config = DDTreeConfig.from_knobs("ddtree", **knobs)
    if config.drafter != LOOKUP:
        return config
    if knobs.get("tree_lookup") is False:
        raise ValueError('`drafter="lookup"` and `tree_lookup=False` contradict each other. Leave one of them out.')
    return replace(config, drafter=None, tree_lookup=config.tree_lookup or True)


def _check_proposers(given: list[str], config: DDTreeConfig) -> None:
    """Refuses none and more than one of the arguments that say who proposes trees."""
    if not given and not config.tree_lookup:
        raise UnsupportedError(
            "Tree decoding needs a drafter, but neither `assistant_model` nor `candidate_generator` nor `drafter` is "
            "given. Load one with `hf_ddtree.load_drafter(..., target_model=model)` and pass it as `assistant_model`, "
            "or set `tree_lookup=True` to draft from the prompt and the output."
        )
    if len(given) > 1:
        raise ValueError(
            f"{'Both' if len(given) == 2 else 'All of'} {' and '.join(f'`{name}`' for name in given)} are given, but "
            "only one can draft. Pass one."
        )


def _check_type(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(
            f"`{name}` must be an instance of `hf_ddtree.{expected.__name__}`, but is {describe_type(value)}."
        )


def _check_keeps_state(candidate_generator: TreeCandidateGenerator | None, draft_state: Any) -> None:
    if draft_state is not getattr(candidate_generator, "state", None):
        keeper = "a lookup" if candidate_generator is None else "this `candidate_generator`"
        raise TypeError(
            f"`draft_state` is {describe_type(draft_state)}, but {keeper} has no state that could be passed on to it. "
            "Leave it out, or pass the drafter that it comes from as `assistant_model`."
        )


def warn_of_standard_decoding(error: UnsupportedError) -> None:
    """Warns, once for each reason, that a call is decoded by the standard method."""
    logger.warning_once("`generation_strategy` is set by default, but this call is decoded without it: " + str(error))


def _prepare_cache(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    policy: BudgetPolicy,
) -> None:
    """Gives a static cache that `generate()` has made room for a tree, and refuses caches that cannot take one."""
    cache = cache_of(model_kwargs)
    if type(cache) is StaticCache:
        if generation_config.output_attentions:
            raise UnsupportedError(
                "`output_attentions` is True, but over a static cache the weights are of its unused entries as well. "
                "Leave `cache_implementation` unset, or `output_attentions`."
            )
        length = buffer_length(cache)
        prompt = prompt_length(generation_config, model_kwargs) or input_ids.shape[1]
        # Shorter rows continue with forwards that write after the longest row.
        needed = prompt + generation_config.max_length - input_ids.shape[1] - (len(input_ids) == 1)
        most_nodes = checked_nodes(policy, "most_nodes", policy.most_nodes)
        if not is_callers_cache(cache):
            make_room_for_trees(cache, max(needed, longest_static_cache(model)), most_nodes)
        elif length is not None and length < needed and not any(cache.is_sliding):
            raise UnsupportedError(
                f"The `StaticCache` has room for {length} tokens, but this call may need {needed}. Pass one with "
                f"`max_cache_len={needed + 1 + most_nodes}`, which leaves room for trees, or set "
                '`cache_implementation="static"` and pass none.'
            )
    check_cache(cache)


def _make_batch(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    is_past_kept: bool,
) -> Batch:
    """Makes the rows independent where that changes no result, and otherwise keeps them in lockstep.

    Independent rows accept more. But a processor, criterion or streamer that sees the whole batch must find rows of
    equal length, scores have one entry per token of all rows, and so has the past that a caller's cache keeps.
    """
    independent = (
        all(type(processor) in ROW_WISE_PROCESSORS for processor in logits_processor)
        and all(type(criterion) in ROW_WISE_CRITERIA for criterion in stopping_criteria)
        and streamer is None
        and not is_past_kept
        and not (
            generation_config.return_dict_in_generate
            and any(getattr(generation_config, name) for name in OUTPUTS_OF_ALL_ROWS)
        )
    )
    num_rows = len(input_ids)
    groups = [[row] for row in range(num_rows)] if independent else [list(range(num_rows))]
    return Batch([RowGroup(rows, input_ids[rows], stopping_criteria, generation_config, streamer) for rows in groups])
