"""Trees from a block-diffusion drafter: DFlash (arXiv:2602.06036) proposes, DDTree (arXiv:2604.12989) builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..devices import builds_on_device, on_device
from ..drafters.dflash import DFlashContextCache, DFlashDraftModel
from ..drafters.dflash.checkpoint import check_drafter_fits
from ..tree.build import build_tree
from ..tree.build_on_device import search_trees
from ..tree.candidates import best_tokens
from ..tree.draft_tree import DraftTree
from .base import TreeCandidateGenerator, end_tokens_of
from .branch_search import BranchCandidates, search_branches
from .context import DraftContext, join_features
from .known_sequences import KnownSequences
from .prompt_lookup import PromptLookupTreeCandidateGenerator


@dataclass
class DFlashState(KnownSequences):
    """What the drafter keeps of the sequences; passed with the target's cache from one `generate()` call to the next.

    Attributes:
        cache: Keys and values of the context.
        context_mask: `(batch, context)` bool, False where a row's context is padding; None if nothing is.
        num_context: Per row the number of context entries that are its own, once there is a `context_mask`.
        features, num_features: What is made of the features of the target's last tokens, which no draft has used yet.
    """

    cache: DFlashContextCache = field(default_factory=DFlashContextCache)
    context_mask: Tensor | None = None
    num_context: list[int] = field(default_factory=list)
    features: Tensor | None = None
    num_features: list[int] = field(default_factory=list)


class DFlashTreeCandidateGenerator(TreeCandidateGenerator):
    """Drafts a block in one forward and turns its distributions into a tree.

    The block holds the root and one mask token for each position to predict. The features of the committed tokens
    enter the drafter's layers as keys and values in front of the block's, and are kept in the drafter's own cache.

    Args:
        drafter: The drafter, on any device and in any dtype.
        target_model: The target, whose embeddings and output head the drafter uses.
        config: Shape, width and depth of the trees.
        state: An earlier call's `draft_state`, if the sequences continue.

    Attributes:
        wants_lookup: Whether it builds better trees with a `lookup`.
        lookup: What others keep up to date with rounds, or None. Set before the first round.

    Raises:
        ValueError: If the drafter does not fit the target.
    """

    lookup: PromptLookupTreeCandidateGenerator | None = None
    _learns_from_candidates: bool = False  # where trees are built on a device

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target_model: PreTrainedModel,
        config: DDTreeConfig | None = None,
        state: DFlashState | None = None,
    ) -> None:
        super().__init__()
        check_drafter_fits(drafter, target_model)
        if state is not None and not isinstance(state, DFlashState):
            raise TypeError(
                f"`draft_state` must be a former output's `draft_state`, but is a `{type(state).__name__}`."
            )
        self.drafter = drafter
        self._set_knobs(config, drafter.config.draft_length, drafter.config.draft_length)
        self.feature_layers = tuple(drafter.config.target_layer_ids)
        self.end_tokens = end_tokens_of(target_model)
        self.state = state or DFlashState()
        self._is_conditional = drafter.is_conditional and self.config.tree_probabilities != "marginal"
        learns = self.config.calibrate and not self._is_conditional
        self._calibration = drafter.calibration if learns else None
        self.wants_lookup = (
            learns
            and not drafter.is_conditional
            and self.config.tree_probabilities == "conditional"
            and self._shape != "chain"
        )
        self._drafted: list[Tensor] | None = None  # the candidates of the last round, (batch, depth, ...)
        self._branches: list[BranchCandidates | None] = []  # per row of the last round
        self._embeddings = target_model.get_input_embeddings()
        self._head = target_model.get_output_embeddings()
        self._target_token_ids = drafter.target_token_ids
        self._block_size, self._mask_token = drafter.config.block_size, drafter.config.mask_token_id
        first = drafter.config.first_slot
        self._slots = slice(first, first + self._draft_length)

    def start(self, cached_ids: Tensor, num_cached: int) -> None:
        super().start(cached_ids, num_cached)
        config = self.drafter.config
        drafter = (
            *(config.name_or_path, self.drafter.device, self.drafter.dtype, self.feature_layers),
            *(config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.head_dim),
        )
        if num_cached == 0 or not self.state.continues(drafter, cached_ids, num_cached):
            self.state = DFlashState(drafter=drafter)

    @torch.no_grad()
    def reduce_features(self, features: Tensor) -> Tensor:
        return self.drafter.project(features)

    def finish(self, context: DraftContext) -> None:
        self._learn(context)
        self._remember(context)

    @torch.no_grad()
    def propose(self, context: DraftContext, budget: int) -> list[DraftTree]:
        self._learn(context)
        self._remember(context)
        roots = context.input_ids[:, -1:]
        hidden_states = self._draft(roots)[:, self._slots]
        return self.trees_of(hidden_states, roots[:, 0], context.roots, budget, context)

    @torch.no_grad()
    def trees_of(
        self,
        hidden_states: Tensor,
        roots: Tensor,
        root_ids: list[int],
        budget: int,
        context: DraftContext | None = None,
    ) -> list[DraftTree]:
        """The trees of drafted blocks.

        Args:
            hidden_states: `(batch, depth, hidden_size)`, of the slots to predict.
            roots: `(batch,)` int64, the roots' tokens.
            root_ids: The same, known to the host.
            budget: Most drafted nodes of a tree.
            context: What is known in this round, if the trees are to know what the target said before.
        """
        log_probs, token_ids, *states = self._candidates(hidden_states, roots, budget)
        if self._target_token_ids is not None:
            self._target_token_ids = self._target_token_ids.to(token_ids.device)
            token_ids = self._target_token_ids[token_ids]
        if builds_on_device(log_probs.device) and self._calibration is None:
            with self.building():
                next_state = states[0] if states else None
                return search_trees(
                    *(log_probs, token_ids, root_ids, budget, self._shape),
                    next_state=next_state,
                    to_host=partial(self._with_candidates, (log_probs, token_ids, *states)),
                )
        # The calibration learns on the host, so trees are built there as well.
        self._drafted = self.on_host(log_probs, token_ids, *states)
        log_probs, token_ids, *states = self._drafted
        if context is not None and self.lookup is not None and self._calibration is not None:
            self.lookup.take_in(context)
            self.lookup.learn()
            with self.building(), self.lookup.locked():
                return [
                    self._branching_tree(context, row, of_row, budget)
                    for row, of_row in enumerate(zip(log_probs, token_ids))
                ]
        trees = []
        with self.building():
            for row, root in enumerate(root_ids):
                probs, tokens, state = log_probs[row], token_ids[row], states[0][row] if states else None
                if self._calibration is not None and not self._calibration.is_neutral:
                    probs, tokens, state = self._calibration.calibrate(probs, tokens)
                trees.append(build_tree(probs, tokens, root, budget, self._shape, next_state=state))
        return trees

    def _branching_tree(
        self, context: DraftContext, row: int, of_row: tuple[Tensor, Tensor], budget: int
    ) -> DraftTree:
        """A row's tree on the calibrated marginals and on what the target said after the last tokens of branches."""
        assert self._calibration is not None and self.lookup is not None
        root, last_tokens = context.roots[row], self.lookup.last_tokens(row)
        if last_tokens[-1] != root:  # the padding of a finished row
            self._branches.append(None)
            return DraftTree.root_only(root)
        calibrated, _, _ = self._calibration.calibrate(*of_row)
        powers = self._calibration.powers[context.do_sample]
        branches = BranchCandidates(calibrated, of_row[1], self.lookup.tables, powers, last_tokens)
        self._branches.append(branches)
        return search_branches(branches, budget, self._shape, self.config.tree_top_k)

    def _with_candidates(self, candidates: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
        """Tensors on the CPU; with the same transfer the candidates, if there is something to learn from them."""
        if not self._learns_from_candidates:
            return self.on_host(*tensors)
        brought = self.on_host(*tensors, *candidates)
        self._drafted = brought[len(tensors) :]
        return brought[: len(tensors)]

    def _candidates(self, hidden_states: Tensor, roots: Tensor, budget: int) -> tuple[Tensor, ...]:
        """Per row the log-probabilities and tokens for `build_tree`; and the next states, if trees are built on how
        probable a token is after another."""
        logits = self.drafter.compute_logits(hidden_states, self._head)
        most = self.config.tree_top_k
        # A chain of marginals takes the best token at each depth.
        is_chain = self._shape == "chain"
        return best_tokens(logits, 1 if is_chain else min(budget, most or budget))

    def _learn(self, context: DraftContext) -> None:
        """Lets the calibration compare the last round's candidates with the emitted tokens."""
        if self._calibration is not None and self._drafted is not None:
            for emitted, log_probs, token_ids in zip(context.emitted, *self._drafted):
                if emitted:
                    self._calibration.learn(log_probs, token_ids, emitted[: len(log_probs)])
        if self.lookup is not None and context.emitted:
            with self.lookup.locked():
                for branches, emitted in zip(self._branches, context.emitted):
                    if branches is not None:
                        branches.learn(emitted)
        self._drafted, self._branches = None, []

    def _remember(self, context: DraftContext) -> None:
        """Keeps the features for the next draft, after those that are left of an earlier call."""
        state = self.state
        state.input_ids = context.input_ids
        state.root_positions = list(context.root_positions)
        if context.features is None:
            return
        news = [] if state.features is None else [(state.features, state.num_features)]
        state.features, state.num_features = join_features([*news, (context.features, context.num_features)])

    def _draft(self, roots: Tensor) -> Tensor:
        """Hidden states `(batch, block, hidden_size)` of a block after all of the context."""
        state, device = self.state, self.drafter.device
        batch_size, num_new = len(roots), 0 if state.features is None else state.features.shape[1]
        masks = roots.new_full((batch_size, self._block_size - 1), self._mask_token)
        block = torch.cat((roots, masks), dim=1)
        if len(set(state.root_positions)) == len(set(state.num_features)) == 1:
            root = state.root_positions[0]
            position_ids = torch.arange(root - num_new, root + self._block_size, device=device)[None]
        else:
            positions = torch.arange(-num_new, self._block_size, device=device)
            # Features are aligned at the left, so padding follows them.
            shift = on_device([num_new - count for count in state.num_features or [0] * batch_size], device)
            position_ids = positions + on_device(state.root_positions, device)[:, None]
            position_ids[:, :num_new] += shift[:, None]
        self._extend_mask(num_new, batch_size)
        hidden_states = self.drafter(
            inputs_embeds=self.drafter.embed(block, self._embeddings),
            context=None if num_new == 0 else state.features,
            position_ids=position_ids,
            cache=state.cache,
            context_mask=state.context_mask,
        )
        self.num_forwards += 1
        state.features, state.num_features = None, []
        return hidden_states

    def _extend_mask(self, num_new: int, batch_size: int) -> None:
        state, device = self.state, self.drafter.device
        num_features = state.num_features or [0] * batch_size
        if state.context_mask is None and all(count == num_new for count in num_features):
            return
        old = state.context_mask
        if old is None:
            length = state.cache.get_seq_length()
            old = torch.ones((batch_size, length), dtype=torch.bool, device=device)
            state.num_context = [length] * batch_size
        new = torch.arange(num_new, device=device) < on_device(num_features, device)[:, None]
        longest = max(state.num_context)
        state.num_context = [before + count for before, count in zip(state.num_context, num_features)]
        if old.shape[1] + num_new > 2 * max(state.num_context) + MOST_PADDING:
            old = state.cache.drop_padding(old, longest)
        state.context_mask = torch.cat((old, new), dim=1)


# The padded context is at most twice as long as its longest row, plus this.
MOST_PADDING = 64
