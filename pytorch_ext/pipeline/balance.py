"""The grouping of layers into contiguous parts whose largest cost, in time or memory, is as small as possible."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from weft.forward.running import trial
from weft.sharding.shard import shard_of

ROUNDS = 3  # of timing; the fastest round counts


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes for a micro-batch on this rank.

    Attributes:
        seconds: of its forward.
        saved: bytes that its forward keeps for its backward, without parameters and buffers.
    """

    seconds: float
    saved: int


def balanced(costs: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] = lambda *_: True) -> list[int]:
    """Return the number of costs in each part, in sequence, at least one each.

    The largest sum of a part is as small as possible. Among such cuts, the sums up to each part are as equal as
    possible (least squares), from the front.

    Args:
        costs: for each part all costs as they are there: ranks may differ in speed.
        fits: (part, begin, end) -> whether this part can have these costs.

    Raises:
        ValueError: fewer costs than parts, or no cut fits.
    """
    n, parts = len(costs[0]), len(costs)
    if parts > n:
        raise ValueError(f"balanced: {n} layers cannot make {parts} parts")
    until = [[0.0, *accumulate(own)] for own in costs]
    # best[k]: (largest sum, sum of squares, sizes) of the first k costs in the parts so far
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(1, parts + 1):
        reached = {}
        for k in range(part, n - parts + part + 1):
            choices = (
                (max(largest, own), squares + own * own, [*sizes, k - before])
                for before, (largest, squares, sizes) in best.items()
                if before < k and fits(part - 1, before, k)
                for own in [until[part - 1][k] - until[part - 1][before]]
            )
            if found := min(choices, key=lambda choice: choice[:2], default=None):
                reached[k] = found
        best = reached
    if n not in best:
        raise ValueError("balanced: no cut fits")
    return best[n][2]


def placed(layers: Sequence[Sequence[torch.Tensor]], places: int) -> list[int]:
    """Return the place of each layer. The fullest place has as few bytes as possible.

    A layer that shares a parameter with an earlier layer goes to the same place. A shard counts as the whole parameter,
    so that ranks with uneven shards place layers alike.

    Args:
        layers: the parameters and buffers of each layer.
        places: number of places.

    Raises:
        ValueError: fewer layers than places, not counting layers that must go with another.
    """
    leader: list[int] = []
    users: dict[int, list[int]] = {}
    for number, tensors in enumerate(layers):
        sharing = {leader[user] for x in tensors for user in users.get(id(x), ())}
        leads = min(sharing, default=number)
        leader = [leads if other in sharing else other for other in leader]  # a layer may join groups
        leader.append(leads)
        for x in tensors:
            users.setdefault(id(x), []).append(number)
    cost = dict.fromkeys(leader, 0)
    distinct = {id(x): (x, number) for number, tensors in reversed([*enumerate(layers)]) for x in tensors}
    for x, number in distinct.values():
        shard = shard_of(x)
        cost[leader[number]] += prod(x.shape if shard is None else shard.global_shape) * x.element_size()
    leaders = list(cost)
    if len(leaders) < places:
        raise ValueError(
            f"LayerSplit: the model has {len(leaders)} layers that can stand alone, too few for {places} places: use "
            f"{len(leaders)} at most"
        )
    sizes = balanced([[cost[number] for number in leaders]] * places)
    place = dict(zip(leaders, (place for place, size in enumerate(sizes) for _ in range(size)), strict=True))
    return [place[leads] for leads in leader]


def measured(layer: nn.Module, forward: Callable, args: Sequence, named: dict) -> tuple[Any, float, int]:
    """Run a layer's forward as in training.

    Returns:
        Its result without a graph, the seconds, and the bytes kept for backward.
    """
    own = {x.untyped_storage()._cdata for x in [*layer.parameters(), *layer.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage

    args, named = tree_map_only(torch.Tensor, _from_a_layer, (tuple(args), named))
    _synchronize(args)
    start = time.perf_counter()
    with torch.enable_grad(), saved_tensors_hooks(keep, never_read):
        values = forward(*args, **named)
    _synchronize(args)
    seconds = time.perf_counter() - start
    return tree_map_only(torch.Tensor, torch.Tensor.detach, values), seconds, sum(x.nbytes() for x in kept.values())


def _from_a_layer(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a layer gives it: its gradient is wanted."""
    if isinstance(x, nn.Parameter) or not x.is_floating_point():
        return x
    with torch.enable_grad():
        return x.detach().requires_grad_().clone()


def never_read(_: None) -> NoReturn:
    """Raise, in the place of a hook that gives a tensor to a backward."""
    raise AssertionError("what is measured or tried has no backward")


def _synchronize(values) -> None:
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        torch.cuda.synchronize()


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Restore buffers (a norm's running means) and random numbers after the runs inside."""
    kept = [
        (part._buffers, name, buffer, buffer.clone())
        for module in modules
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        with trial(), torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, before in kept:
                buffers[name] = buffer.copy_(before)
