"""Which layers go where by memory: contiguous runs; what shares a parameter with an earlier layer goes with that."""

from collections.abc import Sequence
from math import prod

import torch

from weft.pipeline.balance import balanced
from weft.sharding.shard import shard_of


def placed(layers: Sequence[Sequence[torch.Tensor]], places: int) -> list[int]:
    """The place of each layer, given by its parameters and buffers. The fullest place has as few bytes as it can.

    A shard counts as the whole, so that ranks with uneven shards place layers alike.

    Raises:
        ValueError: fewer layers than places, not counting those that must go with another.
    """
    leader: list[int] = []
    users: dict[int, list[int]] = {}
    for number, tensors in enumerate(layers):
        sharing = {leader[user] for one in tensors for user in users.get(id(one), ())}
        leads = min(sharing, default=number)
        leader = [leads if other in sharing else other for other in leader]  # it may join what stood apart
        leader.append(leads)
        for one in tensors:
            users.setdefault(id(one), []).append(number)
    cost = dict.fromkeys(leader, 0)
    distinct = {id(one): (one, number) for number, tensors in reversed([*enumerate(layers)]) for one in tensors}
    for one, number in distinct.values():
        shard = shard_of(one)
        cost[leader[number]] += prod(one.shape if shard is None else shard.global_shape) * one.element_size()
    leaders = list(cost)
    if len(leaders) < places:
        raise ValueError(
            f"LayerSplit: the model has {len(leaders)} layers that can stand alone, too few for {places} places: use "
            f"{len(leaders)} at most"
        )
    sizes = balanced([cost[number] for number in leaders], places)
    place = dict(zip(leaders, (place for place, size in enumerate(sizes) for _ in range(size)), strict=True))
    return [place[leads] for leads in leader]
