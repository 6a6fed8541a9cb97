"""2-D convolution with its filters, input channels or groups split over ranks.

These are the column and row splits of the linear layer (Shoeybi et al. 2019, section 3), with channels in the place of
features. Shards may be uneven everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.comm.communicator import Communicator
from weft.ops.mappings import gather, split, total, used_by_parts
from weft.sharding.sizes import Cut

CHANNELS = -3  # dimension of channels in [batch, channels, height, width], with or without the batch


@dataclass(frozen=True)
class Geometry:
    """Positions of the filters in the input.

    Attributes:
        stride, dilation: along height and width.
        padding: zero padding by F.conv2d: sizes, "same" or "valid".
        pads: padding before the convolution in another mode: left, right, top, bottom; None where the mode is "zeros".
        mode: mode of F.pad.
        groups: number of groups of this rank's channels.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    pads: Sequence[int] | None
    mode: str
    groups: int

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() not in (3, 4) or x.size(CHANNELS) != self.groups * weight.size(1):
            raise ValueError(
                f"conv2d: the input has shape {tuple(x.shape)}; it must be [batch, {self.groups * weight.size(1)}, "
                "height, width], or that without a batch: the channels of this rank's weight"
            )
        if self.pads is not None:
            x = F.pad(x, list(self.pads), self.mode)
            return F.conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def column_parallel_conv2d(x, weight, bias, ranks: Communicator, geometry: Geometry) -> torch.Tensor:
    """Compute the convolution with one rank's shard of the filters.

    Per rank:
        x [B, C, H, W] whole      w_shard [N_r, C, h, w]      b_shard [N_r]      y_shard [B, N_r, H', W']

    forward   y_shard = conv(x, w_shard) + b_shard
    dgrad     dx = all_reduce(conv_dgrad(dy_shard, w_shard))
    wgrad     from dy_shard and x; nothing travels
    """
    return geometry.apply(used_by_parts(x, ranks) if ranks.world_size > 1 else x, weight, bias)


def row_parallel_conv2d(x, weight, bias, ranks: Communicator, geometry: Geometry) -> torch.Tensor:
    """Compute the convolution with one rank's shard of the input channels.

    Per rank:
        x_shard [B, C_r, H, W]      w_shard [N, C_r, h, w]      b [N] whole      y [B, N, H', W'] whole

    forward   y = all_reduce(conv(x_shard, w_shard)) + b; b is added once
    dgrad     dx_shard = conv_dgrad(dy, w_shard); nothing travels
    wgrad     from dy and x_shard; nothing travels
    """
    if ranks.world_size == 1:
        return geometry.apply(x, weight, bias)
    return _biased(total(geometry.apply(x, weight, None), ranks), bias)


def column_parallel_grouped_conv2d(x, weight, bias, ranks: Communicator, geometry: Geometry, cut: Cut):
    """Compute one rank's shard of the groups; each group sees its own channels only.

    `cut` is the cut of the input's channels.

    forward   y_shard = conv(this rank's channels of x, w_shard) + b_shard
    dgrad     dx = all_gather(conv_dgrad(dy_shard, w_shard))
    """
    return geometry.apply(split(x, CHANNELS, ranks, cut), weight, bias)


def row_parallel_grouped_conv2d(x, weight, bias, ranks: Communicator, geometry: Geometry, cut: Cut):
    """Compute one rank's shard of the groups from the rank's own channels. No sum crosses ranks.

    `cut` is the cut of the output's channels.

    forward   y = all_gather(conv(x_shard, w_shard)) + b; b is added once
    dgrad     dx_shard = conv_dgrad(this rank's channels of dy, w_shard); nothing travels
    """
    if ranks.world_size == 1:
        return geometry.apply(x, weight, bias)
    return _biased(gather(geometry.apply(x, weight, None), CHANNELS, ranks, cut), bias)


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype).view(-1, 1, 1)
