"""A DFlash drafter with a head that corrects each slot's distribution by the tokens on the branch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from .dflash.model import DFlashDraftModel


class SequentialHeadDraftModel(DFlashDraftModel):
    """The interface of such drafters. `forward` is that of `DFlashDraftModel`.

    A node of the tree has a state: what the head keeps of the tokens from the root to the node.
    """

    is_conditional = True

    @abstractmethod
    def start_states(self, num_rows: int) -> Tensor:
        """`(num_rows, state_size)`, the states in front of the roots."""

    @abstractmethod
    def correct(
        self, hidden_states: Tensor, token_ids: Tensor, states: Tensor, depth: int, target_embeddings: nn.Embedding
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The corrections of the slots after some nodes of one depth.

        Args:
            hidden_states: `(n, hidden_size)`, of the slots that predict the nodes' children.
            token_ids: `(n,)` int64, the nodes' tokens.
            states: `(n, state_size)`, the states of the nodes' parents.
            depth: The nodes' depth; 0 for the roots.
            target_embeddings: The target's input embeddings.

        Returns:
            `(n, vocab)`, a bias on the slots' logits, in the order of the drafter's vocabulary, None for none; `(n,)`
            float32, the logarithm of the probability that a token is accepted there, None if the drafter does not
            predict it; and `(n, state_size)`, the nodes' states.
        """
