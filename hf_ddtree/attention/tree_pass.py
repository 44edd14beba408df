"""One forward over a tree, as the layers see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..devices import on_device
from ..tree.tree_batch import TreeBatch
from .causal_conv import ancestor_windows
from .packed_mask import PackedMasks
from .path_state import PathFactors, TreePaths
from .query_scale import scale_correction


class TreePass:
    """One forward of a tree: what the stateful layers need, and what they leave for the commit.

    Args:
        tree_batch: The round's trees.
        num_before: `(batch,)`, for each row the entries in the cache in front of its root.
        open_masks: Those of the masks that the model is given under which every node sees all cached keys.
        wants_weights: Whether the weights of attention are asked for.

    Attributes:
        tree_batch: The round's trees.
        num_before: As given.
        wants_weights: As given.
        masks: The masks as tree attention takes them.
        num_attended: How many layers went through tree attention.
        path_factors: One entry per layer with a recurrence, in the order of the layers.
        conv_inputs: One entry per layer with a convolution, in the order of the layers: `(batch, channels,
            cached + n)`, its cached inputs followed by the nodes'.
        accepted: `(batch, n)` int64, the choice after each accepted node and -1 at all others, if the forward has
            committed the accepted paths.
    """

    def __init__(
        self,
        tree_batch: TreeBatch,
        num_before: list[int] | Tensor,
        open_masks: Sequence[Tensor] = (),
        wants_weights: bool = False,
    ) -> None:
        self.tree_batch = tree_batch
        self.num_before = num_before
        self.wants_weights = wants_weights
        self.masks = PackedMasks(tree_batch.num_nodes, open_masks)
        self.num_attended = 0
        self.path_factors: list[PathFactors] = []
        self.conv_inputs: list[Tensor] = []
        self.accepted: Tensor | None = None
        self._windows: dict[tuple[int, int, torch.device], Tensor] = {}
        self._paths: dict[torch.device, TreePaths] = {}
        self._scale_corrections: dict[tuple[float, float], Tensor | None] = {}
        self._activations: dict[str | None, nn.Module | None] = {None: None}

    def windows(self, kernel_size: int, num_cached: int, device: torch.device) -> Tensor:
        """`ancestor_windows`, made once for all layers that are alike."""
        key = kernel_size, num_cached, device
        if key not in self._windows:
            self._windows[key] = ancestor_windows(self.tree_batch, kernel_size, num_cached).to(device)
        return self._windows[key]

    def paths(self, device: torch.device) -> TreePaths:
        """The trees' paths on a layer's device, made once for all layers there."""
        if device not in self._paths:
            self._paths[device] = TreePaths.of(self.tree_batch.ancestor_mask.to(device))
        return self._paths[device]

    def activation(self, name: str | None) -> nn.Module | None:
        """An activation of Transformers' `ACT2FN`, which makes a new module whenever it is asked."""
        if name not in self._activations:
            self._activations[name] = ACT2FN[name]
        return self._activations[name]

    def scale_correction(self, attn_scale: float, floor_scale: float) -> Tensor | None:
        """`scale_correction`, made once for all layers that are alike."""
        key = attn_scale, floor_scale
        if key not in self._scale_corrections:
            num_before = on_device(self.num_before, self.tree_batch.depths.device)[:, None]
            self._scale_corrections[key] = scale_correction(num_before, self.tree_batch.depths, *key)
        return self._scale_corrections[key]
