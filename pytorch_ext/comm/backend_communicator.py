"""Communicator over any torch.distributed backend, built from calls that every backend has."""

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator, backends_of
from weft.comm.dtypes import AVERAGE, op_code
from weft.comm.fusion import Fusion


class BackendCommunicator(Communicator):
    """Communicator over any backend of torch.distributed; pads uneven shards and sums in the backend's order.

    An average is the backend's sum divided by W: backends have no average, or one that rounds in its own way.
    """

    @property
    def transport(self) -> str:
        return ", ".join(sorted(set(backends_of(self.group).values())))

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        if _is_average(op, x):
            (fusion or Fusion()).around(self.all_reduce_, x, self.world_size)
            return x
        if fusion is not None:
            fusion.around(lambda sent: self.all_reduce_(sent, op), x)
            return x
        if self.world_size == 1:
            return x
        whole = x.contiguous()
        dist.all_reduce(whole, op, group=self.group)
        return x if whole is x else x.copy_(whole)

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        whole = x.contiguous()
        dist.broadcast(whole, group=self.group, group_src=root)
        return x if whole is x else x.copy_(whole)

    def all_to_all_into(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = flat.new_empty(sum(output.numel() for output in outputs))
        sizes = [output.numel() for output in outputs]
        dist.all_to_all_single(received, flat, sizes, [part.numel() for part in parts], group=self.group)
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.view(-1).copy_(part)

    def all_gather_into(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        longest = max(part.numel() for part in parts)
        padded = _padded(x, longest)
        received = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(received, padded, group=self.group)
        for part, whole in zip(parts, received, strict=True):
            part.view(-1).copy_(whole[: part.numel()])

    def reduce_scatter_into(self, parts: list[torch.Tensor], output: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        if _is_average(op, output):
            self.reduce_scatter_into(parts, output)
            output.div_(self.world_size)
            return
        longest = max(part.numel() for part in parts)
        received = output.new_empty(longest)
        dist.reduce_scatter(received, [_padded(part, longest) for part in parts], op, group=self.group)
        output.view(-1).copy_(received[: output.numel()])


def _is_average(op, x: torch.Tensor) -> bool:
    return x.is_floating_point() and op_code(op) == AVERAGE


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    flat = x.reshape(-1)
    return flat if flat.numel() == length else torch.cat([flat, flat.new_zeros(length - flat.numel())])
