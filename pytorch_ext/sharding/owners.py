"""Owners: the ranks of a pipeline that hold a stage's parameter, as metadata of the parameter."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.sharding.sharded_grad import watch_gradient


@dataclass(frozen=True)
class Owners:
    """Ranks of a pipeline that hold a parameter: one, or several with equal copies (tied embeddings).

    Attributes:
        ranks: all ranks of the pipeline.
        holders: the ranks that hold the parameter, in order.
    """

    ranks: Communicator
    holders: tuple[int, ...]

    @property
    def counted_here(self) -> bool:
        """True on the first holder, which counts the parameter in sums over the model."""
        return self.ranks.rank == self.holders[0]


def owners_of(parameter: torch.Tensor) -> Owners | None:
    """Return the owners of a parameter; None if its model has no stages."""
    return metadata(parameter, "owners")


def mark(holders: Mapping[torch.nn.Parameter, set[int]], ranks: Communicator) -> None:
    """Set the owners of the parameters that this rank holds.

    Args:
        holders: parameter to the ranks that hold it.
        ranks: all ranks of the pipeline.
    """
    for parameter, places in holders.items():
        if ranks.rank in places:
            set_metadata(parameter, "owners", Owners(ranks, tuple(sorted(places))))
            watch_gradient(parameter)
