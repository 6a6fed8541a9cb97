"""The column- and the row-parallel linear layer (Shoeybi et al. 2019, section 3).

They include the sequence-parallel region of Korthikanti et al. 2022, section 4.2. Shards may be uneven everywhere.
"""

import torch

from weft.forward.functions import seen_by_modes
from weft.ops import invariant, matmul
from weft.ops.autocast import cast_operands
from weft.ops.backward import RankFunction, first_order
from weft.ops.overlap import products
from weft.ops.overlap.products import ParallelContext
from weft.ops.unit_parameters import parameter_of_units
from weft.sharding.sizes import split_sizes

_unsafe_view = torch.ops.aten._unsafe_view.default  # the same memory as a tensor that is no view
# The modules of the products within a rank and of those with communication.
_ORDINARY, _IN_UNITS = (matmul, products), (invariant, invariant)


def column_parallel_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: ParallelContext
) -> torch.Tensor:
    """Return activation(x @ weight.T + bias) for one rank's shard of the output features.

    Args:
        x: [..., K] the same on every rank; in a sequence-parallel region, this rank's shard along the sequence.
        weight: [N_r, K].
        bias: [N_r].

    Returns:
        [..., N_r], whole along the sequence.
    """
    seen = None if place.units is None else seen_by_modes(column_parallel_linear, x, weight, bias, place)
    return _apply(ColumnParallelLinearFunction, x, weight, bias, place) if seen is None else seen[0]


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    place: ParallelContext,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return activation(sum over ranks of x @ weight.T + bias) from one rank's shard of the input features.

    Args:
        x: [..., K_r].
        weight: [N, K_r].
        bias: [N], the same on every rank and added once.
        addend: [..., N], whole along the sequence; this rank's term of one more sum over the ranks (LoRA's), added to
            the product before it travels. Product and transfer then do not overlap.

    Returns:
        [..., N] the same on every rank; in a sequence-parallel region, this rank's shard along the sequence.
    """
    if addend is not None and place.units is not None:
        raise ValueError("linear: an addend is not supported with invariant")
    seen = None if place.units is None else seen_by_modes(row_parallel_linear, x, weight, bias, place)
    return _apply(RowParallelLinearFunction, x, weight, bias, place, addend) if seen is None else seen[0]


class ColumnParallelLinearFunction(RankFunction):
    """y_shard_n = act(z_shard_n), z_shard_n = x @ w_shard_n.T + b_shard_n: one shard of the output features per rank.

    Per rank, with M tokens, K inputs, N outputs, W ranks:
        x [M, K] whole        w_shard_n [N_r, K]        b_shard_n [N_r]        y_shard_n [M, N_r]
    In a sequence-parallel region x arrives as x_shard_m [M_r, K] and is gathered first.

    forward   z_shard_n = x @ w_shard_n.T + b_shard_n              (x = all_gather(x_shard_m))
    dact      dz_shard_n = act'(z_shard_n) dy_shard_n
    dgrad     dx = all_reduce(dz_shard_n @ w_shard_n)              (dx_shard_m = reduce_scatter(...))
    wgrad     dw_shard_n = dz_shard_n.T @ x                        (x = all_gather(x_shard_m))
    dbias     db_shard_n = dz_shard_n.sum(0)

    Saves x_shard_m, not the gathered x: gathering again in backward costs one all_gather and saves (W-1)/W of the
    activation. Saves z_shard_n where there is an activation.

    If the weight has an fp32 `main_grad`, dw is added to that and the weight gets no gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, place, main_grad):
        ctx.place, ctx.main_grad, activation = place, main_grad, place.activation
        local, split = _ORDINARY if place.units is None else _IN_UNITS
        if place.units is not None:
            ctx.main_grad, ctx.of_bias = parameter_of_units(weight) or main_grad, parameter_of_units(bias)
        if place.sequence_dim is None:
            y, z = local.forward(x, weight, bias, activation)
        else:
            ctx.sizes = place.ranks.all_sizes(x, place.sequence_dim)
            y, z, _ = split.all_gather_matmul(place, x, ctx.sizes, weight.t(), bias, activation)
        ctx.save_for_backward(x, weight, z if activation else None)
        return _unsafe_view(y, y.shape) if y._is_view() else y  # autograd forbids writing to a function's view

    @staticmethod
    @first_order
    def backward(ctx, dy):
        place: ParallelContext = ctx.place
        local, split = _ORDINARY if place.units is None else _IN_UNITS
        in_region = place.sequence_dim is not None
        x, weight, z = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        dz = dy if place.activation is None else place.activation.backward(dy, z)
        if needs_weight and in_region:
            gather_x = split.start_all_gather(place, x, ctx.sizes, weight)
        if needs_x and in_region:
            dx = split.matmul_reduce_scatter(place, dz, weight, ctx.sizes)
        elif needs_x:
            dx = split.matmul_all_reduce(place, dz, weight)
        if needs_weight:
            dw = local.wgrad(dz, gather_x() if in_region else x, ctx.main_grad)
        if needs_bias:
            db = matmul.column_sums(dz) if place.units is None else invariant.column_sums(dz, ctx.of_bias)
        return dx, dw, db, None, None


