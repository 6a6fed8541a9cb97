"""ParallelLinear: nn.Linear with its weight split over ranks."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from weft.arguments import check_choice
from weft.comm.registry import Group, communicator
from weft.nn.sharded import ShardedModule
from weft.ops import ParallelContext, column_parallel_linear, gather, row_parallel_linear, split
from weft.ops.activation import activation_of
from weft.ops.invariant import Units, activation_in_any_shape
from weft.ops.overlap.products import MODES
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut, cut_over

_SPLIT_DIM = {"column": 0, "row": 1}  # of the weight, [out_features, in_features]


class ParallelLinear(ShardedModule):
    """activation(x @ weight.T + bias), with the weight split over the ranks of a group (Shoeybi et al. 2019).

    style="column" splits the output features: x is whole, the output is this rank's [..., out_features_r].
    style="row" splits the input features: x is this rank's [..., in_features_r], the output is whole. A column layer
    followed by a row layer communicates once in forward and once in backward.

    Sizes need not divide by the number of ranks. A layer built from a seed holds this rank's slice of the nn.Linear
    built from that seed.

    If the weight has an attribute `main_grad` (fp32, of the weight's shape), backward adds the gradient to that in
    fp32. The weight's `.grad` then stays None.

    Args:
        in_features, out_features: features of the whole layer.
        bias: whether the layer has a bias. A column layer splits it like the output; a row layer holds it whole and
            adds it once.
        style: "column" or "row".
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        gather_output: column only; every rank gets the whole output.
        split_input: row only; x is whole and each rank takes its part.
        sequence_parallel: split the sequence between layers (Korthikanti et al. 2022). A column layer takes x split
            along sequence_dim and gathers it; a row layer returns its output split along it. A module between a row
            layer and the next column layer (a norm, say) sees this rank's tokens only, so its parameters' gradients
            must be summed over the ranks: name it "sequence" in the plan of `weft.parallelize`, or call
            `weft.nn.sum_gradients(module, group)`.
        sequence_dim: the dimension of x that is the sequence.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".
        unit: the split features are cut at multiples of it (of a head's size, say). With `parts` it may be a sequence
            of one unit for each part.
        parts: sizes of the parts that lie one after another in the split features; each part is cut by itself. A fused
            projection of queries, keys and values has three. This rank's features are its share of each part, in that
            order; gather_output and split_input use the order of the whole.
        heads: (query heads, KV heads), for the projections around an attention with fewer KV heads; `unit` is then the
            size of a head. The features (or each of the parts) are the queries, the keys or the values of all heads;
            their size says which. Each rank has the KV heads that its query heads use, as many as divide them. Where
            ranks outnumber KV heads, several ranks hold the same KV head and its gradients are summed over them.
        overlap: whether communication and products run at the same time. "auto" overlaps where that is faster
            (`weft.explain` says where), "never" does not, and "always" raises where overlap is impossible.
        invariant: a number of units, which the number of ranks must divide. Outputs and gradients then have the same
            bits on any such number of ranks, one included. In fp32, bf16 and fp16.
        device, dtype: of the parameters.

    Raises:
        ValueError: a style, activation or combination that does not exist; features that are no such units; fewer units
            than ranks; parts or heads that do not match the features; a group without this rank. Raised before any
            communication.
        TypeError: a dtype that is not floating point. Raised before any communication.

    Examples:
        >>> up = weft.ParallelLinear(16, 64, style="column", activation="gelu")
        >>> down = weft.ParallelLinear(64, 16, style="row")
        >>> x = torch.randn(4, 16)
        >>> up(x).shape, down(up(x)).shape  # 32 of the 64 features on this rank; the sum over the ranks
        (torch.Size([4, 32]), torch.Size([4, 16]))
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        style: str,
        group: Group = None,
        gather_output: bool = False,
        split_input: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        activation: str | None = None,
        unit: int | Sequence[int] = 1,
        parts: Sequence[int] | None = None,
        heads: tuple[int, int] | None = None,
        overlap: str = "auto",
        invariant: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_options(style, gather_output, split_input, overlap, dtype)
        self.in_features, self.out_features, self.style = in_features, out_features, style
        self.unit, self.parts, self.heads = unit, parts, heads
        self.gather_output, self.split_input, self.activation = gather_output, split_input, activation
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.communicator = communicator(group)
        self._op = column_parallel_linear if style == "column" else row_parallel_linear
        self._split = self._shard_of_weight()
        region = sequence_dim if sequence_parallel else None
        share = max(self._split.sizes)
        apply = activation_of(activation)
        units = None
        if invariant is not None:
            if overlap == "always":
                raise ValueError('ParallelLinear: overlap="always" is not supported with invariant')
            units, apply = self._units(invariant), activation_in_any_shape(apply)
        self.place = ParallelContext(self.communicator, region, apply, overlap, share, units)
        self.shards["weight"] = self._split
        if style == "column":
            self.shards["bias"] = self.shard_of_outputs()
        self.register_parts(self._whole(bias, device, dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, style: str, group: Group = None, **options: Any) -> "ParallelLinear":
        """Return this rank's part of an existing nn.Linear.

        Args:
            options: those of the constructor except bias, device and dtype.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        return cls._part_of(linear, *sizes, style=style, group=group, **options)

    def forward(
        self,
        x: torch.Tensor,
        *,
        in_parts: bool = False,
        addend: torch.Tensor | None = None,
        sequence_dim: int | None = None,
    ) -> torch.Tensor:
        """Return the layer's output.

        Args:
            in_parts: take and give this rank's parts in spite of split_input and gather_output.
            addend: row only; this rank's term of one more sum over the ranks, added to the layer's own before it
                travels.
            sequence_dim: the sequence's dimension, for this call at the edge of a sequence-parallel region.
        """
        if self.split_input and not in_parts:
            x = self.part_of_input(x)
        place = self.place if sequence_dim is None else self.place._replace(sequence_dim=sequence_dim)
        more = () if addend is None else (addend,)
        y = self._op(x, self.operand("weight"), self.operand("bias"), place, *more)
        return self.whole_output(y) if self.gather_output and not in_parts else y

    def part_of_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole x with split_input; otherwise x."""
        return split(x, -1, self.communicator, self._split.cut) if self.split_input else x

    def whole_output(self, y: torch.Tensor) -> torch.Tensor:
        """Return the whole of the ranks' y with gather_output; otherwise y."""
        return gather(y, -1, self.communicator, self._split.cut) if self.gather_output else y

    def without_bias(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x, as with in_parts, without the bias."""
        return self._op(x, self.operand("weight"), None, self.place)

    @property
    def parts_here(self) -> tuple[int, ...]:
        """Number of this rank's features in each part, in order; in the whole layer where there are no parts."""
        ends = list(accumulate(self.parts or [self._split.global_shape[self._split.dim]], initial=0))
        return tuple(
            sum(max(0, min(last, stop) - max(first, start)) for first, last in self._split.stretches)
            for start, stop in pairwise(ends)
        )

    def shard_of_outputs(self) -> Shard:
        """Return the place of this rank's output features of a column layer."""
        return self._shard((self.out_features,), 0)

    def _draw_whole(self) -> nn.Module:
        return self._whole(self.bias is not None, self.weight.device, self.weight.dtype)

    def _whole(self, bias: bool, device, dtype) -> nn.Module:
        return nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, style={self.style!r}, "
            f"rank {self.communicator.rank} of {self.communicator.world_size}, weight {tuple(self._split.shape)}"
        )

    def _units(self, total: int) -> Units:
        features = self._split.global_shape[self._split.dim]

        def cut(world: int) -> Cut:
            return cut_over(features, world, unit=self.unit, parts=self.parts, heads=self.heads)

        try:
            return Units.of(total, self._split, cut)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}(style={self.style!r}): {error}") from None

    def _shard_of_weight(self) -> Shard:
        shape, dim = (self.out_features, self.in_features), _SPLIT_DIM[self.style]
        if not self.transposed:
            return self._shard(shape, dim)
        return self._shard(shape[::-1], 1 - dim)

    def _shard(self, shape, dim: int) -> Shard:
        try:
            shard = Shard.of_shape(shape, dim, self.communicator, self.unit, parts=self.parts, heads=self.heads)
            if self.style == "row" and shard.cut.replicated:
                raise ValueError("its features are KV heads, which are fewer than the ranks, and each counts once.")
        except ValueError as error:
            feature, other = ("out", "row") if self.style == "column" else ("in", "column")
            raise ValueError(
                f"{type(self).__name__}(style={self.style!r}): {feature}_features={shape[dim]}: {error} "
                f'Or use style="{other}".'
            ) from None
        return shard


class _OneStyle(ParallelLinear):
    """ParallelLinear of the style that its class names."""

    only: str

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, style: str | None = None, **options: Any
    ):
        if style not in (None, self.only):
            raise ValueError(f"{type(self).__name__} has style {self.only!r}, got {style!r}; use ParallelLinear")
        super().__init__(in_features, out_features, bias, style=self.only, **options)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, style: str | None = None, group: Group = None, **options: Any
    ) -> "ParallelLinear":
        return super().from_linear(linear, style=style or cls.only, group=group, **options)


