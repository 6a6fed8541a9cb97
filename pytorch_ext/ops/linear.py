"""The column- and the row-parallel linear layer (Shoeybi et al. 2019, section 3), with the sequence-parallel region of
Korthikanti et al. 2022, section 4.2. Uneven shards throughout."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from weft.comm.communicator import Communicator
from weft.ops.activation import ACTIVATIONS
from weft.split import split_sizes


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    communicator: Communicator,
    *,
    sequence_dim: int | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """activation(x @ weight.T + bias) for one rank's shard of the output features.

    Args:
        x: [..., K] the same on every rank; with sequence_dim, this rank's shard along that dimension.
        weight: [N_r, K]; bias: [N_r].

    Returns:
        [..., N_r], whole along the sequence.
    """
    y = _apply(ColumnParallelLinearFunction, x, weight, bias, communicator, sequence_dim)
    return ACTIVATIONS[activation](y)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    communicator: Communicator,
    *,
    sequence_dim: int | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """activation(sum over ranks of x @ weight.T + bias) from one rank's shard of the input features.

    Args:
        x: [..., K_r]; weight: [N, K_r]; bias: [N], the same on every rank and added once.

    Returns:
        [..., N] the same on every rank; with sequence_dim, this rank's shard along that dimension.
    """
    y = _apply(RowParallelLinearFunction, x, weight, bias, communicator, sequence_dim)
    return ACTIVATIONS[activation](y)


class ColumnParallelLinearFunction(torch.autograd.Function):
    """y_shard_n = x @ w_shard_n.T + b_shard_n, one shard of the output features per rank.

    Per rank, with M tokens, K inputs, N outputs, W ranks:
        x [M, K] whole        w_shard_n [N_r, K]        b_shard_n [N_r]        y_shard_n [M, N_r]
    In a sequence-parallel region x arrives as x_shard_m [M_r, K] and is gathered first.

    forward   y_shard_n = x @ w_shard_n.T + b_shard_n              (x = all_gather(x_shard_m))
    dgrad     dx = all_reduce(dy_shard_n @ w_shard_n)              (dx_shard_m = reduce_scatter(...))
    wgrad     dw_shard_n = dy_shard_n.T @ x                        (x = all_gather(x_shard_m))
    dbias     db_shard_n = dy_shard_n.sum(0)

    Saves x_shard_m, not the gathered x: gathering again in backward costs one all_gather and saves (W-1)/W of the
    activation.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, communicator, sequence_dim):
        ctx.communicator, ctx.sequence_dim = communicator, sequence_dim
        ctx.save_for_backward(x, weight)
        if sequence_dim is not None:
            ctx.sizes = communicator.all_sizes(x.size(sequence_dim))
            x = communicator.all_gather(x, sequence_dim, ctx.sizes)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        communicator, sequence_dim = ctx.communicator, ctx.sequence_dim
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
            if sequence_dim is None:
                communicator.all_reduce_(dx)
            else:
                dx = communicator.reduce_scatter(dx, sequence_dim, ctx.sizes)
        if ctx.needs_input_grad[1]:
            if sequence_dim is not None:
                x = communicator.all_gather(x, sequence_dim, ctx.sizes)
            dw = _tokens(dy).t() @ _tokens(x)
        if ctx.needs_input_grad[2]:
            db = _tokens(dy).sum(0)
        return dx, dw, db, None, None


class RowParallelLinearFunction(torch.autograd.Function):
    """y = sum over ranks of x_shard_k @ w_shard_k.T, plus b: one shard of the input features per rank.

    Per rank, with M tokens, K inputs, N outputs, W ranks:
        x_shard_k [M, K_r]        w_shard_k [N, K_r]        b [N] whole        y [M, N] whole
    In a sequence-parallel region y leaves as y_shard_m [M_r, N].

    forward   y = all_reduce(x_shard_k @ w_shard_k.T) + b          (y_shard_m = reduce_scatter(...) + b)
    dgrad     dx_shard_k = dy @ w_shard_k                          (dy = all_gather(dy_shard_m))
    wgrad     dw_shard_k = dy.T @ x_shard_k                        (the same gathered dy)
    dbias     db = dy.sum(0), the same on every rank               (db = all_reduce(dy_shard_m.sum(0)))

    Saves x_shard_k.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, communicator, sequence_dim):
        ctx.communicator, ctx.sequence_dim = communicator, sequence_dim
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        if sequence_dim is None:
            communicator.all_reduce_(y)
        else:
            ctx.sizes = split_sizes(y.size(sequence_dim), communicator.world)
            y = communicator.reduce_scatter(y, sequence_dim, ctx.sizes)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        communicator, sequence_dim = ctx.communicator, ctx.sequence_dim
        dx = dw = db = None
        if ctx.needs_input_grad[2]:
            db = _tokens(dy).sum(0)
            if sequence_dim is not None:
                communicator.all_reduce_(db)
        if sequence_dim is not None and any(ctx.needs_input_grad[:2]):
            dy = communicator.all_gather(dy, sequence_dim, ctx.sizes)
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if ctx.needs_input_grad[1]:
            dw = _tokens(dy).t() @ _tokens(x)
        return dx, dw, db, None, None


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[..., F] to [M, F]."""
    return x.reshape(-1, x.size(-1))


def _apply(function, x, weight, bias, communicator, sequence_dim):
    """The function, after autocast's casts and every check that must come before a rank communicates."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        _check(x, weight)
        return function.apply(x, weight, bias, communicator, sequence_dim)
    dtype = torch.get_autocast_dtype(device)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    _check(x, weight)
    with torch.autocast(device, enabled=False):
        return function.apply(x, weight, bias, communicator, sequence_dim)


def _check(x, weight):
    if x.dtype != weight.dtype or x.device != weight.device:
        raise TypeError(
            f"linear: the input is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}; "
            "convert one of them, or run under torch.autocast"
        )
    if x.dim() == 0 or x.size(-1) != weight.size(1):
        raise ValueError(
            f"linear: the input has shape {tuple(x.shape)}; its last dimension must be {weight.size(1)}, the input "
            f"features of this rank's weight {tuple(weight.shape)}"
        )
