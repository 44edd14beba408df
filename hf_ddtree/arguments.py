"""Which arguments of `generate()` are taken, translated or refused, whichever way a call comes in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process

from .candidate_generators import TreeCandidateGenerator
from .configuration import LOOKUP, STANDARD, STRATEGIES, DDTreeConfig
from .drafters import DFlashDraftModel
from .drafters.eagle3.model import Eagle3DraftModel
from .drafters.mtp.model import MTPDrafter
from .interop.generation import is_inherited
from .process_defaults import check_drafts_for, process_defaults
from .shared_drafters import attached_names
from .validation import UnsupportedError, did_you_mean, require_positive_int

# Arguments of `ddtree` besides the knobs that Transformers does not know.
OWN_ARGUMENTS = ("candidate_generator", "draft_state", "draft_memory", "record_to")

# Arguments that give what drafts as an object.
DRAFTERS = ("assistant_model", "candidate_generator")

# Those among them that Transformers' own assisted generation cannot use.
OWN_DRAFTERS = (DFlashDraftModel, Eagle3DraftModel, MTPDrafter, TreeCandidateGenerator)

# Modes of Transformers that decode one sequence per row, token by token.
GENERATION_MODES = ("greedy_search", "sample")

GUIDANCE_PROCESSORS = (
    logits_process.ClassifierFreeGuidanceLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# Settings that ask for assisted generation by another drafter: refused, whoever sets them.
OTHER_DRAFTERS = ("use_mtp", "assistant_early_exit")

# Settings of other drafters, and what to do instead. A model's own generation config may hold them: they change no
# output.
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

# Cache implementations that Transformers acts on before it calls a decoding method.
OTHER_CACHES = {
    "paged": "continuous batching, which does not decode by tree",
    "quantized": "a cache in few bits, from which the entries of rejected branches cannot be taken back",
}

# Transformers' own arguments for prompt lookup.
LOOKUP_ARGUMENTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")


class DefaultStrategy(str):
    """A `generation_strategy` that stands in for one in the model's generation config: the call does not name it."""


