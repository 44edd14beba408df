"""The configuration of a Domino drafter."""

from huggingface_hub.dataclasses import strict

from ..dflash.config import DFlashConfig


@strict
class DominoConfig(DFlashConfig):
    """A `DFlashConfig` with the settings of Domino's head.

    Args:
        emb_dim: Width of the head's hidden layer.
        gru_hidden_dim: Width of the state of the recurrence over the branch.
        pure_draft_prefix_len: Tokens after the root that are predicted without the head.

    Raises:
        ValueError: If a value is missing or out of range.
    """

    model_type = "hf_ddtree_domino"

    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 0

    def _check_values(self) -> None:
        super()._check_values()
        for name, least in (("emb_dim", 1), ("gru_hidden_dim", 1), ("pure_draft_prefix_len", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least {least}.")
