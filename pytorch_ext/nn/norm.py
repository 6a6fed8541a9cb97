"""Norms of split channels: each rank normalises its own channels (or groups of channels)."""

from typing import Any

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardHolder
from weft.sharding.shard import Shard


class ChannelBatchNorm2d(ShardHolder, nn.BatchNorm2d):
    """nn.BatchNorm2d of this rank's channels, as a split convolution returns them.

    Nothing travels: each channel has statistics of its own, taken over the batch. Running statistics are this rank's
    shards, like weight and bias.

    `from_norm` makes it. In a plan it is {"style": "channels", "unit": ...} with the unit of the convolution before it.
    """

    whole_features: int

    @classmethod
    def from_norm(cls, norm: nn.BatchNorm2d, *, group: Group = None, unit: int = 1) -> "ChannelBatchNorm2d":
        """Return this rank's channels of an existing nn.BatchNorm2d.

        Args:
            unit: channels are cut at multiples of it.

        Raises:
            ValueError: fewer units than ranks.
            TypeError: another layer.
        """
        if not isinstance(norm, nn.BatchNorm2d):
            raise TypeError(f"ChannelBatchNorm2d.from_norm takes an nn.BatchNorm2d, got {type(norm).__name__}")
        ranks = communicator(group)
        shard = _shard(norm.num_features, ranks, unit)
        layer: Any = cls(shard.size, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta")
        layer.whole_features = norm.num_features
        for name in ("weight", "bias", "running_mean", "running_var"):
            layer.adopt(name, getattr(norm, name), shard)
        layer.adopt("num_batches_tracked", norm.num_batches_tracked, None)
        return layer.train(norm.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_channels(self, x, self.num_features, self.whole_features, "unit")
        return super().forward(x)

    def reset_parameters(self) -> None:
        nn.BatchNorm2d.reset_parameters(self)  # all channels start alike

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


class ChannelGroupNorm(ShardHolder, nn.GroupNorm):
    """nn.GroupNorm of this rank's channels, in whole groups. Nothing travels.

    `from_norm` makes it. In a plan it is {"style": "channels"}; the convolution before it must be cut at the same unit,
    a multiple of channels / groups.
    """

    whole_features: int

    @classmethod
    def from_norm(cls, norm: nn.GroupNorm, *, group: Group = None, unit: int | None = None) -> "ChannelGroupNorm":
        """Return this rank's groups of an existing nn.GroupNorm.

        Args:
            unit: channels are cut at multiples of it; by default at multiples of a group's channels.

        Raises:
            ValueError: fewer units than ranks; a unit that cuts a group.
            TypeError: another layer.
        """
        if not isinstance(norm, nn.GroupNorm):
            raise TypeError(f"ChannelGroupNorm.from_norm takes an nn.GroupNorm, got {type(norm).__name__}")
        each = norm.num_channels // norm.num_groups
        if (unit or each) % each:
            raise ValueError(f"ChannelGroupNorm: unit={unit} cuts a group of {each} channels: use a multiple of {each}")
        ranks = communicator(group)
        shard = _shard(norm.num_channels, ranks, unit or each)
        layer: Any = cls(shard.size // each, shard.size, norm.eps, norm.affine, device="meta")
        layer.whole_features = norm.num_channels
        for name in ("weight", "bias"):
            layer.adopt(name, getattr(norm, name), shard)
        return layer.train(norm.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_channels(self, x, self.num_channels, self.whole_features, f"unit={self.num_channels // self.num_groups}")
        return super().forward(x)

    def reset_parameters(self) -> None:
        nn.GroupNorm.reset_parameters(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


def _shard(channels: int, ranks: Communicator, unit: int) -> Shard:
    return Shard.of_shape((channels,), 0, ranks, unit)


def _check_channels(layer: nn.Module, x: torch.Tensor, local: int, whole: int, unit: str) -> None:
    if x.dim() < 2 or x.size(1) != local:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(x.shape)}; this rank has {local} of {whole} channels. "
            f"It stands behind a convolution whose filters are cut alike: give both the same {unit}"
        )
