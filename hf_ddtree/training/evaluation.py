"""How well a drafter drafts texts that are known: rounds of greedy decoding replayed without the target.

What the target writes greedily is known beforehand, so all blocks can be drafted at once. A round builds the tree at a
root, follows the text into it, and the next root comes after the last token that is found. The figures are those of
decoding the same texts; of texts that the target did not write, they are what it would be if it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..candidate_generators.dflash import DFlashTreeCandidateGenerator
from ..configuration import DDTreeConfig
from ..drafter_kinds import make_candidate_generator
from ..drafters.dflash import DFlashDraftModel
from ..tree.shape import TreeShape
from .anchors import labels_behind, possible_anchors
from .block_loss import BlockLoss
from .config import TrainingConfig
from .documents import Document, PackedDocuments, Rows
from .target_features import TargetFeatures

# Blocks of a forward.
BLOCKS = 64


@dataclass(frozen=True)
class Evaluation:
    """How well a drafter drafts some texts.

    Attributes:
        negative_log_likelihood: In nats a slot, over all slots of blocks at all roots.
        hit_rates: For each offset of a block from 1 on, how often the drafter's best token is right where all before
            it are.
        tokens_per_forward: By `"chain"` and `"tree:NODES"`, the tokens that a round of greedy decoding emits, on
            average over rounds.
        rounds: The number of rounds in each of these.
    """

    negative_log_likelihood: float
    hit_rates: list[float]
    tokens_per_forward: dict[str, float]
    rounds: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return asdict(self)


class Evaluator:
    """Replays the decoding of some texts.

    Args:
        target_model: The target.
        documents: The texts. What counts in them is decoded, but for the first such token, which the prefill gives.
        budgets: Nodes of the trees.
        length: Tokens of a row; longer documents are cut.
        features: For each document what `TargetFeatures` gives, if it is known, `(length, features)`.

    Raises:
        ValueError: If no document has a token to predict.
    """

    def __init__(
        self,
        target_model: PreTrainedModel,
        documents: Sequence[Document],
        budgets: Sequence[int] = (8, 16, 32, 64),
        length: int = 2048,
        features: Sequence[Tensor] | None = None,
    ) -> None:
        self._target = target_model
        self._budgets = tuple(budgets)
        self._features = features
        usable = [number for number, document in enumerate(documents) if document.is_counted[2:].any()]
        if not usable:
            raise ValueError(f"None of the {len(documents)} `documents` has a token to predict. Give longer texts.")
        lengths = {number: min(length, len(documents[number])) for number in usable}
        self._rows = {number: PackedDocuments([documents[number]], lengths[number]) for number in usable}
        if features is not None and max(map(len, self._rows.values())) > 1:
            raise ValueError(
                f"`features` are given, but a document is longer than `length`, {length}. Raise `length`."
            )

    @torch.no_grad()
    def __call__(self, drafter: DFlashDraftModel) -> Evaluation:
        """Replays the texts with a drafter.

        Args:
            drafter: The drafter.
        """
        was_training = drafter.training
        drafter.eval()
        depth = drafter.config.draft_length
        budgets = {"chain": depth, **{f"tree:{budget}": budget for budget in self._budgets}}
        generators = {name: self._generator(drafter, name, budget) for name, budget in budgets.items()}
        emitted, rounds = dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0)
        loss = BlockLoss(drafter, self._target, TrainingConfig(weights="uniform"))
        recorder = TargetFeatures(self._target, drafter.config.target_layer_ids)
        sums: Tensor | None = None
        try:
            for number, packed in self._rows.items():
                for place in range(len(packed)):
                    rows = packed.rows([place]).to(drafter.device)
                    given = None if self._features is None else self._features[number]
                    features = recorder(rows)[0] if given is None else given[None].to(drafter.device)
                    anchors = possible_anchors(rows)[0].nonzero()[:, 0]
                    hidden_states = []
                    for chunk in anchors.split(BLOCKS):
                        used = torch.ones_like(chunk[None], dtype=torch.bool)
                        drafted = loss.draft(rows, features, chunk[None])
                        statistics = loss.compare(drafted, rows, chunk[None], used)[1].packed()
                        sums = statistics if sums is None else sums + statistics
                        hidden_states.append(drafted[0])
                    states = torch.cat(hidden_states)
                    for name, generator in generators.items():
                        lengths = _replay(generator, budgets[name], rows, anchors, states)
                        emitted[name] += sum(lengths)
                        rounds[name] += len(lengths)
        finally:
            recorder.close()
            drafter.train(was_training)
        assert sums is not None
        _, nll, num_slots, *by_depth = sums.tolist()
        reached, right = by_depth[:depth], by_depth[depth:]
        return Evaluation(
            negative_log_likelihood=nll / max(num_slots, 1),
            hit_rates=[hits / max(count, 1) for hits, count in zip(right, reached)],
            tokens_per_forward={name: emitted[name] / max(rounds[name], 1) for name in budgets},
            rounds=rounds,
        )

    def _generator(self, drafter: DFlashDraftModel, name: str, budget: int) -> DFlashTreeCandidateGenerator:
        shape: TreeShape = "chain" if name == "chain" else "best_first"
        knobs = DDTreeConfig(tree_budget=budget, tree_shape=shape, calibrate=False)
        generator = make_candidate_generator(drafter, self._target, knobs)
        assert isinstance(generator, DFlashTreeCandidateGenerator)
        return generator


def _replay(
    generator: DFlashTreeCandidateGenerator, budget: int, rows: Rows, anchors: Tensor, hidden_states: Tensor
) -> list[int]:
    """The accepted lengths of the rounds over a row's text.

    Args:
        generator: Builds the trees.
        budget: Most drafted nodes.
        rows: One row.
        anchors: `(roots,)`, all that can be.
        hidden_states: `(roots, depth, hidden_size)`, of the blocks there.
    """
    depth = hidden_states.shape[1]
    everywhere = torch.ones_like(anchors[None], dtype=torch.bool)
    # A round emits a block and the target's own choice after it, and where less of the text is known it may be cut.
    _, labels, counts = labels_behind(rows, anchors[None], everywhere, depth + 1)
    is_root = (rows.is_counted[0, anchors] & counts[0].all(dim=-1)).tolist()
    lengths, next_root = [], 0
    for index, (place, truth) in enumerate(zip(anchors.tolist(), labels[0].tolist())):
        if place < next_root or not is_root[index]:
            continue
        root = rows.token_ids[0, place : place + 1]
        tree = generator.trees_of(hidden_states[index : index + 1], root, root.tolist(), budget)[0]
        node, accepted = 0, 0
        while accepted < depth and (child := tree.child_with_token(node, truth[accepted])) is not None:
            node, accepted = child, accepted + 1
        lengths.append(accepted + 1)
        next_root = place + accepted + 1
    return lengths