class RowParallelLinearFunction(RankFunction):
    """y = act(z), z = (sum over ranks of x_shard_k @ w_shard_k.T) + b: one shard of the input features per rank.

    Per rank, with M tokens, K inputs, N outputs, W ranks:
        x_shard_k [M, K_r]        w_shard_k [N, K_r]        b [N] whole        y [M, N] whole
    In a sequence-parallel region y leaves as y_shard_m [M_r, N]. An addend a [M, N] is this rank's term of the sum.

    forward   z = all_reduce(x_shard_k @ w_shard_k.T + a) + b      (z_shard_m = reduce_scatter(...) + b)
    dact      dz = act'(z) dy                                      (dz = all_gather(act'(z_shard_m) dy_shard_m))
    dgrad     dx_shard_k = dz @ w_shard_k
    wgrad     dw_shard_k = dz.T @ x_shard_k
    dbias     db = dz.sum(0), the same on every rank               (db = all_reduce(dz_shard_m.sum(0)))
    daddend   da = dz

    Saves x_shard_k, and z (z_shard_m) where there is an activation.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, place, main_grad, addend):
        ctx.place, ctx.main_grad = place, main_grad
        if place.units is not None:
            ctx.main_grad, ctx.of_bias = parameter_of_units(weight) or main_grad, parameter_of_units(bias)
        world, dim = place.ranks.world_size, place.sequence_dim
        if dim is not None:
            ctx.sizes = split_sizes(x.size(dim), world)
        if place.units is not None:
            z = invariant.with_bias(invariant.sum_over_ranks(place.ranks, place.units, x, weight.t()), bias, x.dtype)
            if dim is not None:
                z = z.split(ctx.sizes, dim)[place.ranks.rank].contiguous()
        elif world == 1:  # the product adds the bias and rounds once, as in nn.Linear
            _, z = matmul.forward(x, weight, bias)
            z = z if addend is None else z + addend.to(z.dtype)
        else:
            b = weight.t()
            if dim is None:
                z = products.matmul_all_reduce(place, x, b, addend)
            else:
                z = products.matmul_reduce_scatter(place, x, b, ctx.sizes, addend)
            if bias is not None:
                z.add_(bias)
        if place.activation is None:
            ctx.save_for_backward(x, weight)
            return _unsafe_view(z, z.shape) if z._is_view() else z
        ctx.save_for_backward(x, weight, z)
        return place.activation.apply(z)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        place: ParallelContext = ctx.place
        x, weight, *z = ctx.saved_tensors
        local, split = _ORDINARY if place.units is None else _IN_UNITS
        dz = dy if place.activation is None else place.activation.backward(dy, *z)
        needs_x, needs_weight, needs_bias, _, _, needs_addend = ctx.needs_input_grad
        dx = dw = db = None
        dim = place.sequence_dim
        in_region = dim is not None
        # The sums of shards would depend on their number.
        bias_of_whole = needs_bias and place.units is not None
        if needs_bias and place.units is None:
            db = matmul.column_sums(dz)
            if in_region:
                place.ranks.all_reduce_(db)
        if dim is None:
            dx = local.multiply(dz, weight) if needs_x else None
        elif needs_x:
            dx, _, dz = split.all_gather_matmul(place, dz, ctx.sizes, weight)
        elif needs_weight or bias_of_whole or needs_addend:
            dz = place.ranks.all_gather(dz, dim, ctx.sizes)
        if bias_of_whole:
            db = invariant.column_sums(dz, ctx.of_bias)
        if needs_weight:
            dw = local.wgrad(dz, x, ctx.main_grad)
        return dx, dw, db, None, None, dz if needs_addend else None


def _apply(function, x, weight, bias, place, *addend):
    """Apply the function after autocast's casts and after every check that must precede communication."""
    # Written out, since each layer comes here in each forward: `without_autocast` is five Python calls more.
    main_grad, device = getattr(weight, "main_grad", None), weight.device.type
    casts = device != "meta" and torch.is_autocast_enabled(device)
    if casts:
        x, weight, bias = cast_operands(x, weight, bias)
    if x.dtype != weight.dtype or x.device != weight.device or not x.dim() or x.size(-1) != weight.size(1):
        _refuse(x, weight, function)
    if not casts:
        return function.apply(x, weight, bias, place, main_grad, *addend)
    with torch.autocast(device, enabled=False):
        return function.apply(x, weight, bias, place, main_grad, *addend)


def _refuse(x, weight, function):
    if x.dtype != weight.dtype or x.device != weight.device:
        raise TypeError(
            f"linear: the input is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}; "
            "convert one of them, or run under torch.autocast"
        )
    raise ValueError(
        f"linear: the input has shape {tuple(x.shape)}; its last dimension must be {weight.size(1)}, the input "
        f"features of this rank's weight {tuple(weight.shape)}"
        + (" (a row layer takes a part; with split_input=True, the whole)" if "Row" in function.__name__ else "")
    )
