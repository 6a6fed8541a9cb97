"""Which layers go where by memory: contiguous runs; what shares a parameter with an earlier layer goes with that."""

from collections.abc import Sequence

import torch

from weft.stages.balance import balanced


def placed(layers: Sequence[Sequence[torch.Tensor]], places: int) -> list[int]:
    """The place of each layer, given by its parameters and buffers. The fullest place has as few bytes as it can.

    Raises:
        ValueError: fewer layers than places, not counting those that must go with another.
    """
    leader: list[int] = []
    first: dict[int, int] = {}
    cost: dict[int, int] = {}
    for number, tensors in enumerate(layers):
        leads = min((first[id(one)] for one in tensors if id(one) in first), default=number)
        leader.append(leads)
        fresh = {id(one): one for one in tensors if id(one) not in first}
        first |= dict.fromkeys(fresh, leads)
        cost[leads] = cost.get(leads, 0) + sum(one.numel() * one.element_size() for one in fresh.values())
    leaders = list(cost)
    if len(leaders) < places:
        raise ValueError(
            f"LayerSplit: the model has {len(leaders)} layers that can stand alone, too few for {places} places: use "
            f"{len(leaders)} at most"
        )
    sizes = balanced([cost[number] for number in leaders], places)
    place = dict(zip(leaders, (place for place, size in enumerate(sizes) for _ in range(size)), strict=True))
    return [place[leads] for leads in leader]
