"""A model with its cache: one forward over token trees, and the commit of one path of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import ModelOutput

from ..attention import active_pass
from ..attention.tree_pass import TreePass
from ..interop.attention_functions import TAKE_MASKS
from ..interop.models import attention_implementation
from ..interop.versions import CACHE_KEY
from ..tree.draft_tree import DraftTree
from ..tree.tree_batch import TreeBatch
from .cache_rows import CommittedRows
from .commit import commit
from .commit_in_graph import GreedyRows
from .committed_cache import CommittedCache
from .compiled import CompiledForward
from .features import FeatureRecorder
from .inputs import ForwardInputs
from .layers import num_attention_layers
from .past_recording import recording_past, set_past_recording, stateful_layers
from .static_cache import buffer_length, padded_size


@dataclass(frozen=True)
class Verification:
    """A forward over a round's trees: the outputs, and what the commit of their paths needs.

    Attributes:
        outputs: The model's outputs; `logits` are `(batch, n, vocab)`, what it predicts after each node.
        features: `(batch, n, features)` of the recorder's layers, None if it records none.
        tree_pass: What the layers left for the commit; None if the roots are committed already.
    """

    outputs: ModelOutput
    features: Tensor | None
    tree_pass: TreePass | None

    @property
    def logits(self) -> Tensor:
        """`(batch, n, vocab)`, what the model predicts after each node."""
        return self.outputs.logits

    @property
    def has_nan(self) -> bool:
        """Whether some node's logits are NaN. One of them tells: NaN in a hidden state spreads to all logits."""
        return bool(self.logits[..., 0].isnan().any())