class GenerateArguments:
    """The arguments of one `generate()` call: those that it names, and the settings of its generation configs.

    Attributes:
        named: The arguments that the call names. What belongs to tree decoding is taken out of them.
    """

    def __init__(self, model: PreTrainedModel, named: dict[str, Any], *configs: Any) -> None:
        self.named = named
        self._model = model
        given = named.get("generation_strategy")
        self._default_strategy = named.pop("generation_strategy") if isinstance(given, DefaultStrategy) else None
        self._model_config = getattr(model, "generation_config", None)
        self._process_config = process_defaults()
        self._configs = (*configs, self._process_config)

    @classmethod
    def of_call(cls, model: PreTrainedModel, named: dict[str, Any]) -> GenerateArguments:
        """Those that `generate()` is called with."""
        return cls(model, named, named.get("generation_config"), getattr(model, "generation_config", None))

    @classmethod
    def prepared(cls, model: PreTrainedModel, generation_config: GenerationConfig) -> GenerateArguments:
        """Those that reach a decoding method, merged into one generation config by `generate()`."""
        return cls(model, {}, generation_config)

    def get(self, name: str) -> Any:
        """The value of an argument, whoever sets it; None if nobody does."""
        value = self.named.get(name)
        return self.configured(name) if value is None else value

    def configured(self, name: str) -> Any:
        """What the call's generation config says, or else the model's; None if neither does."""
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    def set_by_call(self, name: str) -> Any:
        """As `get`, but None if the value is merely the model's or Transformers' default."""
        value = self.get(name)
        return None if name not in self.named and is_inherited(self._model_config, name, value) else value

    @property
    def strategy(self) -> str | None:
        """The generation strategy; None for standard decoding.

        A strategy that is only inherited gives way to what the call names, and to the assisted generation of another
        model that this one drafts for.

        Raises:
            ValueError: If there is no such strategy, or the call names `custom_generate` as well.
        """
        # None as an argument switches off what a generation config says, as "standard" does.
        is_named = "generation_strategy" in self.named
        configured = self.configured("generation_strategy") or self._default_strategy
        strategy = self.named["generation_strategy"] if is_named else configured
        if strategy in (None, STANDARD):
            return None
        if not is_named and self._asks_for_assisted_generation:
            return None
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise ValueError(
                f"`generation_strategy` is {strategy!r}, but must be one of "
                f"{', '.join(map(repr, (*STRATEGIES, STANDARD)))}. Leave it out for standard decoding."
            )
        if self.named.get("custom_generate") is not None:
            if self.is_inherited("generation_strategy"):
                return None
            raise ValueError("Both `generation_strategy` and `custom_generate` are given. Pass one of them.")
        # Transformers passes the target's generation config on to its assistant.
        return None if self.get("is_assistant") and not is_named else strategy

    def is_inherited(self, name: str) -> bool:
        """Whether an argument has its default, the model's or else the process's, and the call does not name it."""
        defaults = (getattr(config, name, None) for config in (self._model_config, self._process_config))
        inherited = next((value for value in defaults if value is not None), None)
        return self.named.get(name) is None and self.configured(name) == inherited

    @property
    def _asks_for_assisted_generation(self) -> bool:
        """Whether a program that knows of no strategy drafts with a model of its own choice."""
        if self._process_config is None or self._strategy_of_configs() is not None:
            return False
        if isinstance(self.named.get("assistant_model"), OWN_DRAFTERS):
            return False
        return any(self.named.get(name) is not None for name in ("assistant_model", "prompt_lookup_num_tokens"))

    def _strategy_of_configs(self) -> Any:
        """The strategy that the call's or the model's generation config sets, or the model's folder."""
        values = (getattr(config, "generation_strategy", None) for config in self._configs[:-1])
        return next((value for value in values if value is not None), self._default_strategy)

    @property
    def names_nothing(self) -> bool:
        """Whether the strategy and all that belongs to it are inherited, so that standard decoding may replace it."""
        names = ("generation_strategy", "assistant_model", *OWN_ARGUMENTS, *DDTreeConfig.knobs())
        return all(self.is_inherited(name) for name in names)

    def take_drafting(self, strategy: str) -> dict[str, Any]:
        """Takes out what a strategy understands.

        Returns:
            The arguments of `hf_ddtree.ddtree`.

        Raises:
            ValueError: If an argument does not work with tree decoding, or contradicts the strategy or another one.
        """
        self._check_spelling()
        names = DDTreeConfig.knobs()
        knobs = {name: value for name in names if (value := self.configured(name)) is not None}
        knobs |= {name: self.named[name] for name in names if name in self.named}
        if self.is_inherited("drafter") and self._names_another_drafter():
            knobs.pop("drafter", None)
        self._check_drafter(knobs.get("drafter"))
        if self._process_config is not None and knobs.get("drafter") == getattr(self._process_config, "drafter", ""):
            check_drafts_for(knobs["drafter"], self._model)
        knobs |= self._translate_lookup(knobs)
        self.check(tree_lookup=bool(knobs.get("tree_lookup")))
        for name, fixed in STRATEGIES[strategy].items():
            if knobs.get(name, fixed) != fixed:
                raise ValueError(
                    f"`{name}` is {knobs[name]!r}, but `generation_strategy={strategy!r}` means {fixed!r}. Leave "
                    f'`{name}` out, or set `generation_strategy="ddtree"`.'
                )
        for name in ("generation_strategy", *names):
            self.named.pop(name, None)
        record_to = self._record_to()
        drafting = {name: self.named.pop(name, None) for name in ("assistant_model", *OWN_ARGUMENTS)}
        drafting["record_to"] = record_to
        return {**drafting, **self.passed_on(), **knobs, **STRATEGIES[strategy]}

    def passed_on(self) -> dict[str, Any]:
        """What a decoding method needs and Transformers does not pass on to it."""
        return {name: self.named.get(name) for name in ("streamer", "synced_gpus")}

    def take_tokenizer(self) -> None:
        """Takes out the tokenizer, which Transformers does not use for other decoding methods than its own.

        Raises:
            UnsupportedError: If `token_healing` is set.
        """
        tokenizer = self.named.pop("tokenizer", None)
        if tokenizer is None:
            return
        if self.get("token_healing"):
            raise UnsupportedError(
                "`token_healing` does not work with tree decoding. Pass `model.heal_tokens(input_ids, tokenizer)` as "
                "the inputs and leave `token_healing` out."
            )
        stop_strings = self.get("stop_strings")
        if stop_strings is not None:
            given = self.named.get("stopping_criteria") or ()
            criterion = StopStringCriteria(tokenizer, stop_strings)
            self.named["stopping_criteria"] = StoppingCriteriaList([*given, criterion])
            self.named["stop_strings"] = None

    def check(self, tree_lookup: bool = False) -> None:
        """Refuses arguments that Transformers would ignore, or refuse for a reason that does not hold here.

        Args:
            tree_lookup: Whether continuations are looked up.

        Raises:
            UnsupportedError: If there is one. The message says what works instead.
        """
        for reason in self._refusals(tree_lookup):
            raise UnsupportedError(reason)

    def check_beside_custom_generate(self) -> None:
        """Refuses what has to be given to `hf_ddtree.ddtree` if that is the `custom_generate`.

        Raises:
            ValueError: If there is an argument of that kind, or one that does not work with tree decoding.
        """
        self.check()
        for name in (*DDTreeConfig.knobs(), *OWN_ARGUMENTS):
            if name in self.named:
                raise ValueError(
                    f"`{name}` is given to `generate()` next to `custom_generate`. Give it to `hf_ddtree.ddtree`."
                )
        if self.named.get("assistant_model") is not None:
            raise ValueError(
                "`assistant_model` is given to `generate()`, which does not pass it on to a custom decoding method. "
                "Give it to `hf_ddtree.ddtree`."
            )

    def check_no_strategy_is_meant(self) -> None:
        """Refuses what only a strategy understands, where Transformers would complain of something else.

        Raises:
            ValueError: If there is such an argument, and the call does not switch the strategy off.
        """
        names = {*DDTreeConfig.knobs(), *OWN_ARGUMENTS} - {*LOOKUP_ARGUMENTS}
        own = sorted(name for name in names if self.named.get(name) is not None)
        if isinstance(self.named.get("assistant_model"), OWN_DRAFTERS):
            own.append("assistant_model")
        if own and "generation_strategy" not in self.named:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in own)} {'is' if len(own) == 1 else 'are'} for tree decoding, but "
                'no `generation_strategy` is set. Add `generation_strategy="ddtree"`.'
            )

    def _record_to(self) -> Any:
        """Where the call is recorded: where it says itself, or else the process's default.

        Raises:
            ValueError: If a generation config says it, which may come with a model or a request.
        """
        if any(getattr(config, "record_to", None) is not None for config in self._configs[:-1]):
            raise ValueError(
                "`record_to` is set in a generation config, which may come with a model or a request, so it is not "
                "followed. Pass `record_to` to `generate()`, or start the server with `--record-to`."
            )
        given = self.named.get("record_to")
        return getattr(self._process_config, "record_to", None) if given is None else given

    def _names_another_drafter(self) -> bool:
        """Whether the call says what drafts, otherwise than by the knob `drafter`."""
        return any(self.named.get(name) is not None for name in (*DRAFTERS, "prompt_lookup_num_tokens"))

    def _check_drafter(self, name: Any) -> None:
        """Refuses to load another drafter than those that a model has been given, as calls may come from others.

        Raises:
            ValueError: If the model or the process has one, or a default without one, and the call names another.
        """
        own = attached_names(self._model)
        own.update(filter(None, (getattr(c, "drafter", None) for c in (self._model_config, self._process_config))))
        allowed = own | {LOOKUP}
        if (own or self._process_config is not None) and isinstance(name, str) and name not in allowed:
            raise ValueError(
                f"`drafter` is {name!r}, but calls for this model may name no other than "
                f"{', '.join(map(repr, sorted(allowed)))}. To allow it, call `hf_ddtree.attach(model, {name!r})` "
                "first."
            )

    def _check_spelling(self) -> None:
        """Refuses what nobody knows, but is nearly the name of an argument of tree decoding.

        Raises:
            ValueError: If the call or its generation config has such a setting. The message names the nearest.
        """
        own = ("generation_strategy", *OWN_ARGUMENTS, *DDTreeConfig.knobs())
        known = {*own, *vars(GenerationConfig()), *inspect.signature(self._model.forward).parameters}
        known.update(inspect.signature(self._model.generate).parameters)
        settings = {name for config in self._configs if config is not None for name in vars(config)}
        for name in sorted({*self.named, *settings} - known):
            if suggestion := did_you_mean(name, own, similarity=0.8):
                raise ValueError(f"`{name}` is set, which neither Transformers nor tree decoding knows.{suggestion}")

    def _translate_lookup(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """The knobs that mean what `prompt_lookup_num_tokens` says, in whose place Transformers gets None."""
        num_tokens = self.get("prompt_lookup_num_tokens")
        if num_tokens is None:
            return {}
        if knobs.get("drafter") or any(self.named.get(name) is not None for name in DRAFTERS):
            raise ValueError(
                f"`prompt_lookup_num_tokens` is {num_tokens!r} and a drafter is given as well. Leave one of them out, "
                "or set `tree_lookup=True` in place of the former: then both draft."
            )
        require_positive_int("prompt_lookup_num_tokens", num_tokens)
        translated = {"tree_lookup": knobs.get("tree_lookup") or True, "draft_length": num_tokens}
        for name, meant in translated.items():
            if knobs.get(name, meant) != meant:
                raise ValueError(
                    f"`{name}` is {knobs[name]!r}, but `prompt_lookup_num_tokens={num_tokens!r}` means {meant!r}. "
                    "Leave one of them out."
                )
        self.named["prompt_lookup_num_tokens"] = None
        return translated

    def _refusals(self, tree_lookup: bool) -> Iterator[str]:
        for name in OTHER_DRAFTERS:
            if self.get(name):
                yield (
                    f"Tree decoding does greedy search and sampling, but `{name}` asks for assisted generation by "
                    "another drafter. Leave it out and pass a drafter as `assistant_model` or a "
                    "`TreeCandidateGenerator` as `candidate_generator`, or generate without `generation_strategy`."
                )
        if not tree_lookup and self.get("prompt_lookup_num_tokens") is not None:
            yield (
                "`prompt_lookup_num_tokens` is set, which Transformers would answer with its own assisted generation. "
                "Leave it out and give `tree_lookup=True` and `draft_length` to `hf_ddtree.ddtree`, or generate "
                "without `generation_strategy`."
            )
        if not tree_lookup and self.set_by_call("max_matching_ngram_size") is not None:
            yield (
                "`max_matching_ngram_size` is set, but nothing is looked up. Set `tree_lookup=True` as well, or leave "
                "it out."
            )
        for name, instead in OTHER_DRAFTERS_KNOBS.items():
            if self.set_by_call(name) is not None:
                yield (
                    f"`{name}` is for the drafters of Transformers' own assisted generation and has no meaning in "
                    f"tree decoding. {instead}"
                )
        if self.get("is_assistant"):
            yield (
                "`is_assistant` is True, but a model that drafts for another one must not be decoded by tree. Leave "
                "it out, or generate without `generation_strategy`."
            )
        if (kind := self.get("cache_implementation")) in OTHER_CACHES:
            yield (
                f"`cache_implementation={kind!r}` asks for {OTHER_CACHES[kind]}. Leave `cache_implementation` unset, "
                "or generate without `generation_strategy`."
            )


def check_mode(generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> None:
    """Refuses a prepared call that is neither greedy search nor sampling.

    Raises:
        UnsupportedError: If it asks for beams, for another way to decode or for guidance.
    """
    if generation_config.num_beams is not None and generation_config.num_beams > 1:
        raise UnsupportedError(
            f"Tree decoding follows one sequence, but `num_beams` is {generation_config.num_beams}. Set "
            "`num_beams=1`, or generate without `generation_strategy`."
        )
    mode = generation_config.get_generation_mode()
    if mode not in GENERATION_MODES:
        raise UnsupportedError(
            f"Tree decoding does greedy search and sampling, but other arguments ask for {mode.replace('_', ' ')}. "
            "Leave them out, or generate without `generation_strategy`."
        )
    if any(isinstance(processor, GUIDANCE_PROCESSORS) for processor in logits_processor):
        raise UnsupportedError(
            "Tree decoding does not work with classifier-free guidance, which runs the model on a second prompt. "
            "Leave `guidance_scale` unset, or generate without `generation_strategy`."
        )
