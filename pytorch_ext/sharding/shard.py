"""Shard: the place of one rank's parameter in the whole one, as metadata of the parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.sharding.quantized import check_groups, is_quantized, pick_quantized
from weft.sharding.sharded_grad import local, watch_gradient
from weft.sharding.sizes import Cut, Stretch, cut_over

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a whole tensor that is cut along one dimension, or along two.

    A part is usually one stretch of the dimension. It is several stretches if fused parts are each cut by themselves.
    Several ranks may have the same stretch (a KV head); the first of them counts and stores it.

    Attributes:
        global_shape: shape of the whole tensor.
        dim: the dimension that is cut.
        cut: the stretches that each rank has.
        communicator: the ranks that hold the parts.
        replicas: data-parallel ranks that hold this same part. Set only for experts over "ep"; None: all of them do.
        across: (dimension, cut) of a second cut, or None. Each rank has its stretches of both, and no other rank has
            the same.

    Examples:
        >>> weft.shard_of(weft.ParallelLinear(16, 64, style="row").weight).dim
        1
    """

    global_shape: tuple[int, ...]
    dim: int
    cut: Cut
    communicator: Communicator
    replicas: Communicator | None = None
    across: tuple[int, Cut] | None = None

    @classmethod
    def of_shape(
        cls,
        shape: Sequence[int],
        dim: int,
        communicator: Communicator,
        unit: int | Sequence[int] = 1,
        *,
        parts: Sequence[int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> "Shard":
        """Return the shard of a balanced cut (see `weft.sharding.sizes.cut_over`).

        Raises:
            ValueError: there are fewer units than ranks.
        """
        cut = cut_over(shape[dim], communicator.world_size, unit=unit, parts=parts, heads=heads)
        return cls(tuple(shape), dim, cut, communicator)

    @classmethod
    def on_one_rank(cls, shape: Sequence[int], rank: int, communicator: Communicator) -> "Shard":
        """Return the shard of a tensor that one rank has whole. The other ranks have no elements."""
        everything = ((0, shape[0]),)
        cut = Cut(tuple(everything if other == rank else () for other in range(communicator.world_size)))
        return cls(tuple(shape), 0, cut, communicator)

    @property
    def group(self):
        return self.communicator.group

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every rank's size along the dimension, in rank order."""
        return self.cut.sizes

    @property
    def size(self) -> int:
        return self.cut.sizes[self.communicator.rank]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """This rank's stretches, in the order of its part."""
        return self.cut.stretches[self.communicator.rank]

    @property
    def offset(self) -> int:
        """First index of this rank's part. ValueError if the part is several stretches."""
        if len(self.stretches) != 1:
            raise ValueError(f"the shard is {len(self.stretches)} stretches {self.stretches}, and has no one offset")
        return self.stretches[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_of(self.communicator.rank)

    @property
    def cuts(self) -> tuple[tuple[int, Cut], ...]:
        """Each dimension that is cut, with its cut."""
        return ((self.dim, self.cut),) if self.across is None else ((self.dim, self.cut), self.across)

    @property
    def replicated(self) -> bool:
        """True if several ranks of the communicator have the same stretch."""
        return self.across is None and self.cut.replicated

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        shape = list(self.global_shape)
        for dim, cut in self.cuts:
            shape[dim] = cut.sizes[rank]
        return tuple(shape)

    def take(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's part of the whole tensor, this one's by default: a view if it is one stretch, else a copy."""
        for dim, cut in self.cuts:
            whole = pick(whole, dim, cut.stretches[self.communicator.rank if rank is None else rank])
        return whole

    def counted(self, part: torch.Tensor) -> torch.Tensor:
        """Return the elements of this rank's part that no earlier rank has.

        Their sums, added over the ranks, are the sums over the whole tensor.
        """
        if not self.replicated:
            return part
        return pick(part, self.dim, self.cut.owned(self.communicator.rank))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from each rank's part. A collective call."""
        if self.across is not None:
            numbers = [prod(self.shape_of(rank)) for rank in range(self.communicator.world_size)]
            flat = self.communicator.all_gather(local(part).reshape(-1), 0, numbers)
            return self.join(flat.split(numbers))
        parts = self.communicator.all_gather(local(part), self.dim, self.sizes)
        return in_order_of_the_whole(parts, self.dim, self.cut)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the elements of each rank's part, in rank order."""
        whole = parts[0].new_empty(self.global_shape)
        for rank, of_rank in enumerate(parts):
            places = [[(dim, place) for place in cut.places(rank).items()] for dim, cut in self.cuts]
            for box in product(*places):
                target, source = whole, of_rank.view(self.shape_of(rank))
                for dim, ((begin, end), (start, stop)) in box:
                    target, source = target.narrow(dim, begin, end - begin), source.narrow(dim, start, stop - start)
                target.copy_(source)
        return whole

    def parameter(self, whole: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return a new parameter with a copy of this rank's part, marked as this shard."""
        if is_quantized(whole):  # every rank checks the cuts of all, so that all raise
            for dim, cut in self.cuts:
                places = (place for rank in range(len(cut.sizes)) for place in cut.places(rank).values())
                check_groups(whole, dim, (edge for place in places for edge in place))
        part = self.take(whole.detach())
        part = part.clone() if is_quantized(part) else part.clone(memory_format=_layout_of(whole))
        return self.mark(torch.nn.Parameter(part, requires_grad=whole.requires_grad))

    def mark(self, tensor: _Tensor) -> _Tensor:
        """Mark a parameter or a buffer as this shard and return it."""
        set_metadata(tensor, "shard", self)
        watch_gradient(tensor)
        return tensor


def split_over(tensor: torch.Tensor | None, ranks: Communicator) -> bool:
    """Return whether each of these ranks, which share a sequence, has a part of its own: experts over "ep"."""
    shard = None if tensor is None else shard_of(tensor)
    if shard is None or shard.replicas is None:
        return False
    return set(dist.get_process_group_ranks(ranks.group)) <= set(dist.get_process_group_ranks(shard.group))


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Return the place of a parameter in the whole one: global shape, dimension, offset, group.

    Returns:
        The Shard; None for a whole parameter.

    Examples:
        >>> layer = weft.ParallelLinear(16, 64, style="column")
        >>> weft.shard_of(layer.weight).global_shape
        (64, 16)
    """
    return metadata(parameter, "shard")


def pick(x: torch.Tensor, dim: int, stretches: Sequence[Stretch]) -> torch.Tensor:
    """Return the stretches of x along `dim`, one after another: a view if there is one stretch."""
    if is_quantized(x):
        return pick_quantized(x, dim, stretches)
    parts = [x.narrow(dim, start, stop - start) for start, stop in stretches or [(0, 0)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_order_of_the_whole(x: torch.Tensor, dim: int, cut: Cut) -> torch.Tensor:
    """Return the whole along `dim`, given the ranks' parts concatenated in rank order."""
    if cut.in_order:
        return x
    begins = [sum(cut.sizes[:rank]) for rank in range(len(cut.sizes))]
    places = []
    for stretch, rank in cut.owner.items():
        start, stop = cut.places(rank)[stretch]
        places.append((begins[rank] + start, begins[rank] + stop))
    return pick(x, dim, places)


def _layout_of(whole: torch.Tensor) -> torch.memory_format:
    """Return row-major, or channels last for convolution kernels that lie so."""
    last = whole.dim() == 4 and whole.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not whole.is_contiguous() else torch.contiguous_format
