"""What Transformers' server answers to a request that names a wrong argument: the reason, with a status of 400."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .interop.serving import answer_wrong_values, check_streams

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def refuse_wrong_requests() -> None:
    """Changes the server of this process, now or as soon as it is imported."""
    answer_wrong_values()
    check_streams(check_drafting)


def check_drafting(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Refuses what `generate()` would refuse of the strategy, the drafter and the knobs that a request names.

    Raises:
        ValueError: If a value is not allowed, or an argument does not work with tree decoding.
    """
    from .arguments import GenerateArguments
    from .strategy import ddtree
    from .validation import UnsupportedError

    arguments = GenerateArguments.of_call(model, {"generation_config": generation_config})
    strategy, falls_back = arguments.strategy, arguments.names_nothing
    if strategy is None:
        return
    try:
        ddtree(**arguments.take_drafting(strategy))
    except UnsupportedError:
        if not falls_back:
            raise
