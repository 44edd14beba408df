"""Calls in which no candidate generator may change a token, for the test of each kind of drafter.

A test takes `GRID`, or `CALLS` with a target of its own, and passes each case to `check_case` or `check_call` with a
function that makes the drafter's arguments of `generate()` for the target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from helpers.families import first_implementation, make_model
from hf_ddtree.interop.versions import CACHE_KEY

# Full attention, recurrent state beside full attention, and sliding windows.
GRID_FAMILIES = ("llama", "qwen3_5", "mistral")
PROMPT_LENGTH = 11
NEW_TOKENS = 12

MakeDrafts = Callable[[PreTrainedModel], dict[str, Any]]


class EndsAfterPair(StoppingCriteria):
    """Stops a row whose last two tokens sum to a multiple of five, which looks at more than the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(dim=1) % 5 == 0


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.received.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


SAMPLED = {"do_sample": True}
# The rows of a sampled batch draw in standard decoding's order where they walk together, which scores make them do.
SAMPLED_ROWS = {"do_sample": True, "output_scores": True}
# For each call: the arguments that standard decoding gets too. Those in capitals are read here.
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, long": {"max_new_tokens": 48},
    "greedy, one token": {"max_new_tokens": 1},
    "sampled": SAMPLED | {"SEED": 1},
    "sampled hot": SAMPLED | {"SEED": 2, "temperature": 1.6},
    "sampled, warped": SAMPLED | {"SEED": 3, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.4},
    "repetition penalty, sampled": SAMPLED | {"repetition_penalty": 1.3, "SEED": 4},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "suppressed and banned": {"suppress_tokens": [3, 8, 21], "bad_words_ids": [[5], [7, 9]]},
    "end token": {"ENDS": 6},
    "end tokens after a least length": {"ENDS": 3, "min_new_tokens": 7},
    "stopping criterion": {"STOPS": True},
    "streamer": {"STREAMS": True},
    "padded batch": {"PADS": (0, 6, 3)},
    "padded batch, rows end apart": {"PADS": (2, 0, 9), "ENDS": 8},
    "padded batch, sampled": SAMPLED_ROWS | {"PADS": (5, 0, 1), "SEED": 5},
    "several sequences": SAMPLED_ROWS | {"num_return_sequences": 3, "SEED": 6},
    "embeddings": {"EMBEDS": True},
    "chat": {"TURNS": (1, 5, 2)},
    "chat of a padded batch": {"TURNS": (3, 2), "PADS": (0, 4, 7)},
    "chat, sampled": SAMPLED | {"TURNS": (4, 1), "SEED": 7},
}
GRID = [(family, call) for family in GRID_FAMILIES for call in CALLS]


def check_case(case: tuple[str, str], make_drafts: MakeDrafts) -> float:
    """Checks one of `GRID`, as `check_call` does."""
    family, call = case
    return check_call(make_model(family, first_implementation(family)), call, make_drafts)


def check_call(model: PreTrainedModel, call: str, make_drafts: MakeDrafts) -> float:
    """Checks that one of `CALLS` gives the same tokens by standard decoding and with the drafter.

    Args:
        model: The target, whose token 0 is padding.
        call: Name of the call.
        make_drafts: Makes the drafter's arguments for the target: `{"assistant_model": ..., "tree_budget": 7}`, say.

    Returns:
        Tokens that the drafter's last call emitted per forward of the target.
    """
    arguments = dict(CALLS[call])
    own = {name: arguments.pop(name) for name in list(arguments) if name.isupper()}
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | arguments
    vocab_size = model.config.get_text_config().vocab_size
    pads = torch.tensor(own.get("PADS", (0,)))
    prompt = random_tokens(len(CALLS) + list(CALLS).index(call), (len(pads), PROMPT_LENGTH), vocab_size)
    if own.get("ENDS"):
        # What standard decoding comes to, so that rows do end.
        mask = (torch.arange(PROMPT_LENGTH) >= pads[:, None]).long()
        reached = model.generate(prompt * mask, attention_mask=mask, **arguments | {"min_new_tokens": None})
        arguments["eos_token_id"] = sorted({*reached[:, PROMPT_LENGTH + 3 :: own["ENDS"]].flatten().tolist()} - {0})
    drafts = make_drafts(model)
    plain, _ = _chat(model, prompt, pads, own, arguments, {})
    tree, output = _chat(model, prompt, pads, own, arguments, {"generation_strategy": "ddtree", **drafts})
    assert tree == plain
    return output.ddtree_stats.tokens_per_forward


def random_tokens(seed: int, shape: Sequence[int], vocab_size: int) -> Tensor:
    """Tokens other than 0, which is padding."""
    return torch.randint(1, vocab_size, tuple(shape), generator=torch.Generator().manual_seed(seed))


def _chat(
    model: PreTrainedModel,
    prompt: Tensor,
    pads: Tensor,
    own: dict[str, Any],
    arguments: dict[str, Any],
    drafts: dict[str, Any],
) -> tuple[list[Any], Any]:
    """What every turn gave, the tokens and what a streamer got; and the last output."""
    vocab_size = model.config.get_text_config().vocab_size
    torch.manual_seed(own.get("SEED", 0))
    seen: list[Any] = []
    history, state = prompt, {}
    for turn, said in enumerate((0, *own.get("TURNS", ()))):
        history = torch.cat((history, random_tokens(turn, (len(history), said), vocab_size)), dim=1)
        mask = (torch.arange(history.shape[1]) >= pads[:, None]).long()
        history = history * mask
        inputs: dict[str, Any] = {"input_ids": history, "attention_mask": mask}
        if own.get("EMBEDS"):
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        if own.get("STOPS"):
            inputs["stopping_criteria"] = StoppingCriteriaList([EndsAfterPair()])
        streamer = Recorder() if own.get("STREAMS") else None
        output = model.generate(
            **inputs, **copy.deepcopy(arguments), **state, **drafts, streamer=streamer, return_dict_in_generate=True
        )
        seen.append(output.sequences.tolist())
        if streamer is not None:
            seen.append((sum(streamer.received, []), streamer.ended))
        state = {CACHE_KEY: output[CACHE_KEY]} | ({"draft_state": output.draft_state} if drafts else {})
        history = output.sequences
    return seen, output
