"""Communicator of a group of the weft backend: each call enters C++ once."""

import torch
import torch.distributed as dist

from weft.comm.backend import WeftProcessGroup
from weft.comm.communicator import Communicator
from weft.comm.dtypes import SUM, op_code
from weft.comm.engine import Engine
from weft.comm.fusion import Fusion
from weft.comm.multi_host import SpanningEngine


class EngineCommunicator(Communicator):
    """Communicator over the weft engine; sums in rank order in fp32 and rounds once."""

    def __init__(self, group: WeftProcessGroup):
        super().__init__(group)
        self._engine = group.engine

    @property
    def engine(self) -> Engine | SpanningEngine:
        return self._engine

    @property
    def transport(self) -> str:
        return "shared memory" if isinstance(self._engine, Engine) else "shared memory, and gloo between machines"

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        code = SUM if op is dist.ReduceOp.SUM else op_code(op)
        if fusion is not None:
            self._engine.all_reduce(x, code, fusion=fusion)
        elif self.world_size > 1:
            self._engine.all_reduce(x, code)
        return x

    def fuses_scale(self, x: torch.Tensor) -> bool:
        return True

    def barrier(self) -> None:
        self._engine.barrier()

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        self._engine.broadcast(x, root)
        return x

    def all_gather_into(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._engine.all_gather(x, parts)

    def reduce_scatter_into(self, parts: list[torch.Tensor], output: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        self._engine.reduce_scatter(parts, output, SUM if op is dist.ReduceOp.SUM else op_code(op))

    def all_to_all_into(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self._engine.all_to_all(parts, outputs)
