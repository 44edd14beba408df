"""Standard decoding and tree decoding of the same call, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_ddtree
from helpers.families import VOCAB_SIZE
from hf_ddtree.testing import OracleTreeCandidateGenerator

PROMPT_LENGTH = 10
NEW_TOKENS = 32


def make_prompt(seed: int = 0, length: int = PROMPT_LENGTH) -> Tensor:
    """`(1, length)` random tokens."""
    return torch.randint(1, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def make_oracle(plain: Tensor, **kwargs: Any) -> OracleTreeCandidateGenerator:
    """A generator that knows what standard decoding gave, and hides it among distractors."""
    return OracleTreeCandidateGenerator(plain[0], VOCAB_SIZE, **kwargs)


def plain_and_tree(
    model: PreTrainedModel,
    make_arguments: Callable[[], dict[str, Any]],
    seed: int = 0,
    input_ids: Tensor | None = None,
) -> tuple[GenerateDecoderOnlyOutput, hf_ddtree.DDTreeOutput]:
    """What standard decoding and tree decoding with an oracle return, both from the same seed.

    `make_arguments` is called for each of them, so that processors, criteria and streamers with a state are new.
    """
    defaults = {
        "inputs": make_prompt() if input_ids is None else input_ids,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    torch.manual_seed(seed)
    plain = model.generate(**defaults | make_arguments())
    torch.manual_seed(seed)
    tree = model.generate(
        **defaults | make_arguments(),
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain.sequences),
    )
    return plain, tree


def assert_equal(plain: GenerateDecoderOnlyOutput, tree: GenerateDecoderOnlyOutput) -> None:
    """The same tokens, and the same scores and logits up to rounding."""
    assert tree.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        expected, got = getattr(plain, name), getattr(tree, name)
        assert (got is None) == (expected is None)
        assert len(got or ()) == len(expected or ())
        for step, step_expected in zip(got or (), expected or ()):
            assert step.shape == step_expected.shape and step.dtype == step_expected.dtype
            torch.testing.assert_close(step, step_expected, rtol=1e-4, atol=1e-4)
