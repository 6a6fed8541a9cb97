"""Agreement of data parallel ranks on the wrapped module at construction, and on errors after each backward.

No rank raises alone while others wait for it. A rank keeps its errors until all ranks exchange them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from weft._C import CollectiveMismatchError
from weft.comm.communicator import Communicator
from weft.data_parallel.buckets import Slot
from weft.sharding.bits import mark_of_bits
from weft.sharding.shard import shard_of


@dataclass(frozen=True)
class ModuleDescription:
    """Description of one rank's module, for comparison with those of other ranks.

    Attributes:
        obstacle: reason why the module cannot be wrapped; "" if it can.
        parameters: descriptions of the trainable parameters by name, in order.
        others: descriptions of frozen parameters and buffers by name.
        options: values of DataParallel's options by name.
    """

    obstacle: str
    parameters: dict[str, str]
    others: dict[str, str]
    options: dict[str, str]


@dataclass(frozen=True)
class BackwardErrors:
    """Errors of one rank's backward.

    Attributes:
        unused: names of parameters that got no gradient.
        problems: descriptions of all other errors.
    """

    unused: list[str]
    problems: list[str]


def check_same_module(
    ranks: Communicator,
    obstacle: str,
    parameters: dict[str, torch.nn.Parameter],
    others: dict[str, torch.Tensor],
    options: dict,
) -> None:
    """Check that all ranks wrap the same module with the same options. A collective call.

    Args:
        ranks: ranks that wrap the module.
        obstacle: reason why this rank's module cannot be wrapped; "" if it can.
        parameters: trainable parameters by name.
        others: frozen parameters and buffers by name.
        options: values of DataParallel's options by name.

    Raises:
        ValueError: some rank has an obstacle; raised on every rank.
        CollectiveMismatchError: some rank wraps another module or has other options; raised on every rank.
    """
    if obstacle:
        parameters, others = {}, {}
    local = ModuleDescription(
        obstacle,
        {name: _description(parameter, _order(parameter)) for name, parameter in parameters.items()},
        {name: _description(tensor) for name, tensor in others.items()},
        {name: str(value) for name, value in options.items()},
    )
    gathered: list[ModuleDescription] = ranks.all_gather_object(local)
    numbers = ranks.global_ranks
    obstacles = {rank: other.obstacle for rank, other in zip(numbers, gathered, strict=True) if other.obstacle}
    if obstacles:
        text = next(iter(obstacles.values()))
        raise ValueError(f"DataParallel on {ranks_text(list(obstacles), len(gathered))}: {text}")
    for rank, other in zip(numbers, gathered, strict=True):
        if difference := _difference(numbers[0], gathered[0], rank, other):
            raise CollectiveMismatchError(f'DataParallel on group "{ranks.name}": {difference}')


def _description(tensor: torch.Tensor, order: str = "") -> str:
    shard = shard_of(tensor)
    apart = shard is not None and shard.replicas is not None  # ranks may have unequal numbers of experts
    shape = shard.global_shape if apart else tuple(tensor.shape)  # type: ignore[union-attr]
    return f"{tensor.dtype} {shape}{'' if apart else order} on {tensor.device.type}"


def _order(parameter: torch.Tensor) -> str:
    """Return the strides of a parameter that is not row-major, as text, else "".

    The gradient has the same strides, and ranks sum elements at the same place in memory.
    """
    placed = torch.empty_like(parameter, device="meta")
    return "" if placed.is_contiguous() else f" with strides {placed.stride()}"


def _difference(lowest: int, first: ModuleDescription, rank: int, other: ModuleDescription) -> str:
    """Return a description of the first difference between the lowest rank and another; "" if there is none."""
    for option, value in first.options.items():
        if other.options[option] != value:
            return f"rank {lowest} has {option}={value}, rank {rank} has {option}={other.options[option]}"
    for trains, lacks, trained, missing in (
        (rank, lowest, other.parameters, first.parameters),
        (lowest, rank, first.parameters, other.parameters),
    ):
        if more := [name for name in trained if name not in missing]:
            return (
                f"rank {trains} has the parameter {more[0]!r} ({trained[more[0]]}), which rank {lacks} does not train"
            )
    for (name, text), (other_name, other_text) in zip(first.parameters.items(), other.parameters.items(), strict=True):
        if name != other_name:
            return (
                f"the parameters are in another order: where rank {lowest} has {name!r}, rank {rank} has {other_name!r}"
            )
        if text != other_text:
            return f"the parameter {name!r} is {text} on rank {lowest}, {other_text} on rank {rank}"
    for name in first.others | other.others:
        text, other_text = (tensors.get(name, "not there") for tensors in (first.others, other.others))
        if text != other_text:
            return f"{name!r}, which is not trained, is {text} on rank {lowest}, {other_text} on rank {rank}"
    return ""


def agreed_order(ranks: Communicator, arrived: Sequence[Slot]) -> list[Slot]:
    """Return the slots in rank 0's order. A collective call.

    Raises:
        CollectiveMismatchError: the ranks have different sets of slots.
    """
    orders: list[list[int]] = ranks.all_gather_object([slot.number for slot in arrived])
    by_number = {slot.number: slot for slot in arrived}
    for rank, numbers in zip(ranks.global_ranks, orders, strict=True):
        if sorted(numbers) != sorted(orders[0]):
            differing = set(numbers) ^ set(orders[0])
            names = [by_number[number].name if number in by_number else f"parameter {number}" for number in differing]
            raise CollectiveMismatchError(
                f'DataParallel on group "{ranks.name}": ranks {ranks.global_ranks[0]} and {rank} do not train the same '
                f"parameters: only one of them trains {', '.join(names)}; freeze and unfreeze on every rank alike"
            )
    return [by_number[number] for number in orders[0]]


def mark_of_batch(arguments: Any) -> list[int]:
    """Return the marks of the plain tensors among a call's arguments."""
    tensors = [x for x in tree_leaves(arguments) if type(x) is torch.Tensor and x.layout is torch.strided]
    return [int(mark_of_bits(x)) for x in tensors if not (x.is_meta or x.is_nested)]


