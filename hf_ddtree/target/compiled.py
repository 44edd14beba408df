"""A target's forwards under `torch.compile`: over a tree as one graph, over roots alone in parts if it must be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput, logging

from ..attention.active_pass import traced
from ..attention.path_state import PathFactors
from ..attention.tree_pass import TreePass
from ..interop.generation import compiles_forward, default_compile_config
from ..interop.versions import CACHE_KEY
from ..tree.tree_batch import TreeBatch
from .commit_in_graph import GreedyCommit, commit_greedy

logger = logging.get_logger(__name__)
# What takes long to find out: models whose forward over a tree, or over roots alone, is not one graph; and those of
# which no part can be compiled.
_broken_over_trees: WeakSet[PreTrainedModel] = WeakSet()
_broken_over_roots: WeakSet[PreTrainedModel] = WeakSet()
_uncompilable: WeakSet[PreTrainedModel] = WeakSet()


class CompiledForward:
    """Runs a model's forward as `torch.compile` makes it: once for each shape, and again in later calls.

    Traced as one graph (`fullgraph`), as the tree cannot cross a graph break. Where the model has a break, forwards
    over trees run uncompiled, in later calls too. Those over roots alone, which call other kernels, are judged apart
    and compiled in parts, as in standard decoding.

    Args:
        model: The target.
        compile_config: How to compile; its `fullgraph` is not looked at.
    """

    def __init__(self, model: PreTrainedModel, compile_config: CompileConfig) -> None:
        self._model = model
        self._in_parts = replace(compile_config, fullgraph=False)
        self._compiled: Any = torch.compile(_forward, **compile_config.to_dict() | {"fullgraph": True})

    def __call__(
        self,
        model_inputs: dict[str, Any],
        tree_pass: TreePass | None,
        layer_ids: Sequence[int],
        greedy: GreedyCommit | None = None,
    ) -> tuple[ModelOutput, list[Tensor]] | None:
        """Runs it, if it is one graph.

        Args:
            model_inputs: What the model's forward takes.
            tree_pass: The forward over a tree, which gets what the stateful layers leave; None without a tree.
            layer_ids: Decoder layers that hooks of a `FeatureRecorder` are on.
            greedy: Commits what greedy search accepts in the same graph, and leaves it in `tree_pass.accepted`.

        Returns:
            The model's outputs, and those of the layers; None if nothing has run.
        """
        broken = _broken_over_roots if tree_pass is None else _broken_over_trees
        if self._model in broken or self._model in _uncompilable:
            return None
        # As a tensor: there is a graph for each value of a number.
        tree = (
            None if tree_pass is None else (tree_pass.tree_batch, torch.as_tensor(tree_pass.num_before, device="cpu"))
        )
        try:
            outputs, features, left = self._compiled(self._model, model_inputs, tuple(layer_ids), tree, greedy)
        except torch._dynamo.exc.TorchDynamoException as error:
            (_uncompilable if isinstance(error, torch._dynamo.exc.BackendCompilerFailed) else broken).add(self._model)
            runs = "in parts under" if tree_pass is None and self._model in broken else "without"
            which = "single tokens" if tree_pass is None else "trees"
            reason = str(error).strip().partition("\n")[0]
            name = type(self._model).__name__
            logger.warning(f"The forward of {name} over {which} runs {runs} `torch.compile`, which says: {reason}")
            return None
        if tree_pass is not None and left is not None:
            tree_pass.path_factors.extend(PathFactors(*factors) for factors in left.path_factors)
            tree_pass.conv_inputs.extend(left.conv_inputs)
            tree_pass.num_attended, tree_pass.accepted = left.num_attended, left.accepted
        return outputs, features

    def in_parts(self, tree_pass: TreePass | None) -> Callable[..., ModelOutput]:
        """What runs in place of a forward that is not one graph."""
        if tree_pass is not None or self._model in _uncompilable:
            return self._model
        compiled: Callable[..., ModelOutput] = self._model.get_compiled_call(self._in_parts)
        return compiled


class _Left(NamedTuple):
    """What the layers leave in a `TreePass`, as values of a graph, and what was accepted if it is committed."""

    path_factors: list[tuple[Tensor, Tensor, Tensor]]
    conv_inputs: list[Tensor]
    num_attended: int
    accepted: Tensor | None


def _forward(
    model: nn.Module,
    inputs: dict[str, Any],
    layer_ids: tuple[int, ...],
    tree: tuple[TreeBatch, Tensor] | None,
    greedy: GreedyCommit | None,
) -> tuple[ModelOutput, list[Tensor], _Left | None]:
    """What is compiled."""
    features: dict[int, Tensor] = {}
    tree_pass = None if tree is None else TreePass(*tree)
    traced.tree_pass, traced.features = tree_pass, features
    outputs = model(**inputs, return_dict=True)
    traced.tree_pass, traced.features = None, None
    of_layers = [features[layer_id] for layer_id in layer_ids]
    if tree_pass is None:
        return outputs, of_layers, None
    accepted = None if greedy is None else commit_greedy(inputs[CACHE_KEY], tree_pass, outputs.logits, greedy)
    factors = [(one.log_decay, one.left, one.right) for one in tree_pass.path_factors]
    return outputs, of_layers, _Left(factors, tree_pass.conv_inputs, tree_pass.num_attended, accepted)


def compiled_forward(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> CompiledForward | None:
    """The compiled forward where standard decoding would compile its own: by default, over static caches on a GPU."""
    if not compiles_forward(model, generation_config, model_kwargs):
        return None
    return CompiledForward(model, generation_config.compile_config or default_compile_config(model))


def num_graphs() -> int:
    """How many graphs were compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
