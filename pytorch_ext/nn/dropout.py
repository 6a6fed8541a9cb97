"""Dropout of what each rank has a part of: other random numbers on every rank, and the same ones again afterwards."""

import torch
from torch import nn

from weft.comm.registry import Group, communicator
from weft.rng import own_random_numbers


class _OwnRandomNumbers(nn.Module):
    def __init__(self, p: float = 0.5, inplace: bool = False, *, group: Group = None):
        super().__init__(p, inplace)  # type: ignore[call-arg]
        self.communicator = communicator(group)

    @classmethod
    def from_dropout(cls, dropout, *, group: Group = None):
        """What stands where a dropout stood."""
        return cls(dropout.p, dropout.inplace, group=group).train(dropout.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return super().forward(x)  # type: ignore[misc]
        with own_random_numbers(self.communicator, x.device):
            return super().forward(x)  # type: ignore[misc]


class ShardedDropout(_OwnRandomNumbers, nn.Dropout):
    """nn.Dropout between a column and a row layer (of split features or heads), or in a sequence-parallel region.

    Elsewhere nn.Dropout itself is right: ranks that are seeded alike drop the same elements of what they all have.
    Here it is not: it would drop the same places of every rank's part, and where parts are uneven the ranks would draw
    other numbers ever after.
    """


class OwnDropout2d(_OwnRandomNumbers, nn.Dropout2d):
    """ShardedDropout of whole channels, between split convolutions."""
