"""Uneven inputs: what a rank that has run out of them does while the others go on (torch's Join calls it)."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from weft.comm.communicator import Communicator
from weft.data_parallel.reducer import Reducer


class JoinedModel(Protocol):
    """What is asked of a DataParallel."""

    ranks: Communicator
    reducer: Reducer

    @property
    def join_device(self) -> torch.device: ...
    def share_buffers(self, root: int | None) -> None: ...
    def adopt(self, root: int) -> None: ...


class Shadow(JoinHook):
    """Takes part in each collective of the others' iterations, with gradients of zero."""

    def __init__(self, model: JoinedModel, divide_by_initial_world_size: bool):
        self._model, self._by_all = model, divide_by_initial_world_size

    def main_hook(self) -> None:
        told = tell(self._model, takes_part=False)
        self._model.share_buffers(told.root)
        if told.reduces:
            self._model.reducer.among = self._model.ranks.world_size if self._by_all else told.active
            self._model.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All end with the parameters of the last to run out, which has made every step."""
        self._model.reducer.among = self._model.ranks.world_size
        rank = torch.tensor([self._model.ranks.rank if is_last_joiner else -1], device=self._model.join_device)
        self._model.adopt(int(self._model.ranks.all_reduce_(rank, dist.ReduceOp.MAX)))


@dataclass(frozen=True)
class Told:
    """Of one iteration.

    Attributes:
        active: how many ranks still have inputs.
        reduces: they will reduce gradients in it.
        root: whose buffers all take: the last rank's that has inputs; None where buffers are not shared.
    """

    active: int
    reduces: bool
    root: int | None


def tell(model: JoinedModel, takes_part: bool, reduces: bool = False, shares: bool = False) -> Told:
    """What the ranks say at the start of a forward; those without inputs answer from `main_hook`."""
    ranks = model.ranks
    said = torch.zeros(ranks.world_size, 3, dtype=torch.int64, device=model.join_device)
    said[ranks.rank] = torch.tensor([takes_part, reduces, shares])
    active, reducing, sharing = ranks.all_reduce_(said).T.tolist()
    root = max(rank for rank, here in enumerate(active) if here) if any(sharing) else None
    return Told(sum(active), any(reducing), root)
