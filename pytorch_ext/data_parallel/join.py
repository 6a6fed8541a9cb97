"""Uneven inputs: the part of a rank without inputs in the iterations of the others (called by torch's Join)."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from weft.comm.communicator import Communicator
from weft.data_parallel.reducer import Reducer


class JoinedModel(Protocol):
    """The interface of DataParallel that this module uses."""

    ranks: Communicator
    reducer: Reducer

    @property
    def join_device(self) -> torch.device: ...
    def share_buffers(self, root: int | None) -> None: ...
    def adopt(self, root: int) -> None: ...


class Shadow(JoinHook):
    """Join hook of a rank without inputs: it takes part in each collective of the others, with gradients of zero."""

    def __init__(self, model: JoinedModel, divide_by_initial_world_size: bool):
        self._model, self._by_all = model, divide_by_initial_world_size

    def main_hook(self) -> None:
        """Take part in one iteration of the ranks that have inputs."""
        iteration = agree_on_iteration(self._model, has_inputs=False)
        self._model.share_buffers(iteration.root)
        if iteration.reduces:
            self._model.reducer.among = self._model.ranks.world_size if self._by_all else iteration.active
            self._model.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the parameters of the last rank to run out, which has made every step, to all ranks."""
        self._model.reducer.among = self._model.ranks.world_size
        rank = torch.tensor([self._model.ranks.rank if is_last_joiner else -1], device=self._model.join_device)
        self._model.adopt(int(self._model.ranks.all_reduce_(rank, dist.ReduceOp.MAX)))


@dataclass(frozen=True)
class Iteration:
    """State of one iteration, the same on all ranks.

    Attributes:
        active: number of ranks that still have inputs.
        reduces: the iteration reduces gradients.
        root: rank that broadcasts its buffers, the last one with inputs; None if buffers are not shared.
    """

    active: int
    reduces: bool
    root: int | None


def agree_on_iteration(model: JoinedModel, has_inputs: bool, reduces: bool = False, shares: bool = False) -> Iteration:
    """Exchange flags between all ranks at the start of a forward; ranks without inputs call it from `main_hook`.

    Args:
        model: the wrapper on this rank.
        has_inputs: this rank still has inputs.
        reduces: this rank's forward leads to a reduction of gradients.
        shares: this rank expects a broadcast of buffers.

    Returns:
        The state of the iteration, the same on all ranks.
    """
    ranks = model.ranks
    flags = torch.zeros(ranks.world_size, 3, dtype=torch.int64, device=model.join_device)
    flags[ranks.rank] = torch.tensor([has_inputs, reduces, shares])
    active, reducing, sharing = ranks.all_reduce_(flags).T.tolist()
    root = max(rank for rank, here in enumerate(active) if here) if any(sharing) else None
    return Iteration(sum(active), any(reducing), root)
