"""Which arguments of `generate()` tree decoding takes, translates or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    GenerationConfig,
    LogitsProcessorList,
)
from transformers.generation import logits_process

GENERATION_MODES = ("greedy_search", "sample")


GUIDANCE_PROCESSORS = (
    logits_process.ClassifierFreeGuidanceLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


# What asks for another way to draft, and what does not work as it should, whoever sets it; and what to do instead.
OTHER_DRAFTERS = ("use_mtp", "assistant_early_exit")


# What says how others draft. A model's own generation config may hold these, where they change no output.
OTHER_DRAFTERS_KNOBS = {
    "assistant_tokenizer": "Drafters share the target's tokenizer; leave it out.",
    "num_assistant_tokens": "Set `draft_length` and `tree_budget`.",
    "num_assistant_tokens_schedule": "Set `tree_budget`.",
    "assistant_confidence_threshold": "Set `tree_budget`: the nodes go where the drafter is confident.",
    "assistant_lookbehind": "Drafters share the target's tokenizer; leave it out.",
    "target_lookbehind": "Drafters share the target's tokenizer; leave it out.",
    "assistant_ensemble_weight": "Tree decoding changes no probability; leave it out.",
    "speculation_type": "`generation_strategy` says it already; leave it out.",
}


# Caches that Transformers answers in a way of its own before it asks a decoding method.
OTHER_CACHES = {
    "paged": "continuous batching, which does not decode by tree",
    "quantized": "a cache in few bits, from which the entries of rejected branches cannot be taken back",
}


# What says how Transformers looks continuations up, which trees do as well.
LOOKUP_ARGUMENTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")


def check_arguments(
    setting: Callable[[str], Any], set_by_call: Callable[[str], Any], tree_lookup: bool = False
) -> None:
    """Refuses arguments that Transformers would ignore, or refuse for a reason that does not hold here.

    Args:
        setting: The value of an argument of `generate()`, whoever sets it; None if nobody does.
        set_by_call: The same, None if it is but the model's default.
        tree_lookup: Whether continuations are looked up, which the knobs have taken from these arguments.

    Raises:
        ValueError: If there is one. The message says what works instead.
    """
    for name in OTHER_DRAFTERS:
        if setting(name):
            raise ValueError(
                f"Tree decoding does greedy search and sampling, but `{name}` asks for assisted generation by another "
                "drafter. Leave it out and pass a drafter as `assistant_model` or a `TreeCandidateGenerator` as "
                "`candidate_generator`, or generate without `generation_strategy`."
            )
    if not tree_lookup and setting("prompt_lookup_num_tokens") is not None:
        raise ValueError(
            "`prompt_lookup_num_tokens` is set, which Transformers would answer with its own assisted generation. "
            "Leave it out and give `tree_lookup=True` and `draft_length` to `hf_ddtree.ddtree`, or generate without "
            "`generation_strategy`."
        )
    if not tree_lookup and set_by_call("max_matching_ngram_size") is not None:
        raise ValueError(
            "`max_matching_ngram_size` is set, but nothing is looked up. Set `tree_lookup=True` as well, or leave it "
            "out."
        )
    for name, instead in OTHER_DRAFTERS_KNOBS.items():
        if set_by_call(name) is not None:
            raise ValueError(
                f"`{name}` is for the drafters of Transformers' own assisted generation and has no meaning in tree "
                f"decoding. {instead}"
            )
    if setting("is_assistant"):
        raise ValueError(
            "`is_assistant` is True, but a model that drafts for another one must not be decoded by tree. Leave it "
            "out, or generate without `generation_strategy`."
        )
    if (kind := setting("cache_implementation")) in OTHER_CACHES:
        raise ValueError(
            f"`cache_implementation={kind!r}` asks for {OTHER_CACHES[kind]}. Leave `cache_implementation` unset, or "
            "generate without `generation_strategy`."
        )


def check_call(generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> None:
    """Refuses what tree decoding cannot do exactly.

    Raises:
        ValueError: If the call asks for beams, for another way to decode or for guidance.
    """
    if generation_config.num_beams is not None and generation_config.num_beams > 1:
        raise ValueError(
            f"Tree decoding follows one sequence, but `num_beams` is {generation_config.num_beams}. Set "
            "`num_beams=1`, or generate without `generation_strategy`."
        )
    mode = generation_config.get_generation_mode()
    if mode not in GENERATION_MODES:
        raise ValueError(
            f"Tree decoding does greedy search and sampling, but other arguments ask for {mode.replace('_', ' ')}. "
            "Leave them out, or generate without `generation_strategy`."
        )
    if any(isinstance(processor, GUIDANCE_PROCESSORS) for processor in logits_processor):
        raise ValueError(
            "Tree decoding does not work with classifier-free guidance, which runs the model on a second prompt. "
            "Leave `guidance_scale` unset, or generate without `generation_strategy`."
        )
