"""The configuration of a DFlash 2 drafter."""

from huggingface_hub.dataclasses import strict

from ..dflash.config import DFlashConfig


@strict
class DFlash2Config(DFlashConfig):
    """A `DFlashConfig` with the settings of the second version.

    Args:
        conv_kernel_size: Slots that a convolution reads: a slot itself and those right before it.
        conv_group_size: Neighbouring channels that share the part of the kernel that depends on the input.
        selector_rank: Length of the vectors that the selector compares.
        selector_top_k: Candidates per slot that the selector scores.

    Raises:
        ValueError: If a value is missing or out of range.
    """

    model_type = "hf_ddtree_dflash2"

    conv_kernel_size: int = 3
    conv_group_size: int = 16
    selector_rank: int = 128
    selector_top_k: int = 16

    def _check_values(self) -> None:
        super()._check_values()
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 1.")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size` is {self.conv_group_size}, but must divide `hidden_size` ({self.hidden_size})."
            )
        if self.draft_vocab_size is not None:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, but the selector compares tokens of the whole "
                f"vocabulary ({self.vocab_size})."
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"`selector_top_k` is {self.selector_top_k}, but must be at most `vocab_size` ({self.vocab_size})."
            )
