"""Parallel convolutions: nn.Conv1d, nn.Conv2d and nn.Conv3d with their channels split over ranks."""

from typing import Any

import torch
from torch import nn

from weft.arguments import check_choice
from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardHolder
from weft.ops.convolution import (
    Geometry,
    column_parallel_conv,
    column_parallel_grouped_conv,
    row_parallel_conv,
    row_parallel_grouped_conv,
)
from weft.ops.mappings import gather, split
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut, cut_over

_STYLES = ("column", "row", "channels")
_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode")


class ParallelConv(ShardHolder):
    """A convolution with its weight split over the ranks of a group: see ParallelConv2d."""

    kind: type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        style: str,
        group: Group = None,
        gather_output: bool = False,
        split_input: bool = False,
        unit: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_options(type(self).__name__, style, gather_output, split_input, groups)
        kind: Any = self.kind
        where = kernel_size, stride, padding, dilation, groups
        whole = kind(in_channels, out_channels, *where, bias, padding_mode, device, dtype)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, whole.kernel_size
        self.stride, self.padding, self.dilation = whole.stride, whole.padding, whole.dilation
        self.groups, self.padding_mode, self.style = groups, padding_mode, style
        self.gather_output, self.split_input = gather_output, split_input
        self.communicator = communicator(group)
        self._inputs, self._outputs = self._cuts(unit)
        pads = None if padding_mode == "zeros" else whole._reversed_padding_repeated_twice
        self._geometry = Geometry(self.stride, self.dilation, self.padding, pads, padding_mode, self._groups_here())
        by_filters = style != "row" or groups > 1
        dim, cut = (0, self._outputs) if by_filters else (1, self._inputs)
        self.shards["weight"] = Shard(tuple(whole.weight.shape), dim, cut, self.communicator)
        if style != "row":
            self.shards["bias"] = Shard((out_channels,), 0, self._outputs, self.communicator)
        self.register_parts(whole)

    @classmethod
    def from_conv(cls, conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, *, style: str, group: Group = None, **options: Any):
        """Return this rank's part of an existing layer of torch; options: gather_output, split_input, unit."""
        if not isinstance(conv, cls.kind):
            raise TypeError(f"{cls.__name__} takes an nn.{cls.kind.__name__}, got {type(conv).__name__}")
        same = {name: getattr(conv, name) for name in ("kernel_size", *_OPTIONS)} | {"bias": conv.bias is not None}
        return cls._part_of(conv, conv.in_channels, conv.out_channels, style=style, group=group, **same, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split_input:
            x = split(x, self._geometry.channels, self.communicator, self._inputs)
        y = self._op(x, self.weight, self.bias)
        return gather(y, self._geometry.channels, self.communicator, self._outputs) if self.gather_output else y

    def _op(self, x, weight, bias) -> torch.Tensor:
        where = self.communicator, self._geometry
        if self.style == "channels":
            return self._geometry.apply(x, weight, bias)
        if self.groups == 1:
            return (column_parallel_conv if self.style == "column" else row_parallel_conv)(x, weight, bias, *where)
        if self.style == "column":
            return column_parallel_grouped_conv(x, weight, bias, *where, self._inputs)
        return row_parallel_grouped_conv(x, weight, bias, *where, self._outputs)

    def _cuts(self, unit: int | None) -> tuple[Cut, Cut]:
        """Return the cuts of the input's and of the output's channels.

        Without groups only one of the two is split, and both cuts are the same.
        """
        split_outputs = self.style != "row"
        channels = self.out_channels if split_outputs else self.in_channels
        each = channels // self.groups
        unit = unit or (each if self.groups > 1 else 1)
        split_size = f"{'out' if split_outputs else 'in'}_channels={channels}"
        if self.groups > 1 and unit % each:
            raise ValueError(
                f"{type(self).__name__}(style={self.style!r}): unit={unit} cuts a group of {each} channels: "
                f"{split_size} in {self.groups} groups are cut at multiples of {each}"
            )
        try:
            sizes = cut_over(channels, self.communicator.world_size, unit=unit).sizes
        except ValueError as error:
            raise ValueError(
                f"{type(self).__name__}(style={self.style!r}): {split_size} in {self.groups} groups: {error} "
                "Or keep it whole."
            ) from None
        if self.groups == 1:
            cut = Cut.one_after_another(sizes)
            return cut, cut
        units = [size // each for size in sizes]
        ins, outs = (
            Cut.one_after_another([count * (n // self.groups) for count in units])
            for n in (self.in_channels, self.out_channels)
        )
        return ins, outs

    def _groups_here(self) -> int:
        if self.groups == 1:
            return 1
        return self._outputs.sizes[self.communicator.rank] // (self.out_channels // self.groups)

    def _draw_whole(self) -> nn.Module:
        same: dict[str, Any] = {name: getattr(self, name) for name in ("kernel_size", *_OPTIONS)}
        like: dict[str, Any] = {"bias": self.bias is not None, "device": self.weight.device, "dtype": self.weight.dtype}
        return self.kind(self.in_channels, self.out_channels, **same, **like)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}, "
            f"style={self.style!r}, rank {self.communicator.rank} of {self.communicator.world_size}, "
            f"weight {tuple(self.weight.shape)}"
        )


class ParallelConv1d(ParallelConv):
    """nn.Conv1d with its channels split over the ranks of a group: see ParallelConv2d.

    Example:
        >>> first = weft.ParallelConv1d(3, 8, 3, padding=1, style="column")
        >>> second = weft.ParallelConv1d(8, 4, 3, padding=1, style="row")
        >>> second(first(torch.randn(1, 3, 6)).relu()).shape
        torch.Size([1, 4, 6])
    """

    kind = nn.Conv1d


class ParallelConv2d(ParallelConv):
    """nn.Conv2d with its weight split over the ranks of a group.

    style="column" splits the filters: x is whole, the output is this rank's channels.
    style="row" splits the input channels: x is this rank's channels, the output is whole. A column layer followed by a
    row layer communicates once in forward and once in backward. Modules that work on each channel alone (activations,
    pooling, ChannelBatchNorm) may stand between them.
    style="channels" is for grouped (say, depthwise) convolutions between two such layers: x and the output are this
    rank's channels, and nothing travels.

    With groups, each rank gets whole groups. Its filters see its channels only, so a column layer's backward and a row
    layer's forward gather instead of summing.

    Sizes need not divide by the number of ranks. A layer built from a seed holds this rank's slice of the nn.Conv2d
    built from that seed. Sums over ranks run in rank order in fp32 (fp64 for fp64) and are rounded once.

    Args:
        in_channels, ..., padding_mode: of the whole layer, as in torch's.
        style: "column", "row" or "channels".
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        gather_output: column only; every rank gets the whole output.
        split_input: row only; x is whole and each rank takes its part.
        unit: the split channels are cut at multiples of it; with groups, a whole number of groups.
        device, dtype: of the parameters.

    Raises:
        ValueError: a style or combination that does not exist; fewer units (or groups) than ranks; a unit that cuts a
            group; style "channels" without groups. Raised before any communication.

    Examples:
        >>> first = weft.ParallelConv2d(3, 8, 3, padding=1, style="column")
        >>> second = weft.ParallelConv2d(8, 4, 3, padding=1, style="row")
        >>> second(first(torch.randn(1, 3, 6, 6)).relu()).shape
        torch.Size([1, 4, 6, 6])
    """

    kind = nn.Conv2d


class ParallelConv3d(ParallelConv):
    """nn.Conv3d with its channels split over the ranks of a group: see ParallelConv2d.

    Example:
        >>> first = weft.ParallelConv3d(3, 8, 3, padding=1, style="column")
        >>> second = weft.ParallelConv3d(8, 4, 3, padding=1, style="row")
        >>> second(first(torch.randn(1, 3, 6, 6, 6)).relu()).shape
        torch.Size([1, 4, 6, 6, 6])
    """

    kind = nn.Conv3d


def _check_options(name: str, style: str, gather_output: bool, split_input: bool, groups: int) -> None:
    check_choice(f"{name}: style", style, _STYLES)
    if gather_output and style != "column":
        raise ValueError(f'gather_output=True needs style="column", got style={style!r}')
    if split_input and style != "row":
        raise ValueError(f'split_input=True needs style="row", got style={style!r}')
    if style == "channels" and groups == 1:
        raise ValueError(
            f'{name}(style="channels"): without groups every filter sees every channel; use "column" or "row"'
        )
