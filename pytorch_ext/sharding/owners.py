"""How a parameter of a stage knows which ranks of the pipeline hold it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata
from weft.sharding.sharded_grad import watch_gradient


@dataclass(frozen=True)
class Owners:
    """The ranks of a pipeline that hold a parameter: one, or several copies that are kept the same (tied embeddings).

    Attributes:
        ranks: all of the pipeline.
        holders: those of them that hold it, in order.
    """

    ranks: Communicator
    holders: tuple[int, ...]

    @property
    def counts(self) -> bool:
        """Whether it is this rank's to count where each parameter counts once."""
        return self.ranks.rank == self.holders[0]


def owners_of(parameter: torch.Tensor) -> Owners | None:
    """None for a parameter of a model that is in one piece."""
    return metadata(parameter, "owners")


def mark(holders: Mapping[torch.nn.Parameter, set[int]], ranks: Communicator) -> None:
    """Tells those parameters of which this rank is a holder."""
    for parameter, places in holders.items():
        if ranks.rank in places:
            set_metadata(parameter, "owners", Owners(ranks, tuple(sorted(places))))
            watch_gradient(parameter)
