"""What processes that run one model together must agree on.

Under tensor parallelism the processes of a group decode the same sequences, so they must verify the same trees and
emit the same tokens: the first of them decides, as logits may differ in the last bit and random generators altogether.
Under FSDP each process decodes sequences of its own, but every forward needs all of them: one that has finished goes
on with forwards that change nothing until all have.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from ..interop.sharding import is_sharded_over_processes, tensor_parallel_group
from ..tree.draft_tree import DraftTree


class Processes:
    """The other processes that run the target's forwards with this one, if there are any.

    Args:
        model: The target.
        synced_gpus: Whether all processes run their forwards together; by default, if FSDP shards the target.
    """

    def __init__(self, model: PreTrainedModel, synced_gpus: bool | None = None) -> None:
        if synced_gpus is None:
            synced_gpus = is_sharded_over_processes(model)
        self._synced = synced_gpus and distributed.is_available() and distributed.is_initialized()
        self._group = tensor_parallel_group(model)
        self._device = model.device
        self._source = 0 if self._group is None else distributed.get_global_rank(self._group, 0)

    @property
    def is_one(self) -> bool:
        """Whether there are no others."""
        return not self._synced and self._group is None

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process that must run its forwards with this one's."""
        if not self._synced:
            return flag
        flags = torch.tensor(int(flag), device=self._device)
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
        return bool(flags)

    def most(self, number: int) -> int:
        """The largest of the numbers of all processes that must take the same steps as this one."""
        if self._synced or self._group is not None:
            numbers = torch.tensor(number, device=self._device)
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=None if self._synced else self._group)
            return int(numbers)
        return number

    def agree(self, values: Tensor) -> Tensor:
        """The values of the first process of the tensor parallel group, which decides for the others."""
        if self._group is not None:
            values = values.contiguous()
            distributed.broadcast(values, src=self._source, group=self._group)
        return values

    def agree_on_trees(self, trees: list[DraftTree]) -> list[DraftTree]:
        """The trees of the first process of the tensor parallel group."""
        if self._group is None:
            return trees
        parts = [[(tree.token_ids, tree.parents, tree.log_probs) for tree in trees]]
        distributed.broadcast_object_list(parts, src=self._source, group=self._group, device=self._device)
        return trees if distributed.get_rank() == self._source else [DraftTree(*tree) for tree in parts[0]]
