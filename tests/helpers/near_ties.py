"""Equality with standard decoding in a precision where rounding can tip near ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree.testing import compare

NEW_TOKENS = 20


def assert_equal_up_to_near_ties(
    model: PreTrainedModel, prompts: list[Tensor], make_drafting: Callable[[Tensor], dict[str, Any]]
) -> list[hf_ddtree.DDTreeOutput]:
    """Decodes each prompt plainly and by tree; a token may differ only where the two candidates are a near tie.

    The noise is the model's: the greatest difference, over all prompts, between the logits of standard decoding's
    tokens
    fed one at a time and fed together. Neither side involves a tree. Up to there the tree's logits must be plain
    decoding's within three times the noise, which the maximum of a few more draws of the same noise does not exceed.

    Args:
        model: The target.
        prompts: `(1, length)` each.
        make_drafting: Keywords of `generate()` that say who drafts, given what standard decoding returned.

    Returns:
        The outputs by tree.
    """
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    comparisons, outputs = [], []
    for prompt in prompts:
        plain = model.generate(prompt, **arguments)
        drafting = make_drafting(plain.sequences)
        outputs.append(model.generate(prompt, **arguments, **drafting, generation_strategy="ddtree"))
        comparisons.append(compare(model, plain, outputs[-1]))
    noise = max(comparison.noise for comparison in comparisons)
    for comparison in comparisons:
        assert comparison.gap is None or comparison.gap <= 2 * noise, comparison
        assert comparison.deviation <= 3 * noise, (comparison, noise)
    return outputs
