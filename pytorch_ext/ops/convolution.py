"""Convolution with its filters, input channels or groups split over ranks.

These are the column and row splits of the linear layer (Shoeybi et al. 2019, section 3), with channels in the place of
features. They hold for 1, 2 and 3 dimensions of space. Shards may be uneven everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weft.comm.communicator import Communicator
from weft.ops.mappings import gather, split, total, used_by_parts
from weft.sharding.sizes import Cut

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Geometry:
    """Positions of the filters in the input.

    Attributes:
        stride, dilation: along each dimension of space.
        padding: zero padding by the convolution: sizes, "same" or "valid".
        pads: padding before the convolution in another mode, as F.pad takes it; None where the mode is "zeros".
        mode: mode of F.pad.
        groups: number of groups of this rank's channels.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    pads: Sequence[int] | None
    mode: str
    groups: int

    @property
    def space(self) -> int:
        """Number of dimensions of space."""
        return len(self.stride)

    @property
    def channels(self) -> int:
        """Dimension of channels in [batch, channels, *space], with or without the batch."""
        return -1 - self.space

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        space = self.space
        if x.dim() - space not in (1, 2) or x.size(self.channels) != self.groups * weight.size(1):
            places = ["length", "height, width", "depth, height, width"][space - 1]
            raise ValueError(
                f"conv{space}d: the input has shape {tuple(x.shape)}; it must be [batch, "
                f"{self.groups * weight.size(1)}, {places}], or that without a batch: the channels of this rank's "
                "weight"
            )
        padding: Any = self.padding
        if self.pads is not None:
            x, padding = F.pad(x, list(self.pads), self.mode), 0
        return _CONVOLUTIONS[space](x, weight, bias, self.stride, padding, self.dilation, self.groups)  # type: ignore[operator]


def column_parallel_conv(x, weight, bias, ranks: Communicator, geometry: Geometry) -> torch.Tensor:
    """Compute the convolution with one rank's shard of the filters.

    Per rank:
        x [B, C, *space] whole      w_shard [N_r, C, *kernel]      b_shard [N_r]      y_shard [B, N_r, *space']

    forward   y_shard = conv(x, w_shard) + b_shard
    dgrad     dx = all_reduce(conv_dgrad(dy_shard, w_shard))
    wgrad     from dy_shard and x; nothing travels
    """
    return geometry.apply(used_by_parts(x, ranks) if ranks.world_size > 1 else x, weight, bias)


def row_parallel_conv(x, weight, bias, ranks: Communicator, geometry: Geometry) -> torch.Tensor:
    """Compute the convolution with one rank's shard of the input channels.

    Per rank:
        x_shard [B, C_r, *space]      w_shard [N, C_r, *kernel]      b [N] whole      y [B, N, *space'] whole

    forward   y = all_reduce(conv(x_shard, w_shard)) + b; b is added once
    dgrad     dx_shard = conv_dgrad(dy, w_shard); nothing travels
    wgrad     from dy and x_shard; nothing travels
    """
    if ranks.world_size == 1:
        return geometry.apply(x, weight, bias)
    return _biased(total(geometry.apply(x, weight, None), ranks), bias, geometry)


def column_parallel_grouped_conv(x, weight, bias, ranks: Communicator, geometry: Geometry, cut: Cut):
    """Compute one rank's shard of the groups; each group sees its own channels only.

    `cut` is the cut of the input's channels.

    forward   y_shard = conv(this rank's channels of x, w_shard) + b_shard
    dgrad     dx = all_gather(conv_dgrad(dy_shard, w_shard))
    """
    return geometry.apply(split(x, geometry.channels, ranks, cut), weight, bias)


def row_parallel_grouped_conv(x, weight, bias, ranks: Communicator, geometry: Geometry, cut: Cut):
    """Compute one rank's shard of the groups from the rank's own channels. No sum crosses ranks.

    `cut` is the cut of the output's channels.

    forward   y = all_gather(conv(x_shard, w_shard)) + b; b is added once
    dgrad     dx_shard = conv_dgrad(this rank's channels of dy, w_shard); nothing travels
    """
    if ranks.world_size == 1:
        return geometry.apply(x, weight, bias)
    return _biased(gather(geometry.apply(x, weight, None), geometry.channels, ranks, cut), bias, geometry)


def _biased(y: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * geometry.space)
