"""DiLoCo: many local steps, then one on the average (Douillard et al. 2023, arXiv:2311.08105, algorithm 1)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.data_parallel.buckets import shared_memory
from weft.data_parallel.module_state import broadcast
from weft.data_parallel.sharded_optimizer import piece_of
from weft.optim.layerwise import keep_types, wide


class DiLoCo(torch.optim.Optimizer):
    """Each rank steps its own copy of the model by its own batches; every `every` steps the ranks meet.

        delta = start - (sum over ranks of w) / W        start: the parameters when the ranks last met
        v = momentum * v + delta
        w = start - lr * (delta + momentum * v)          Nesterov; with nesterov=False, start - lr * v

    Ranks communicate once in `every` steps, through one bucket of symmetric memory. Do not reduce gradients over the
    same ranks: no DataParallel. Of 16-bit parameters `start` is kept in fp32, so that small steps add up. Buffers stay
    each rank's own. Schedules are for the inner optimizer. lr=1 and momentum=0 is averaging.

    Args:
        inner: steps the parameters locally; any torch.optim optimizer, with the state of each rank its own.
        group: the ranks that meet; None is the default group. Under tensor parallelism, mesh["dp"].
        every: local steps between two meetings; the paper's H.
        lr, momentum, nesterov: of the outer step; the defaults are the paper's.
        bucket_mb: MiB that travel at once.

    At construction the parameters become those of the first rank. `state_dict` has the inner optimizer's.

    Raises:
        ValueError: an option is out of its range; nothing to average, or pieces of a sharded optimizer.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        group: Group = None,
        every: int = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        bucket_mb: float = 25,
    ):
        if every < 1 or not lr >= 0 or not momentum >= 0 or not bucket_mb > 0:
            raise ValueError(
                f"DiLoCo: every={every} must be at least 1, lr={lr} and momentum={momentum} not negative, "
                f"bucket_mb={bucket_mb} more than 0"
            )
        self.inner = inner
        self.ranks: Communicator = communicator(group)
        parameters = _parameters_of(inner)
        outer = {"every": every, "lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": 0}
        super().__init__(parameters, outer)
        broadcast(parameters, self.ranks)
        with torch.no_grad():
            for parameter in parameters:
                self.state[parameter]["start"] = wide(parameter).clone()
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(wide(parameter.detach()))
        self._buckets = list(_cut(parameters, int(bucket_mb * (1 << 20))))
        largest_bytes = max(_bytes(bucket) for bucket in self._buckets)
        self._memory = shared_memory(largest_bytes, parameters[0].device, self.ranks)

    def step(self, closure: Callable | None = None) -> Any:
        """One local step; every `every` calls, also the outer one, which is a collective call."""
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        outer = self.param_groups[0]
        outer["steps"] += 1
        if outer["steps"] % outer["every"] == 0:
            self._meet(outer)
        return loss

    @torch.no_grad()
    def _meet(self, outer: dict) -> None:
        if len(_parameters_of(self.inner)) != len(outer["params"]):
            raise RuntimeError(
                "DiLoCo: the inner optimizer was given more parameters since, which would not be averaged: make DiLoCo "
                "when it has them all"
            )
        for bucket in self._buckets:
            flat = self._memory[: _bytes(bucket)].view(wide(bucket[0]).dtype)
            deltas = [
                part.view(one.shape)
                for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True)
            ]
            starts, momenta = ([self.state[one][key] for one in bucket] for key in ("start", "momentum_buffer"))
            for delta, start, parameter in zip(deltas, starts, bucket, strict=True):
                torch.sub(wide(start.to(parameter.dtype)), wide(parameter), out=delta)  # from where this rank set out
            self.ranks.all_reduce_(flat).div_(self.ranks.world_size)
            torch._foreach_mul_(momenta, outer["momentum"])
            torch._foreach_add_(momenta, deltas)
            if outer["nesterov"]:
                torch._foreach_add_(deltas, momenta, alpha=outer["momentum"])
            else:
                torch._foreach_copy_(deltas, momenta)
            for delta, start, parameter in zip(deltas, starts, bucket, strict=True):
                start.sub_(outer["lr"] * delta)
                parameter.copy_(start)

    def state_dict(self) -> dict:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        own = {key: value for key, value in state_dict.items() if key != "inner"}
        super().load_state_dict(own)
        keep_types(self, own)
        self.inner.load_state_dict(state_dict["inner"])


def _parameters_of(inner: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Raises ValueError for what cannot be averaged by itself."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if not parameters:
        raise ValueError("DiLoCo: the inner optimizer has no parameters, and there is nothing to average")
    if any(piece_of(parameter) is not None for parameter in parameters):
        raise ValueError(
            "DiLoCo: the inner optimizer steps pieces of a sharded one, and an average of these would not reach the "
            "ranks that have the others: make weft.DataParallel with shard_optimizer=False"
        )
    return parameters


def _cut(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Buckets of one type each, in order."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = by_dtype.setdefault(wide(parameter.detach()).dtype, [])
        bucket.append(parameter)
        if _bytes(bucket) >= bucket_bytes:
            yield by_dtype.pop(wide(parameter.detach()).dtype)
    yield from by_dtype.values()


def _bytes(bucket: list[nn.Parameter]) -> int:
    return sum(one.numel() * max(4, one.element_size()) for one in bucket)
