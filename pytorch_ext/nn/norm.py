"""Norms of split channels: each rank normalises its own channels (or groups of channels)."""

from typing import Any

import torch
from torch import nn

from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardHolder
from weft.sharding.shard import Shard


class ChannelNorm(ShardHolder):
    """One of torch's norms of this rank's channels, as a split convolution returns them. Nothing travels.

    Running statistics are this rank's shards, like weight and bias.

    `from_norm` makes it. In a plan it is {"style": "channels", "unit": ...} with the unit of the convolution before it.
    """

    kind: type[nn.Module]  # the whole layer's
    whole_features: int

    @classmethod
    def from_norm(cls, norm: Any, *, group: Group = None, unit: int | None = None) -> Any:
        """Return this rank's channels of an existing layer of torch.

        Args:
            unit: channels are cut at multiples of it. None is 1, or the channels of a group in nn.GroupNorm.

        Raises:
            ValueError: fewer units than ranks; a unit that cuts a group.
            TypeError: another layer.
        """
        if not isinstance(norm, cls.kind):
            kind = cls.kind.__name__.removeprefix("_")
            raise TypeError(f"{cls.__name__}.from_norm takes an nn.{kind}, got {type(norm).__name__}")
        channels, each = cls._sizes(norm)
        if (unit or each) % each:
            raise ValueError(f"{cls.__name__}: unit={unit} cuts a group of {each} channels: use a multiple of {each}")
        shard = Shard.of_shape((channels,), 0, communicator(group), unit or each)
        layer = cls._empty(norm, shard.size)
        layer.whole_features = channels
        layer.bias = None
        layer.shards |= dict.fromkeys(("weight", "bias", "running_mean", "running_var"), shard)
        layer.register_parts(norm)
        return layer.train(norm.training)

    @classmethod
    def _sizes(cls, norm: Any) -> tuple[int, int]:
        """Return the number of channels, and how many of them must stay together."""
        return norm.num_features, 1

    @classmethod
    def _empty(cls, norm: Any, size: int) -> Any:
        """Return a layer with the options of the norm, for so many channels."""
        return cls(size, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta")

    def _check_channels(self, x: torch.Tensor, dim: int, unit: str = "unit") -> None:
        local = self._sizes(self)[0]
        if not 0 <= dim < x.dim() or x.size(dim) != local:
            raise ValueError(
                f"{type(self).__name__}: the input has shape {tuple(x.shape)}; this rank has {local} of "
                f"{self.whole_features} channels. It stands behind a convolution whose filters are cut alike: give "
                f"both the same {unit}"
            )

    def reset_parameters(self) -> None:
        super(ShardHolder, self).reset_parameters()  # type: ignore[misc]  # all channels start alike

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.whole_features} channels"


class ChannelBatchNorm(ChannelNorm, nn.modules.batchnorm._BatchNorm):
    """nn.BatchNorm1d, 2d or 3d of this rank's channels, each with statistics of its own, taken over the batch.

    See ChannelNorm.
    """

    kind = nn.modules.batchnorm._BatchNorm

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._check_channels(input, 1)


class ChannelInstanceNorm(ChannelNorm, nn.modules.instancenorm._InstanceNorm):
    """nn.InstanceNorm1d, 2d or 3d of this rank's channels: see ChannelNorm."""

    kind = nn.modules.instancenorm._InstanceNorm
    unbatched_dims: int

    @classmethod
    def _empty(cls, norm: Any, size: int) -> Any:
        layer = super()._empty(norm, size)
        layer.unbatched_dims = norm._get_no_batch_dim()
        return layer

    def _get_no_batch_dim(self) -> int:
        return self.unbatched_dims

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._check_channels(input, input.dim() - self.unbatched_dims)


class ChannelGroupNorm(ChannelNorm, nn.GroupNorm):
    """nn.GroupNorm of this rank's channels, in whole groups: see ChannelNorm.

    In a plan it is {"style": "channels"}; the convolution before it must be cut at the same unit, a multiple of
    channels / groups.
    """

    kind = nn.GroupNorm

    @classmethod
    def _sizes(cls, norm: Any) -> tuple[int, int]:
        return norm.num_channels, norm.num_channels // norm.num_groups

    @classmethod
    def _empty(cls, norm: Any, size: int) -> Any:
        return cls(size // cls._sizes(norm)[1], size, norm.eps, norm.affine, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_channels(x, 1, f"unit={self._sizes(self)[1]}")
        return super().forward(x)
