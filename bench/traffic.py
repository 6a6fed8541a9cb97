"""The bytes that a rank's tensors bring to other ranks over the weft backend, counted where they are handed over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

import torch

from weft.comm.engine import Engine


@dataclass
class Sent:
    """What this process has sent so far."""

    bytes: int = 0


@contextmanager
def counted() -> Iterator[Sent]:
    """Counts what any group of this process sends meanwhile: of an all_reduce 2 (W-1)/W of the tensor, as a ring or a
    reduce_scatter and an all_gather would; of the others what reaches another rank."""
    sent, kept = Sent(), {name: getattr(Engine, name) for name in _COUNTS}
    for name, method in kept.items():
        setattr(Engine, name, _counting(method, _COUNTS[name], sent))
    try:
        yield sent
    finally:
        for name, method in kept.items():
            setattr(Engine, name, method)


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
