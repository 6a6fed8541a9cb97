"""Parameters with a copy on several ranks, because several stages use them (tied embeddings).

The backward of each rank gives the gradient of its own uses. After a step every holder sends its gradient to the others
and adds all of them in the order of ranks, in fp32, rounded once. The sum has the same bits on every holder, so copies
that start alike and take the same steps stay alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm.communicator import Communicator
from weft.comm.p2p import send_recv
from weft.sharding.sharded_grad import gradient_like, local


@dataclass
class Tie:
    """A parameter and the stages that use it, each with its rank; the number is the same on all ranks."""

    number: int
    parameter: nn.Parameter
    stages: dict[int, int]

    @property
    def holders(self) -> list[int]:
        return sorted(set(self.stages.values()))


class Ties:
    """This rank's ties, in the order of `users`, which is the same on every rank."""

    def __init__(self, users: dict[nn.Parameter, dict[int, int]], ranks: Communicator):
        self.ranks = ranks
        shared = [(parameter, stages) for parameter, stages in users.items() if len(set(stages.values())) > 1]
        self._number = len(shared)  # on all ranks
        self.ties = [
            Tie(number, parameter, stages)
            for number, (parameter, stages) in enumerate(shared)
            if ranks.rank in stages.values()
        ]

    @torch.no_grad()
    def align(self) -> None:
        """Set every copy to the copy of the first holder. Copies on the meta device follow once they have values."""
        for tie in self.ties:
            if not tie.parameter.is_meta:
                here = local(tie.parameter.detach())
                here.copy_(self._exchange(tie, here)[0])

    def renew(self, changed: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace parameters that have changed, on all holders alike."""
        replaced = [tie for tie in self.ties if tie.parameter in changed]
        for tie in replaced:
            tie.parameter = changed[tie.parameter]  # type: ignore[assignment]
        if replaced:
            self.align()

    @torch.no_grad()
    def sum(self) -> None:
        """Set .grad of every tied parameter to the sum over its holders. A collective call.

        A parameter that no holder used keeps no gradient, so that an optimizer passes over it.
        """
        if not self._number:
            return
        where = torch.device("cpu") if not self.ties else self.ties[0].parameter.device
        used = torch.zeros(self._number, dtype=torch.int32, device=self.ranks.device_of_numbers(where))
        used[[tie.number for tie in self.ties if tie.parameter.grad is not None]] = 1
        by_some = self.ranks.all_reduce_(used, dist.ReduceOp.MAX).tolist()
        for tie in self.ties:
            if not tie.parameter.requires_grad or not by_some[tie.number]:
                continue
            own = None if tie.parameter.grad is None else local(tie.parameter.grad)
            wide = torch.float64 if tie.parameter.dtype == torch.float64 else torch.float32
            parts = self._exchange(tie, torch.zeros_like(local(tie.parameter.detach())) if own is None else own)
            total = parts[0].to(wide)
            for part in parts[1:]:
                total = total + part
            summed = total.to(tie.parameter.dtype)
            if isinstance(tie.parameter, DTensor):
                summed = DTensor(summed, tie.parameter._spec, requires_grad=False)
            tie.parameter.grad = gradient_like(tie.parameter, summed)

    def parts_of_all(self, tie: Tie, own: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the gradients of all stages that use a parameter, by stage, from those of this rank's stages."""
        like, found = tie.parameter.detach(), {}
        of_rank = {rank: [stage for stage, holder in tie.stages.items() if holder == rank] for rank in tie.holders}
        for place in range(max(map(len, of_rank.values()))):
            mine = of_rank[self.ranks.rank][place:][:1]
            part = next((own[stage] for stage in mine if stage in own), None)
            where = self.ranks.device_of_numbers(like.device)
            used = self._exchange(tie, torch.tensor([part is not None], dtype=torch.int32, device=where))
            parts = self._exchange(tie, torch.zeros_like(like) if part is None else part)
            for rank, is_used, whole in zip(tie.holders, used, parts, strict=True):
                if is_used:
                    found[of_rank[rank][place]] = whole
        return found

    def _exchange(self, tie: Tie, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all holders, in the order of ranks."""
        own = own.contiguous()
        parts = [own if rank == self.ranks.rank else torch.empty_like(own) for rank in tie.holders]
        others = [(rank, part) for rank, part in zip(tie.holders, parts, strict=True) if rank != self.ranks.rank]
        sends = [(own, rank) for rank, _ in others]
        send_recv(self.ranks, sends, [(part, rank) for rank, part in others]).wait()
        return parts


def users_of(stages: Sequence[nn.Module], rank_of: Callable[[int], int]) -> dict[nn.Parameter, dict[int, int]]:
    """Return the stages that use each parameter, and their ranks. Stage s is on rank_of(s)."""
    users: dict[nn.Parameter, dict[int, int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            users.setdefault(parameter, {})[number] = rank_of(number)
    return users
