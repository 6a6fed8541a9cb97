"""Norms of split channels: each rank normalises its own channels (or groups of channels)."""

from typing import Any

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardHolder
from weft.sharding.shard import Shard


class ChannelBatchNorm(ShardHolder, nn.modules.batchnorm._BatchNorm):
    """nn.BatchNorm1d, 2d or 3d of this rank's channels, as a split convolution returns them.

    Nothing travels: each channel has statistics of its own, taken over the batch. Running statistics are this rank's
    shards, like weight and bias.

    `from_norm` makes it. In a plan it is {"style": "channels", "unit": ...} with the unit of the convolution before it.
    """

    whole_features: int

    @classmethod
    def from_norm(cls, norm: nn.modules.batchnorm._BatchNorm, *, group: Group = None, unit: int = 1):
        """Return this rank's channels of an existing layer of torch.

        Args:
            unit: channels are cut at multiples of it.

        Raises:
            ValueError: fewer units than ranks.
            TypeError: another layer.
        """
        return _of_channels(cls, norm, nn.modules.batchnorm._BatchNorm, group, unit)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        _check_channels(self, input, 1, self.num_features, self.whole_features, "unit")

    def reset_parameters(self) -> None:
        nn.modules.batchnorm._BatchNorm.reset_parameters(self)  # all channels start alike

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


class ChannelInstanceNorm(ShardHolder, nn.modules.instancenorm._InstanceNorm):
    """nn.InstanceNorm1d, 2d or 3d of this rank's channels. Nothing travels: each channel is normalised alone.

    `from_norm` makes it. In a plan it is {"style": "channels", "unit": ...} with the unit of the convolution before it.
    """

    whole_features: int
    unbatched_dims: int

    @classmethod
    def from_norm(cls, norm: nn.modules.instancenorm._InstanceNorm, *, group: Group = None, unit: int = 1):
        """Return this rank's channels of an existing layer of torch.

        Args:
            unit: channels are cut at multiples of it.

        Raises:
            ValueError: fewer units than ranks.
            TypeError: another layer.
        """
        layer = _of_channels(cls, norm, nn.modules.instancenorm._InstanceNorm, group, unit)
        layer.unbatched_dims = norm._get_no_batch_dim()
        return layer

    def _get_no_batch_dim(self) -> int:
        return self.unbatched_dims

    def _check_input_dim(self, input: torch.Tensor) -> None:
        channels = input.dim() - self.unbatched_dims
        _check_channels(self, input, channels, self.num_features, self.whole_features, "unit")

    def reset_parameters(self) -> None:
        nn.modules.instancenorm._InstanceNorm.reset_parameters(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


def _of_channels(cls, norm: Any, kind: type, group: Group, unit: int) -> Any:
    """Return this rank's channels of a norm that treats each channel alone."""
    whole: Any = norm
    if not isinstance(norm, kind):
        raise TypeError(f"{cls.__name__}.from_norm takes an nn.{kind.__name__[1:]}, got {type(norm).__name__}")
    shard = _shard(whole.num_features, communicator(group), unit)
    layer: Any = cls(shard.size, whole.eps, whole.momentum, whole.affine, whole.track_running_stats, device="meta")
    layer.whole_features = whole.num_features
    layer.bias = None
    for name in ("weight", "bias", "running_mean", "running_var"):
        layer.adopt(name, getattr(whole, name), shard)
    layer.adopt("num_batches_tracked", whole.num_batches_tracked, None)
    return layer.train(whole.training)


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
        _check_channels(
            self, x, 1, self.num_channels, self.whole_features, f"unit={self.num_channels // self.num_groups}"
        )
        return super().forward(x)

    def reset_parameters(self) -> None:
        nn.GroupNorm.reset_parameters(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


def _shard(channels: int, ranks: Communicator, unit: int) -> Shard:
    return Shard.of_shape((channels,), 0, ranks, unit)


def _check_channels(layer: nn.Module, x: torch.Tensor, dim: int, local: int, whole: int, unit: str) -> None:
    if not 0 <= dim < x.dim() or x.size(dim) != local:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(x.shape)}; this rank has {local} of {whole} channels. "
            f"It stands behind a convolution whose filters are cut alike: give both the same {unit}"
        )
