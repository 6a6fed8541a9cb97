"""What data parallel ranks tell each other: at construction what they wrap, after each backward how it went.

Nothing is raised on one rank alone while others wait for it: a rank keeps what is wrong to itself until all ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft._C import CollectiveMismatchError
from weft.comm.communicator import Communicator
from weft.data_parallel.buckets import Slot


@dataclass(frozen=True)
class Wrapped:
    """What one rank tells of its module: why it cannot be wrapped, the trainable parameters in order, frozen ones and
    buffers, the options."""

    obstacle: str
    parameters: dict[str, str]
    others: dict[str, str]
    options: dict[str, str]


@dataclass(frozen=True)
class BackwardErrors:
    """What went wrong in one rank's backward."""

    unused: list[str]
    problems: list[str]


def check_same_module(
    ranks: Communicator,
    obstacle: str,
    parameters: dict[str, torch.nn.Parameter],
    others: dict[str, torch.Tensor],
    options: dict,
) -> None:
    """Raises on every rank: ValueError where one of them has an obstacle, CollectiveMismatchError where one wraps
    something else. A collective call."""
    if obstacle:
        parameters, others = {}, {}
    described = {name: _description(one, _order(one)) for name, one in parameters.items()}
    mine = Wrapped(
        obstacle,
        described,
        {name: _description(one) for name, one in others.items()},
        {name: str(value) for name, value in options.items()},
    )
    told: list[Wrapped] = ranks.all_gather_object(mine)
    obstacles = {rank: other.obstacle for rank, other in enumerate(told) if other.obstacle}
    if obstacles:
        text = next(iter(obstacles.values()))
        raise ValueError(f"DataParallel on {ranks_text(list(obstacles), len(told))}: {text}")
    for rank, other in enumerate(told):
        if difference := _difference(told[0], rank, other):
            raise CollectiveMismatchError(f'DataParallel on group "{ranks.name}": {difference}')


def _description(tensor: torch.Tensor, order: str = "") -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}{order} on {tensor.device.type}"


def _order(parameter: torch.Tensor) -> str:
    """Of its elements in memory, which is that of its gradient: sums are of what stands at the same place."""
    placed = torch.empty_like(parameter, device="meta")
    return "" if placed.is_contiguous() else f" with strides {placed.stride()}"


def _difference(first: Wrapped, rank: int, other: Wrapped) -> str:
    """How another rank differs from rank 0; "" where it does not."""
    for option, value in first.options.items():
        if other.options[option] != value:
            return f"rank 0 has {option}={value}, rank {rank} has {option}={other.options[option]}"
    for who, names, missing in ((rank, other.parameters, first.parameters), (0, first.parameters, other.parameters)):
        if more := [name for name in names if name not in missing]:
            lacks = 0 if who else rank
            return f"rank {who} has the parameter {more[0]!r} ({names[more[0]]}), which rank {lacks} does not train"
    for (name, what), (same, its) in zip(first.parameters.items(), other.parameters.items(), strict=True):
        if name != same:
            return f"the parameters are in another order: where rank 0 has {name!r}, rank {rank} has {same!r}"
        if what != its:
            return f"the parameter {name!r} is {what} on rank 0, {its} on rank {rank}"
    for name in first.others | other.others:
        what, its = (told.get(name, "not there") for told in (first.others, other.others))
        if what != its:
            return f"{name!r}, which is not trained, is {what} on rank 0, {its} on rank {rank}"
    return ""


def agreed_order(ranks: Communicator, arrived: Sequence[Slot]) -> list[Slot]:
    """Rank 0's order of these slots. A collective call; every rank must have the same set."""
    told: list[list[int]] = ranks.all_gather_object([slot.number for slot in arrived])
    by_number = {slot.number: slot for slot in arrived}
    for rank, numbers in enumerate(told):
        if sorted(numbers) != sorted(told[0]):
            differing = set(numbers) ^ set(told[0])
            names = [by_number[number].name if number in by_number else f"parameter {number}" for number in differing]
            raise CollectiveMismatchError(
                f'DataParallel on group "{ranks.name}": ranks 0 and {rank} do not train the same parameters: only one '
                f"of them trains {', '.join(names)}; freeze and unfreeze on every rank alike"
            )
    return [by_number[number] for number in told[0]]


class ErrorConsensus:
    """The end of each backward: whether any rank has met with trouble."""

    def __init__(self, ranks: Communicator, device: torch.device):
        on_host = ranks.engine is not None or device.type == "cpu"
        self._ranks = ranks.host if on_host else ranks
        self._troubled = torch.zeros(1, dtype=torch.int32, device="cpu" if on_host else device)

    def ask(self, troubled: bool) -> bool:
        self._troubled.fill_(troubled)
        return bool(self._ranks.all_reduce_(self._troubled, dist.ReduceOp.MAX))

    def explain(self, backward: int, trouble: BackwardErrors) -> str:
        """What every rank's trouble was, as one text, the same on every rank."""
        told: list[BackwardErrors] = self._ranks.all_gather_object(trouble)
        unused: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            for name in one.unused:
                unused.setdefault(name, []).append(rank)
        lines = [f"rank {rank}: {problem}" for rank, one in enumerate(told) for problem in one.problems]
        if unused:
            names = ", ".join(f"{name!r} on {ranks_text(ranks, len(told))}" for name, ranks in unused.items())
            lines.append(
                f"got no gradient: {names}. Freeze what is never trained (requires_grad_(False)), or pass "
                'unused_parameters="zero" to count such gradients as zeros'
            )
        return f"DataParallel, backward {backward}: " + "; ".join(lines)


def ranks_text(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return "every rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
