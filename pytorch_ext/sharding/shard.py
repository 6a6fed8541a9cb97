"""How a parameter that lives on one rank knows its place in the whole one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.sharding.sharded_grad import local, watch_gradient
from weft.sharding.sizes import Cut, Stretch, cut_over

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a whole tensor that is cut along one dimension.

    Most often one stretch of it. Several where fused parts are each cut by themselves; and ranks may have the same
    stretch (a KV head), which the first of them counts and stores.

    Attributes:
        global_shape: of the whole tensor.
        dim: the dimension that is cut.
        cut: which stretches of it each rank has.
        communicator: the ranks that hold the parts.
    """

    global_shape: tuple[int, ...]
    dim: int
    cut: Cut
    communicator: Communicator

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
        """The balanced cut (see `weft.split.cut_over`); ValueError where there are fewer units than ranks."""
        cut = cut_over(shape[dim], communicator.world_size, unit=unit, parts=parts, heads=heads)
        return cls(tuple(shape), dim, cut, communicator)

    @classmethod
    def on_one_rank(cls, shape: Sequence[int], rank: int, communicator: Communicator) -> "Shard":
        """All of it is that rank's, and the others have nothing."""
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
        """This rank's, in the order in which it has them."""
        return self.cut.stretches[self.communicator.rank]

    @property
    def offset(self) -> int:
        """Where this rank's part begins. ValueError where it is several stretches."""
        if len(self.stretches) != 1:
            raise ValueError(f"the shard is {len(self.stretches)} stretches {self.stretches}, and has no one offset")
        return self.stretches[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.global_shape[: self.dim], self.size, *self.global_shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor: a view of it where it is one stretch."""
        return pick(whole, self.dim, self.stretches)

    def counted(self, mine: torch.Tensor) -> torch.Tensor:
        """Of a tensor like this rank's part, what no rank before has as well. Sums over it, summed over the ranks, are
        sums over the whole."""
        if not self.cut.replicated:
            return mine
        return pick(mine, self.dim, self.cut.owned(self.communicator.rank))

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The whole, of tensors like each rank's part. A collective call."""
        parts = self.communicator.all_gather(local(mine), self.dim, self.sizes)
        return in_order_of_the_whole(parts, self.dim, self.cut)

    def parameter(self, whole: torch.nn.Parameter) -> torch.nn.Parameter:
        """A parameter of its own memory that holds this rank's part and knows it."""
        part = self.take(whole.detach()).clone(memory_format=_layout_of(whole))
        return self.mark(torch.nn.Parameter(part, requires_grad=whole.requires_grad))

    def mark(self, tensor: _Tensor) -> _Tensor:
        """The tensor, a parameter or a buffer, knows its place from now on."""
        set_metadata(tensor, "shard", self)
        watch_gradient(tensor)
        return tensor


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Where a parameter stands in the whole one: global shape, dimension, offset, group; None for a whole one."""
    return metadata(parameter, "shard")


def pick(x: torch.Tensor, dim: int, stretches: Sequence[Stretch]) -> torch.Tensor:
    """Stretches of x along `dim`, one after another: a view where there is one."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in stretches or [(0, 0)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_order_of_the_whole(x: torch.Tensor, dim: int, cut: Cut) -> torch.Tensor:
    """The whole along `dim`, from the ranks' parts one after another."""
    if cut.in_order:
        return x
    begins = [sum(cut.sizes[:rank]) for rank in range(len(cut.sizes))]
    places = []
    for stretch, rank in cut.owner.items():
        start, stop = cut.places(rank)[stretch]
        places.append((begins[rank] + start, begins[rank] + stop))
    return pick(x, dim, places)


def _layout_of(whole: torch.Tensor) -> torch.memory_format:
    """Row-major, but for the kernels of convolutions that lie channels last."""
    last = whole.dim() == 4 and whole.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not whole.is_contiguous() else torch.contiguous_format