class CachedModel:
    """A model whose cache holds the committed tokens of a batch.

    `dispatch.install` must have been called on the model, and rounds must run inside `recording_past`.

    Args:
        model: The target, or a drafter that runs on trees as a target does.
        model_kwargs: Keyword arguments of its forward as `generate()` keeps them after prefill, the cache included.
        rows: What the cache holds of each row.
        recorder: Records features for a drafter. By default none.
        forward: Runs instead of the model itself, where it can.
        keep_past: Whether the cache keeps all that `crop` needs, as its owner asked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        rows: CommittedRows,
        recorder: FeatureRecorder | None = None,
        forward: CompiledForward | None = None,
        keep_past: bool = False,
    ) -> None:
        self.model = model
        self.cache: DynamicCache | StaticCache = model_kwargs[CACHE_KEY]
        self.rows = rows
        self._model_kwargs = model_kwargs
        self._recorder = FeatureRecorder(model, ()) if recorder is None else recorder
        self._forward = forward
        self._keep_past = keep_past
        self._inputs = ForwardInputs(model, self.cache, rows, model_kwargs)
        config = model.config.get_text_config()
        self._implementation, self._num_attention_layers = (
            attention_implementation(config),
            num_attention_layers(config),
        )

    @property
    def committed(self) -> CommittedCache:
        """What the cache holds between rounds."""
        return CommittedCache(self.cache, self.rows)

    def recording_past(self) -> AbstractContextManager[None]:
        """Lets the cache's layers keep all that a round feeds them until the commit."""
        return recording_past(self.cache)

    def verify(self, trees: Sequence[DraftTree], greedy: GreedyRows | None = None) -> Verification:
        """Runs the model once over all nodes of one tree per row.

        Afterwards the cache holds every node after the committed tokens: call `commit` before anything else reads it.

        Args:
            trees: One per row. Their roots are the last emitted tokens, which the cache does not hold yet.
            greedy: If the forward is one graph, lets it commit what greedy search accepts of these rows. The tree pass
                then has what was accepted, and `commit` only counts it.

        Raises:
            RuntimeError: If a layer did not go through the tree operators that must.
            ValueError: If the model does not take positions.
        """
        is_static = buffer_length(self.cache) is not None
        least_nodes = padded_size(max(map(len, trees))) if is_static else 1
        tree_batch = TreeBatch.from_trees(trees, self.rows.device, least_nodes)
        mask, open_masks = self._inputs.masks(tree_batch)
        wants_weights = bool(self._model_kwargs.get("output_attentions"))
        tree_pass = TreePass(tree_batch, self.rows.lengths, open_masks, wants_weights)
        # Over a static cache Transformers makes a causal mask, for nothing, unless there is a mask already.
        masks = mask.values() if isinstance(mask, dict) else [mask]
        given = next(one for one in masks if one is not None) if is_static else None
        model_inputs = self._inputs.of(tree_batch, given) | {"attention_mask": mask}
        outputs, features = self._run(model_inputs, tree_pass, greedy)
        self._require_tree_operators(tree_pass)
        return Verification(outputs, features, tree_pass)

    def step(self, roots: Sequence[DraftTree]) -> Verification:
        """Runs the model on the roots alone, as standard decoding does, and commits them.

        Args:
            roots: Trees with nothing drafted, one per row; all rows have the same number of committed tokens.
        """
        tree_batch = TreeBatch.from_trees(roots, self.rows.device)
        cached_mask = self.rows.mask()
        if cached_mask is not None:
            cached_mask = nn.functional.pad(cached_mask.long(), (0, 1), value=1)
        model_inputs = self._inputs.of(tree_batch, cached_mask)
        with set_past_recording(self.cache, self._keep_past):
            outputs, features = self._run(model_inputs, tree_pass=None)
        self.rows.advance([1] * len(roots))
        return Verification(outputs, features, tree_pass=None)

    def commit(self, tree_pass: TreePass | None, paths: Sequence[Sequence[int]]) -> None:
        """Makes the cache what it would be had only each path's nodes been fed, in order.

        Args:
            tree_pass: Of the last `verify`; None after a `step`, which has committed its roots.
            paths: One per row, from the root on; empty for a row that stays as it is.
        """
        if tree_pass is not None and tree_pass.accepted is not None and any(paths):
            self.rows.advance(list(map(len, paths)))
        elif tree_pass is not None:
            commit(self.cache, tree_pass, paths, self.rows, self._keep_past)

    def discard(self, tree_pass: TreePass | None, num_rows: int) -> None:
        """Makes the cache what it was before the last `verify`.

        Args:
            tree_pass: Of that `verify`.
            num_rows: Rows of the batch.
        """
        self.commit(tree_pass, [[]] * num_rows)

    def _run(
        self, model_inputs: dict[str, Any], tree_pass: TreePass | None, greedy: GreedyRows | None = None
    ) -> tuple[ModelOutput, Tensor | None]:
        """The model's outputs and the features; `tree_pass` gets what its layers leave."""
        recorder = self._recorder
        ran = None
        if self._forward is not None:
            rows = None if greedy is None else greedy.on_device(self.rows)
            ran = self._forward(model_inputs, tree_pass, recorder.layer_ids, rows)
        if ran is not None:
            outputs, features = ran
            return outputs, recorder.join(features)
        forward = self.model if self._forward is None else self._forward.in_parts(tree_pass)
        with recorder.recording(), nullcontext() if tree_pass is None else active_pass.active(tree_pass):
            outputs = forward(**model_inputs, return_dict=True)
        return outputs, recorder.take()

    def _require_tree_operators(self, tree_pass: TreePass) -> None:
        implementation, num_layers = self._implementation, self._num_attention_layers
        if implementation not in TAKE_MASKS and tree_pass.num_attended != num_layers:
            raise RuntimeError(
                f"{type(self.model).__name__} has {num_layers} layers with attention, but {tree_pass.num_attended} of "
                f"them went through tree attention. attn_implementation={implementation!r} cannot mask a tree and "
                'would give wrong tokens. Load the model with attn_implementation="sdpa" or "eager".'
            )
        layers = stateful_layers(self.cache)
        recurrent = [layer for layer in layers if layer.recurrent_states[0] is not None]
        found = len(tree_pass.path_factors), len(tree_pass.conv_inputs)
        if found != (len(recurrent), len(layers)):
            raise RuntimeError(
                f"{type(self.model).__name__} has {len(layers)} layers with a convolution, {len(recurrent)} of them "
                f"with a recurrent state, but {found[0]} recurrences and {found[1]} convolutions of them went through "
                "the tree operators. Another kernel has taken their place, and it would give wrong tokens. Load the "
                "model without it (`use_kernels=False`), do not call `hf_ddtree.unregister()` meanwhile, or generate "
                "without `generation_strategy`."
            )