def warn_of_same_batch(ranks: Communicator, mark: list[int]) -> None:
    """Warn if all ranks had the same batch, which trains as if there were one of them. A collective call."""
    marks = ranks.all_gather_object(mark)
    if mark and len(marks) > 1 and all(mark == other for other in marks):
        warnings.warn(
            f"ranks {', '.join(map(str, ranks.global_ranks))} got the same batch, and each must have its own part: a "
            'sampler takes num_replicas=mesh["dp"].size() and rank=mesh["dp"].get_local_rank()',
            stacklevel=2,
        )


class ErrorConsensus:
    """Exchange of errors between ranks at the end of each backward.

    A group of GPUs alone carries the exchange on the GPU. Its result is then read in the next forward, because the host
    would otherwise wait for the GPU in every step. The rank with the error raises it at once, and all ranks raise then.
    """

    def __init__(self, ranks: Communicator, device: torch.device):
        self._ranks = ranks
        self._failed = torch.zeros(1, dtype=torch.int32, device=ranks.device_of_numbers(device))
        self._read_later = self._failed.is_cuda
        self._later = torch.zeros(1, dtype=torch.int32, pin_memory=self._read_later)
        self._copied = torch.cuda.Event() if self._read_later else None

    def check(self, backward: int, errors: BackwardErrors) -> str:
        """Raise the errors of all ranks in this backward. A collective call.

        Returns:
            This rank's own errors where the result is read later; the caller raises them once it has made the
            collective calls that the other ranks still make. "" otherwise.

        Raises:
            RuntimeError: some rank has an error, and all ranks know.
        """
        failed = bool(errors.unused or errors.problems)
        self._failed.fill_((self._ranks.rank + 1) * failed)
        self._ranks.all_reduce_(self._failed, dist.ReduceOp.MAX)
        if not self._read_later:
            if self._failed:
                raise RuntimeError(self._text(backward, self._ranks.all_gather_object(errors)))
            return ""
        self._later.copy_(self._failed, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._failed.device))
        everyone = [BackwardErrors([], [])] * self._ranks.world_size
        everyone[self._ranks.rank] = errors
        return self._text(backward, everyone) if failed else ""

    def check_earlier(self, backward: int) -> None:
        """Raise, once and on every rank, that a rank had an error in the backward before, if it was not read then.

        Raises:
            RuntimeError: some rank had an error; its own message says which.
        """
        if not self._read_later:
            return
        if self._copied is not None:
            self._copied.synchronize()
        if self._later:
            rank = self._ranks.global_ranks[int(self._later) - 1]
            self._later.zero_()
            raise RuntimeError(f"DataParallel, backward {backward}: rank {rank} has an error, which its message names")

    def _text(self, backward: int, gathered: list[BackwardErrors]) -> str:
        """Return the errors of all ranks as one text."""
        unused: dict[str, list[int]] = {}
        by_rank = list(zip(self._ranks.global_ranks, gathered, strict=True))
        for rank, of_rank in by_rank:
            for name in of_rank.unused:
                unused.setdefault(name, []).append(rank)
        lines = [f"rank {rank}: {problem}" for rank, of_rank in by_rank for problem in of_rank.problems]
        if unused:
            names = ", ".join(f"{name!r} on {ranks_text(ranks, len(gathered))}" for name, ranks in unused.items())
            lines.append(
                f"got no gradient: {names}. Freeze parameters that are never trained (requires_grad_(False)), or pass "
                'unused_parameters="zero" to count such gradients as zeros'
            )
        return f"DataParallel, backward {backward}: " + "; ".join(lines)


def ranks_text(ranks: Sequence[int], world_size: int) -> str:
    """Return "every rank", "rank 1" or "ranks 0, 2" for a list of ranks out of `world_size`."""
    if len(ranks) == world_size:
        return "every rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