class ColumnParallelLinear(_OneStyle):
    """ParallelLinear with style="column".

    Examples:
        >>> weft.ColumnParallelLinear(16, 64)(torch.randn(4, 16)).shape
        torch.Size([4, 32])
    """

    only = "column"


class RowParallelLinear(_OneStyle):
    """ParallelLinear with style="row".

    Examples:
        >>> weft.RowParallelLinear(64, 16)(torch.randn(4, 32)).shape
        torch.Size([4, 16])
    """

    only = "row"


class ParallelConv1D(ParallelLinear):
    """ParallelLinear with a weight [in_features, out_features], as in `transformers.pytorch_utils.Conv1D`.

    Options are ParallelLinear's. A layer built from a seed holds this rank's slice of the Conv1D built from that seed.
    """

    transposed = True

    @classmethod
    def from_conv1d(cls, layer, *, style: str, group: Group = None, **options: Any) -> "ParallelConv1D":
        """Return this rank's part of an existing Conv1D."""
        return cls._part_of(layer, *layer.weight.shape, style=style, group=group, **options)

    def _whole(self, bias: bool, device, dtype) -> nn.Module:
        whole = nn.Module()
        like = {"device": device, "dtype": dtype}
        whole.weight = nn.Parameter(torch.empty(self.in_features, self.out_features, **like))
        whole.register_parameter("bias", nn.Parameter(torch.zeros(self.out_features, **like)) if bias else None)
        nn.init.normal_(whole.weight, std=0.02)
        return whole


def _check_options(style, gather_output, split_input, overlap, dtype) -> None:
    check_choice("ParallelLinear: style", style, _SPLIT_DIM)
    if gather_output and style != "column":
        raise ValueError('gather_output=True needs style="column"; the output of a row layer is whole already')
    if split_input and style != "row":
        raise ValueError('split_input=True needs style="row"; a column layer takes the whole input')
    check_choice("ParallelLinear: overlap", overlap, MODES)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"ParallelLinear: dtype={dtype} is not floating point")
