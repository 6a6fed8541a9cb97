"""The place of each layer by memory: contiguous runs, and layers that share a parameter together."""

from collections.abc import Sequence
from math import prod

import torch

from weft.pipeline.balance import balanced
from weft.sharding.shard import shard_of


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
