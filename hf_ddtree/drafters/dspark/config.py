"""The configuration of a DSpark drafter."""

from huggingface_hub.dataclasses import strict

from ..dflash.config import DFlashConfig

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@strict
class DSparkConfig(DFlashConfig):
    """A `DFlashConfig` with the settings of DSpark's heads. The root's slot predicts a token as well.

    Args:
        markov_rank: Length of the vectors of the Markov head; 0 for no such head.
        markov_head_type: `"vanilla"`, `"gated"` or `"rnn"`; see `MarkovHead`.
        enable_confidence_head: Whether there is a confidence head.
        confidence_head_with_markov: Whether it sees the Markov head's vector of the token before.
        owns_vocabulary: Whether the drafter has embeddings and an output head of its own for the target's vocabulary.

    Raises:
        ValueError: If a value is missing or out of range.
    """

    model_type = "hf_ddtree_dspark"

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    owns_vocabulary: bool = False

    def _check_values(self) -> None:
        super()._check_values()
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is {self.markov_rank}, but must be at least 0.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            allowed = ", ".join(map(repr, MARKOV_HEAD_TYPES))
            raise ValueError(f"`markov_head_type` is {self.markov_head_type!r}, but must be one of {allowed}.")
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "`confidence_head_with_markov` is True, but `markov_rank` is 0, so there is no Markov head for the "
                "confidence head to see."
            )
        if self.owns_vocabulary and self.draft_vocab_size is not None:
            raise ValueError("`owns_vocabulary` is True, but `draft_vocab_size` is set, which is another vocabulary.")
