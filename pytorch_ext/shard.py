"""How a parameter that lives on one rank knows its place in the whole one."""

from dataclasses import dataclass

import torch

from weft.comm.communicator import Communicator
from weft.split import split_sizes


@dataclass(frozen=True)
class Shard:
    """One rank's contiguous part of a whole tensor that is cut along one dimension.

    Attributes:
        global_shape: of the whole tensor.
        dim: the dimension that is cut.
        sizes: every rank's size along it, in rank order.
        communicator: the ranks that hold the parts.
    """

    global_shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    communicator: Communicator

    @classmethod
    def of_shape(cls, shape, dim: int, communicator: Communicator, unit: int = 1) -> "Shard":
        """The balanced cut; ValueError where there are fewer units than ranks."""
        return cls(tuple(shape), dim, tuple(split_sizes(shape[dim], communicator.world, unit)), communicator)

    @property
    def group(self):
        return self.communicator.group

    @property
    def size(self) -> int:
        return self.sizes[self.communicator.rank]

    @property
    def offset(self) -> int:
        return sum(self.sizes[: self.communicator.rank])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.global_shape[: self.dim], self.size, *self.global_shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole tensor, as a view."""
        return whole.narrow(self.dim, self.offset, self.size)

    def parameter(self, whole: torch.nn.Parameter) -> torch.nn.Parameter:
        """A parameter of its own memory that holds this rank's part and knows it."""
        part = self.take(whole.detach()).clone(memory_format=torch.contiguous_format)
        return self.mark(torch.nn.Parameter(part, requires_grad=whole.requires_grad))

    def mark(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        parameter._weft_shard = self  # type: ignore[attr-defined]
        return parameter


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Where a parameter stands in the whole one: global shape, dimension, offset, group; None for a whole one."""
    return getattr(parameter, "_weft_shard", None)
