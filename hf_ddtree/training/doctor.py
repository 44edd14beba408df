"""Why a drafter is seldom right: its accepted length in decoding against that on the same text, and the known faults.

Teacher forcing drafts all blocks of a text that the target wrote, in a forward that shares nothing with the loop of
decoding but the drafter. Where the two accept differently, decoding feeds the drafter something else than the text's
features. Where both accept little, the drafter itself or what it is used on is at fault, and each known fault is put
right and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.dflash import DFlashDraftModel
from ..validation import require_positive_int
from .documents import Document, PackedDocuments
from .evaluation import Evaluator
from .known_faults import KnownFault, known_faults, named
from .target_features import TargetFeatures

# A fault fits if putting it right lowers the negative log-likelihood of a slot by this share, and on this share of the
# texts, and leaves a drafter that is worth its drafts.
LOWER_BY, ON_TEXTS = 0.02, 0.75
# Another mode of the template, whose text is another, fits if it multiplies the accepted length by this.
MODE_FITS = 1.3
# Decoding and teacher forcing part where one accepts less than this share of the other.
AGREES = 0.9
# Below this a chain is hardly worth its drafts.
LOW = 1.5


@dataclass(frozen=True)
class Trial:
    """What a drafter gives with a known fault put right.

    Attributes:
        fault: What would be wrong.
        advice: What to do then.
        accepted_length: Tokens per round of a chain by teacher forcing, with the fault put right.
        negative_log_likelihood: In nats a slot, likewise.
        fits: Whether that is so much better that the fault must be there.
    """

    fault: str
    advice: str
    accepted_length: float
    negative_log_likelihood: float
    fits: bool


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a drafter, if anything.

    Attributes:
        decoded: Tokens per round of a chain while decoding.
        teacher_forced: The same by teacher forcing on the text that was decoded.
        negative_log_likelihood: In nats a slot, by teacher forcing.
        hit_rates: For each offset from 1 on, how often the drafter's best token is right where all before it are.
        trials: The known faults that were tried.
        notes: What else is odd.
    """

    decoded: float
    teacher_forced: float
    negative_log_likelihood: float
    hit_rates: list[float]
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fault(self) -> Trial | None:
        """The fault that fits best, if any; the one that was tried first if others fit as well as it."""
        fitting = [trial for trial in self.trials if trial.fits]
        best = min((trial.negative_log_likelihood for trial in fitting), default=0.0)
        return next((trial for trial in fitting if trial.negative_log_likelihood * (1 - LOWER_BY) <= best), None)

    @property
    def parts(self) -> bool:
        """Whether decoding and teacher forcing accept differently."""
        low, high = sorted((self.decoded, self.teacher_forced))
        return low < AGREES * high

    @property
    def is_well(self) -> bool:
        """Whether nothing was found."""
        return self.fault is None and not self.parts and self.teacher_forced >= LOW

    def findings(self) -> list[str]:
        """What was found and what to do, a text each."""
        found = []
        if self.fault is not None:
            found.append(
                f"It seems that {self.fault.fault}. Put right, {self.fault.accepted_length:.2f} tokens per round are "
                f"accepted instead of {self.teacher_forced:.2f}, and a slot's negative log-likelihood is "
                f"{self.fault.negative_log_likelihood:.2f} instead of {self.negative_log_likelihood:.2f} nats. "
                f"{self.fault.advice}"
            )
        if self.parts:
            found.append(
                f"Decoding accepts {self.decoded:.2f} tokens per round, the same text {self.teacher_forced:.2f}: "
                "while decoding, the drafter is fed something else. Compare in float32 with the same kernels, and "
                "without hooks, adapters or a quantized cache."
            )
        if self.fault is None and self.teacher_forced < LOW:
            found.append(
                f"{self.teacher_forced:.2f} tokens per round are accepted, and no known fault fits. Was the drafter "
                "trained for this very model, and on texts like these? Use prompt lookup (`tree_lookup=True`), or "
                "train it on: `hf-ddtree train TARGET --from DRAFTER`."
            )
        return found or [f"Nothing is wrong: {self.decoded:.2f} tokens per round, as the text allows."]

    def to_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return asdict(self) | {"findings": self.findings(), "is_well": self.is_well}


