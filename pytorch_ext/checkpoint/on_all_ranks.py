"""Work that either succeeds on all ranks or raises the same error on all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from weft.comm.registry import communicator
from weft.data_parallel.consensus import ranks_text

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """Error for a checkpoint that cannot be written, was altered after the save, or belongs to another model."""


class Alone:
    """A process without a process group, with the part of a Communicator's interface that checkpoints use."""

    rank, world_size, global_ranks = 0, 1, (0,)

    def all_gather_object(self, value: Any) -> list:
        return [value]


def ranks_of(group):
    """Return the group's communicator. None is the default group, or this process alone if there is none."""
    return Alone() if group is None and not dist.is_initialized() else communicator(group)


def together(ranks, work: Callable[[], T]) -> list[T]:
    """Run work() on each rank and return the results of all, in rank order. A collective call.

    Args:
        ranks: result of `ranks_of`.
        work: a function without arguments; its result must be picklable.

    Raises:
        ValueError, TypeError: work() raised it on some rank.
        CheckpointError: work() raised anything else. These errors have the same text on every rank.
        CommError: a rank was lost.
    """
    value, failure, cause = None, None, None
    try:
        value = work()
    except Exception as error:
        if getattr(error, "raised_on", None) == ranks:  # a call inside of this one has raised on all of them
            raise
        expected = isinstance(error, ValueError | TypeError | CheckpointError)
        failure = (type(error), str(error)) if expected else (CheckpointError, f"{type(error).__name__}: {error}")
        cause = None if expected else error  # an expected one has said everything
    gathered = ranks.all_gather_object((value, failure))
    by_text: dict[str, list[int]] = {}
    kinds = []
    for rank, (_, failed) in zip(ranks.global_ranks, gathered, strict=True):
        if failed is not None:
            kinds.append(next(kind for kind in (TypeError, ValueError, CheckpointError) if issubclass(failed[0], kind)))
            by_text.setdefault(failed[1], []).append(rank)
    if not kinds:
        return [value for value, _ in gathered]
    lines = [f"{ranks_text(failed, len(gathered))}: {text}" for text, failed in by_text.items()]
    common: Any = kinds[0](next(iter(by_text)) if ranks.world_size == 1 else "\n".join(lines))
    common.raised_on = ranks
    raise common from cause
