"""What ranks do together succeeds on all of them, or raises the same error on all of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from weft.comm.registry import communicator
from weft.data_parallel.consensus import ranks_text

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or is not what was written, or is not of this model."""


class Alone:
    """One process without a process group, in the place of a Communicator where only these are used of it."""

    rank, world_size = 0, 1

    def all_gather_object(self, note: Any) -> list:
        return [note]


def ranks_of(group):
    """The communicator of the group; None is the default group where there is one, else this process alone."""
    return Alone() if group is None and not dist.is_initialized() else communicator(group)


def together(ranks, work: Callable[[], T]) -> list[T]:
    """What work() returned on each rank, in rank order. A collective call.

    Raises:
        ValueError, TypeError: work() raised it on some rank. CheckpointError: it raised anything else. With the same
            text on every rank. CommError: a rank was lost, of the ranks that wait.
    """
    value, failure, cause = None, None, None
    try:
        value = work()
    except Exception as error:
        expected = isinstance(error, ValueError | TypeError | CheckpointError)
        failure = (type(error), str(error)) if expected else (CheckpointError, f"{type(error).__name__}: {error}")
        cause = error
    told = ranks.all_gather_object((value, failure))
    by_text: dict[str, list[int]] = {}
    kinds = []
    for rank, (_, failed) in enumerate(told):
        if failed is not None:
            kinds.append(next(kind for kind in (TypeError, ValueError, CheckpointError) if issubclass(failed[0], kind)))
            by_text.setdefault(failed[1], []).append(rank)
    if not kinds:
        return [value for value, _ in told]
    lines = [f"{ranks_text(failed, len(told))}: {text}" for text, failed in by_text.items()]
    raise kinds[0](next(iter(by_text)) if ranks.world_size == 1 else "\n".join(lines)) from cause
