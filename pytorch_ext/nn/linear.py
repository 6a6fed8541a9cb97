"""ParallelLinear: nn.Linear with its weight split over ranks."""

import torch
from torch import nn

from weft.comm.communicator import communicator
from weft.nn.sharded import ShardedModule
from weft.ops import Place, column_parallel_linear, gather, row_parallel_linear, split
from weft.ops.activation import activation_of
from weft.ops.overlap import MODES
from weft.shard import Shard

_SPLIT_DIM = {"column": 0, "row": 1}  # of the weight, [out_features, in_features]


class ParallelLinear(ShardedModule):
    """activation(x @ weight.T + bias), with the weight split over the ranks of a group (Shoeybi et al. 2019).

    style="column" splits the output features: x is whole, the output is this rank's [..., out_features_r].
    style="row" splits the input features: x is this rank's [..., in_features_r], the output is whole. A column layer
    followed by a row layer communicates once forward and once backward.

    Sizes need not divide by the number of ranks. Built from a seed, the layer holds this rank's slice of the nn.Linear
    built from that seed.

    A weight that is given an attribute `main_grad`, fp32 and of its shape, has its gradient added to that, in fp32, and
    its `.grad` stays None.

    Args:
        in_features, out_features: of the whole layer.
        bias: split like the output of a column layer; whole, and added once, in a row layer.
        style: "column" or "row".
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        gather_output: column only; every rank gets the whole output.
        split_input: row only; x is whole and each rank takes its part.
        sequence_parallel: between layers the sequence is split instead (Korthikanti et al. 2022): a column layer takes
            x split along sequence_dim and gathers it, a row layer gives its output split along it. What stands
            between a row layer and the next column layer (a norm, say) sees this rank's tokens only, so the gradients
            of its parameters must be summed over the ranks: name it "sequence" in the plan of `weft.parallelize`, or
            call `weft.nn.sum_gradients(module, group)`.
        sequence_dim: the dimension of x that is the sequence.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".
        unit: the split features are cut at multiples of it (of a head's size, say).
        overlap: whether communication and products run at the same time: "auto" where that is faster (`weft.explain`
            says where), "never", or "always", which raises where it cannot be.
        device, dtype: of the parameters.

    Raises:
        ValueError: a style, activation or combination that does not exist; fewer units than ranks; a group that this
            rank is not in. TypeError: a dtype that is not floating point. All before anything is communicated.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        style: str,
        group=None,
        gather_output: bool = False,
        split_input: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        activation: str | None = None,
        unit: int = 1,
        overlap: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__()
        _check_options(style, gather_output, split_input, overlap, dtype)
        self.in_features, self.out_features, self.style, self.unit = in_features, out_features, style, unit
        self.gather_output, self.split_input, self.activation = gather_output, split_input, activation
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.communicator = communicator(group)
        self._op = column_parallel_linear if style == "column" else row_parallel_linear
        self._split = self._shard((out_features, in_features), _SPLIT_DIM[style])
        region = sequence_dim if sequence_parallel else None
        share = max(self._split.sizes)
        self.place = Place(self.communicator, region, activation_of(activation), overlap, share)
        self._hold(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, style: str, group=None, **options) -> "ParallelLinear":
        """This rank's part of an existing nn.Linear; options as in the constructor, but bias, device and dtype."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        weight, has_bias = linear.weight, linear.bias is not None
        layer = cls(
            linear.in_features,
            linear.out_features,
            has_bias,
            style=style,
            group=group,
            device="meta",
            dtype=weight.dtype,
            **options,
        )
        layer._hold(linear)
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split_input:
            x = split(x, -1, self.communicator, self._split.sizes)
        y = self._op(x, self.weight, self.bias, self.place)
        return gather(y, -1, self.communicator, self._split.sizes) if self.gather_output else y

    def _draw_whole(self) -> nn.Linear:
        has_bias = self.bias is not None
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        return nn.Linear(self.in_features, self.out_features, has_bias, **like)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, style={self.style!r}, "
            f"rank {self.communicator.rank} of {self.communicator.world}, weight {tuple(self._split.shape)}"
        )

    def _shard(self, shape, dim: int) -> Shard:
        try:
            return Shard.of_shape(shape, dim, self.communicator, self.unit)
        except ValueError as error:
            feature, other = ("out", "row") if self.style == "column" else ("in", "column")
            raise ValueError(
                f"ParallelLinear(style={self.style!r}): {feature}_features={shape[dim]}: {error} "
                f'Or use style="{other}".'
            ) from None

    def _hold(self, linear: nn.Linear) -> None:
        self.adopt("weight", linear.weight, self._split)
        if linear.bias is None:
            self.register_parameter("bias", None)
        elif self.style == "column":
            self.adopt("bias", linear.bias, self._shard((self.out_features,), 0))
        else:
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)


class ColumnParallelLinear(ParallelLinear):
    """ParallelLinear with style="column"."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, style: str = "column", **options):
        _check_fixed_style(self, style, "column")
        super().__init__(in_features, out_features, bias, style=style, **options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, style: str = "column", group=None, **options):
        return super().from_linear(linear, style=style, group=group, **options)


class RowParallelLinear(ParallelLinear):
    """ParallelLinear with style="row"."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, style: str = "row", **options):
        _check_fixed_style(self, style, "row")
        super().__init__(in_features, out_features, bias, style=style, **options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, style: str = "row", group=None, **options):
        return super().from_linear(linear, style=style, group=group, **options)


def _check_fixed_style(layer: ParallelLinear, style: str, only: str) -> None:
    if style != only:
        raise ValueError(f"{type(layer).__name__} has style {only!r}, got {style!r}; use ParallelLinear")


def _check_options(style, gather_output, split_input, overlap, dtype) -> None:
    if style not in _SPLIT_DIM:
        raise ValueError(f"ParallelLinear: style={style!r} is not one of {', '.join(map(repr, _SPLIT_DIM))}")
    if gather_output and style != "column":
        raise ValueError('gather_output=True goes with style="column"; the output of a row layer is whole already')
    if split_input and style != "row":
        raise ValueError('split_input=True goes with style="row"; a column layer takes the whole input')
    if overlap not in MODES:
        raise ValueError(f"ParallelLinear: overlap={overlap!r} is not one of {', '.join(map(repr, MODES))}")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"ParallelLinear: dtype={dtype} is not floating point")