def diagnose(
    target_model: PreTrainedModel,
    drafter: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    other_modes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    max_new_tokens: int = 128,
    on_trial: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Finds out why a drafter is seldom right, or that it is not.

    Args:
        target_model: The target.
        drafter: A drafter of the DFlash family with the target's vocabulary, as `load_drafter` gives it.
        tokenizer: The target's.
        prompts: As tokens, in the chat template and mode in use. The target answers them greedily.
        other_modes: The same prompts in other templates or modes, by name, to be tried as well. Where the answers are
            too short to tell, a note says so.
        max_new_tokens: Most tokens of an answer.
        on_trial: Called with the name of each fault before it is tried.

    Raises:
        ValueError: If the drafter is of another kind or does not fit, a prompt is empty, or the answers are too short
            to tell.
    """
    require_positive_int("max_new_tokens", max_new_tokens)
    for name, given in {"prompts": prompts, **(other_modes or {})}.items():
        _require_tokens(name, given)
    if not isinstance(drafter, DFlashDraftModel):
        raise ValueError(
            f"The drafter is a `{type(drafter).__name__}`, but only those of the DFlash family can be diagnosed."
        )
    was_training = drafter.training
    drafter.eval()
    notes = _notes(drafter, target_model, tokenizer)
    try:
        text = _OwnText(target_model, drafter, prompts, max_new_tokens)
        as_is, trials = text.evaluate(), []
        for fault in known_faults(drafter, target_model, tokenizer):
            if on_trial is not None:
                on_trial(fault.name)
            trials.append(_trial_of(fault, as_is, text.evaluate(fault)))
        for mode, others in (other_modes or {}).items():
            if on_trial is not None:
                on_trial(mode)
            try:
                there = _OwnText(target_model, drafter, others, max_new_tokens)
            except _TooShort as error:
                notes.append(f"Asked {mode}, nothing can be told: {error}")
                continue
            trials.append(_trial_of_mode(mode, as_is, there.evaluate()))
    finally:
        drafter.train(was_training)
    return Diagnosis(
        decoded=text.decoded,
        teacher_forced=as_is.accepted_length,
        negative_log_likelihood=as_is.negative_log_likelihood,
        hit_rates=as_is.hit_rates,
        trials=trials,
        notes=notes,
    )


def _require_tokens(name: str, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ValueError(f"`{name}` is empty. Give at least one prompt.")
    if empty := [number for number, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise ValueError(f"`{name}` has prompts without a token, at {empty[:5]}. Leave them out.")


class _TooShort(ValueError):
    """The target's answers end before a block does."""


class _Measured(NamedTuple):
    """What a drafter gives by teacher forcing.

    Attributes:
        accepted_length: Tokens per round of a chain, over all texts.
        hit_rates: Of `Evaluation`, averaged over texts.
        by_text: Per text the negative log-likelihood of a slot, in nats.
    """

    accepted_length: float
    hit_rates: list[float]
    by_text: list[float]

    @property
    def negative_log_likelihood(self) -> float:
        return sum(self.by_text) / len(self.by_text)


def _trial_of(fault: KnownFault, as_is: _Measured, put_right: _Measured) -> Trial:
    lower = [there < here for here, there in zip(as_is.by_text, put_right.by_text)]
    likelihood = put_right.negative_log_likelihood
    is_lower = likelihood < (1 - LOWER_BY) * as_is.negative_log_likelihood
    fits = is_lower and sum(lower) >= ON_TEXTS * len(lower) and put_right.accepted_length >= LOW
    return Trial(fault.name, fault.advice, put_right.accepted_length, likelihood, fits)


def _trial_of_mode(mode: str, as_is: _Measured, there: _Measured) -> Trial:
    advice = "Decode in that mode, or train the drafter on answers in the one in use: `hf-ddtree train --from`."
    fits = there.accepted_length > MODE_FITS * as_is.accepted_length
    name = f"the drafter was trained {mode}"
    return Trial(name, advice, there.accepted_length, there.negative_log_likelihood, fits)


class _OwnText:
    """What the target writes after some prompts, decoded with a drafter.

    Attributes:
        decoded: Tokens per round of a chain, over the rounds that teacher forcing can follow to their end.
    """

    def __init__(
        self,
        target_model: PreTrainedModel,
        drafter: DFlashDraftModel,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> None:
        self._target, self._drafter = target_model, drafter
        self._documents: list[Document] = []
        lengths: list[int] = []
        depth = drafter.config.draft_length
        for prompt in prompts:
            token_ids, accepted = _decode(target_model, drafter, prompt, max_new_tokens)
            if len(token_ids) - len(prompt) < depth + 2:
                continue
            self._documents.append(Document.answer(token_ids, len(prompt)))
            root = len(prompt)
            for length in accepted:
                if root + depth + 1 < len(token_ids):
                    lengths.append(length)
                root += length
        if not lengths:
            raise _TooShort(
                f"The answers are shorter than a block of {depth} tokens. Give other `prompts` or a greater "
                "`max_new_tokens`."
            )
        self.decoded = sum(lengths) / len(lengths)
        self._features: list[Tensor] | None = None

    def evaluate(self, fault: KnownFault | None = None) -> _Measured:
        """The drafter by teacher forcing, as it is or with a fault put right."""
        with nullcontext() if fault is None else fault.put_right():
            reads_others = fault is not None and fault.reads_other_layers
            given = [None] * len(self._documents) if reads_others else [[one] for one in self._features_as_read()]
            evaluations = [
                Evaluator(self._target, [document], (), len(document), features)(self._drafter)
                for document, features in zip(self._documents, given)
            ]
        rounds = [evaluation.rounds["chain"] for evaluation in evaluations]
        emitted = [one.tokens_per_forward["chain"] * count for one, count in zip(evaluations, rounds)]
        rates = torch.tensor([evaluation.hit_rates for evaluation in evaluations]).mean(dim=0)
        by_text = [evaluation.negative_log_likelihood for evaluation in evaluations]
        return _Measured(sum(emitted) / max(sum(rounds), 1), rates.tolist(), by_text)

    def _features_as_read(self) -> list[Tensor]:
        if self._features is None:
            recorder = TargetFeatures(self._target, self._drafter.config.target_layer_ids)
            try:
                rows = [PackedDocuments([document], len(document)).rows([0]) for document in self._documents]
                self._features = [recorder(row)[0][0] for row in rows]
            finally:
                recorder.close()
        return self._features


def _decode(
    target_model: PreTrainedModel, drafter: DFlashDraftModel, prompt: Sequence[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Prompt and greedy answer, and the accepted lengths of the rounds of a chain."""
    token_ids = torch.tensor([list(prompt)], device=target_model.device)
    out = target_model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        assistant_model=drafter,
        generation_strategy="dflash",
        tree_budget=drafter.config.draft_length,
        calibrate=False,
        return_dict_in_generate=True,
    )
    return out.sequences[0].tolist(), out.ddtree_stats.accepted_lengths


def _notes(drafter: DFlashDraftModel, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    notes = []
    mask = drafter.config.mask_token_id
    if mask < len(tokenizer) and mask not in tokenizer.added_tokens_decoder:
        notes.append(f"The mask token, {mask}, is the word {named(tokenizer, mask)}, which texts hold as well.")
    if drafter.dtype != target_model.dtype:
        notes.append(f"The drafter is in {drafter.dtype}, its target in {target_model.dtype}.")
    return notes
