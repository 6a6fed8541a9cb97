"""DiLoCo: many local steps, then an outer step on the average (Douillard et al. 2023, arXiv:2311.08105, alg. 1)."""

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
    """Optimizer of a separate model copy on each rank, with an outer step on their average every `every` steps.

        delta = start - (sum over ranks of w) / W        start: the parameters after the last outer step
        v = momentum * v + delta
        w = start - lr * (delta + momentum * v)          Nesterov; with nesterov=False, start - lr * v

    Each rank trains on its own batches. The W ranks communicate once in `every` steps, through one bucket of symmetric
    memory. Do not reduce gradients over the same ranks: use no DataParallel.

    `start` of a 16-bit parameter is kept in fp32, so that small steps add up. Buffers stay each rank's own. Attach
    learning-rate schedules to the inner optimizer. With lr=1 and momentum=0 the outer step is a plain average.

    At construction the parameters become those of the first rank. `state_dict` includes the inner optimizer's. The
    defaults of the outer step are the paper's.

    Args:
        inner: optimizer of the local steps, any of torch.optim's. Its state stays each rank's own.
        group: ranks that average; None is the default group. Under tensor parallelism, mesh["dp"].
        every: local steps between two outer steps; the paper's H.
        lr: rate of the outer step.
        momentum: momentum of the outer step.
        nesterov: use Nesterov momentum in the outer step.
        bucket_mb: MiB that are sent at once.

    Raises:
        ValueError: an option is out of its range; the inner optimizer has no parameters, or pieces of a sharded
            optimizer.

    Examples:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = weft.DiLoCo(torch.optim.AdamW(model.parameters()), every=2)
        >>> for _ in range(2):  # ranks meet in the second step
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     optimizer.step()
    """

    # GradScaler then calls `step` also after an overflow, which the ranks need: they meet in every `every`-th call.
    _step_supports_amp_scaling = True

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
        """Do a local step and, every `every` calls, the outer step, which is a collective call.

        Args:
            closure: passed on to the inner optimizer. After an overflow that torch.amp.GradScaler found the inner
                optimizer does no step, and the call counts all the same.

        Returns:
            Result of the inner optimizer's step(): the closure's loss, or None.

        Raises:
            RuntimeError: the inner optimizer got more parameters after construction; raised at the outer step.
        """
        loss = None
        if self._is_finite():
            loss = self.inner.step() if closure is None else self.inner.step(closure)
        outer = self.param_groups[0]
        outer["steps"] += 1
        if outer["steps"] % outer["every"] == 0:
            self._outer_step(outer)
        return loss

    @torch.no_grad()
    def _is_finite(self) -> bool:
        """Return whether a GradScaler, if there is one, found only finite gradients; take its scale from them."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            return False
        gradients = [x.grad for x in _parameters_of(self.inner) if x.grad is not None]
        if scale is not None and gradients:
            torch._foreach_mul_(gradients, float(1 / scale.double()))
        return True

    @torch.no_grad()
    def _outer_step(self, outer: dict) -> None:
        if len(_parameters_of(self.inner)) != len(outer["params"]):
            raise RuntimeError(
                "DiLoCo: the inner optimizer was given more parameters since DiLoCo was made, and they would not be "
                "averaged: make DiLoCo after the inner optimizer has all its parameters"
            )
        for bucket in self._buckets:
            flat = self._memory[: _bytes(bucket)].view(wide(bucket[0]).dtype)
            deltas = [
                part.view(parameter.shape)
                for parameter, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True)
            ]
            states = [self.state[parameter] for parameter in bucket]
            starts, momenta = ([state[key] for state in states] for key in ("start", "momentum_buffer"))
            for delta, start, parameter in zip(deltas, starts, bucket, strict=True):
                torch.sub(
                    wide(start.to(parameter.dtype)), wide(parameter), out=delta
                )  # local steps began at the rounded start
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
        """Return the state of the outer step and, under "inner", that of the inner optimizer."""
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of the outer step and that of the inner optimizer."""
        own = {key: value for key, value in state_dict.items() if key != "inner"}
        super().load_state_dict(own)
        keep_types(self, own)
        self.inner.load_state_dict(state_dict["inner"])


def _parameters_of(inner: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of the inner optimizer.

    Raises:
        ValueError: there are none, or they are pieces of a sharded optimizer.
    """
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if not parameters:
        raise ValueError("DiLoCo: the inner optimizer has no parameters, so there is nothing to average")
    if any(piece_of(parameter) is not None for parameter in parameters):
        raise ValueError(
            "DiLoCo: the inner optimizer steps pieces of a sharded one, and their average would not reach the ranks "
            "that have the other pieces: make weft.DataParallel with shard_optimizer=False"
        )
    return parameters


def _cut(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield buckets of parameters in order; the parameters of a bucket have the same type."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = by_dtype.setdefault(wide(parameter.detach()).dtype, [])
        bucket.append(parameter)
        if _bytes(bucket) >= bucket_bytes:
            yield by_dtype.pop(wide(parameter.detach()).dtype)
    yield from by_dtype.values()


def _bytes(bucket: list[nn.Parameter]) -> int:
    return sum(parameter.numel() * max(4, parameter.element_size()) for parameter in bucket)
