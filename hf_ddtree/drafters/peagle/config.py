"""The configuration of a P-EAGLE drafter."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..eagle3.config import Eagle3Config


@strict
class PEagleConfig(Eagle3Config):
    """An `Eagle3Config` for drafts of one forward.

    Args:
        draft_length: Tokens that a forward predicts.
        mask_token_id: The token of the target's vocabulary whose embedding stands for a token to predict.

    Raises:
        ValueError: If a value is missing or out of range.
    """

    model_type = "hf_ddtree_peagle"

    draft_length: int = 8
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.draft_length < 1:
            raise ValueError(f"`draft_length` is {self.draft_length}, but must be at least 1.")
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, but must be between 0 and `vocab_size - 1` "
                f"({self.vocab_size - 1}). Set it in config.json to the token that the drafter was trained with."
            )
