"""Counter of the bytes that a rank sends to other ranks over the weft backend, at the engine's calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from unittest import mock

import torch

from weft import _C
from weft.comm.backend import WeftProcessGroup
from weft.comm.engine import Engine


@dataclass
class Sent:
    """Bytes that this process has sent."""

    bytes: int = 0


@contextmanager
def counted() -> Iterator[Sent]:
    """Count the bytes that all groups of this process send inside the context.

    An all_reduce counts as 2 (W-1)/W of the tensor, as a ring or a reduce_scatter and an all_gather send. The other
    collectives count the bytes that reach another rank.
    """
    sent = Sent()
    with ExitStack() as replaced:
        for name, count in _COUNTS.items():
            replaced.enter_context(mock.patch.object(Engine, name, _counting(getattr(Engine, name), count, sent)))
        for name, method in list(vars(WeftProcessGroup).items()):
            if isinstance(method, _C.FastMethod):  # it would pass the engine's methods by
                replaced.enter_context(mock.patch.object(WeftProcessGroup, name, method.__wrapped__))
        yield sent


def _counting(method: Callable, count: Callable[..., int], sent: Sent) -> Callable:
    @wraps(method)
    def wrapper(engine: Engine, *arguments, **options):
        sent.bytes += count(engine, *arguments)
        return method(engine, *arguments, **options)

    return wrapper


def _to_others(engine: Engine, parts: list[torch.Tensor], *_) -> int:
    return sum(x.nbytes for rank, x in enumerate(parts) if rank != engine.rank)


def _from_root(engine: Engine, x: torch.Tensor, root: int, *_) -> int:
    return x.nbytes * (engine.world_size - 1) if engine.rank == root else 0


_COUNTS: dict[str, Callable[..., int]] = {
    "all_reduce": lambda engine, x, *_: 2 * x.nbytes * (engine.world_size - 1) // engine.world_size,
    "all_gather": lambda engine, x, *_: x.nbytes * (engine.world_size - 1),
    "reduce_scatter": _to_others,
    "all_to_all": _to_others,
    "broadcast": _from_root,
    "send": lambda engine, x, *_: x.nbytes,
}
