"""Dropout of split tensors: each rank draws its own random numbers, then all ranks draw the same ones again."""

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
        """Return the replacement of a dropout."""
        return cls(dropout.p, dropout.inplace, group=group).train(dropout.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return super().forward(x)  # type: ignore[misc]
        with own_random_numbers(self.communicator, x.device):
            return super().forward(x)  # type: ignore[misc]


class ShardedDropout(_OwnRandomNumbers, nn.Dropout):
    """nn.Dropout between a column and a row layer (of split features or heads), or in a sequence-parallel region.

    Here nn.Dropout itself would be wrong: it drops the same places of every rank's part, and after uneven parts the
    ranks draw different numbers for good. Elsewhere nn.Dropout is right: ranks with the same seed drop the same
    elements of a tensor that all of them have.
    """


class OwnDropout2d(_OwnRandomNumbers, nn.Dropout2d):
    """ShardedDropout that drops whole channels, for use between split convolutions."""
