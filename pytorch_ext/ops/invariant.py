"""The products of linear layers with the same bits on any number of ranks, for layers with `invariant=V`.

They have the signatures of the functions of `matmul` and `overlap.products`, so layers can swap them.

The split features are V equal units whatever the number of ranks, and every rank has V / ranks of them, one after
another. A sum over the split features is one sum for each unit, in fp32, and then a binary tree over the V units. Ranks
exchange the tree's nodes that lie within them. Every other sum is within a rank and has one order. The CPU's product
(csrc/matmul) keeps these orders in any shape, so an element has the same bits beside any other rows and columns. On a
GPU weft's kernel computes leaf by leaf, with one tile for all sizes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from weft import _C
from weft.comm.communicator import Communicator
from weft.forward.functions import seen_by_modes
from weft.ops import kernel_choice
from weft.ops.activation import Activation
from weft.ops.autocast import cast_operands
from weft.ops.backward import RankFunction, as_matrix, first_order
from weft.ops.matmul import check_main_grad
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: _C.dtypes[str(dtype).removeprefix("torch.")] for dtype in DTYPES}
_VECTORS = 64  # elements of the most vectors that ATen's loops take at once
_MOST_THREADS = 8
_ONE_THREAD = 16384  # elements that ATen leaves to one thread, of GELU too

Node = tuple[int, int]  # of the tree over units: first unit, unit after the last


@dataclass(frozen=True)
class Units:
    """The V units of a layer's split features.

    Attributes:
        order: this rank's features in the order of their units, where its shard has another (parts); None otherwise.
    """

    total: int
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, total: int, shard: Shard, cut_over_units: Callable[[int], Cut]) -> "Units":
        """Return the units of a rank's shard.

        Args:
            cut_over_units: returns the cut of the same features over a number of ranks.

        Raises:
            ValueError: the features are not `total` equal units, or the ranks do not have equally many of them.
        """
        world = shard.communicator.world_size
        if not _equal_units(total, world, cut_over_units):
            possible = [count for count in range(world, 129, world) if _equal_units(count, world, cut_over_units)]
            others = f"possible here are {possible}" if possible else "no number up to 128 is possible here"
            raise ValueError(
                f"invariant={total}: {shard.global_shape[shard.dim]} features must be that many equal units, and each "
                f"of {world} ranks must have equally many of them; {others}"
            )
        each = total // world
        first = shard.communicator.rank * each
        stretches = [stretch for unit in cut_over_units(total).stretches[first : first + each] for stretch in unit]
        by_unit, held = (
            [i for start, stop in part for i in range(start, stop)] for part in (stretches, shard.stretches)
        )
        if by_unit == held:
            return cls(total)
        place = {feature: index for index, feature in enumerate(held)}
        return cls(total, torch.tensor([place[feature] for feature in by_unit]))

    def here(self, ranks: Communicator) -> range:
        """Return the numbers of this rank's units."""
        each = self.total // ranks.world_size
        return range(ranks.rank * each, (ranks.rank + 1) * each)

    def of_rank(self, ranks: Communicator, rank: int) -> tuple[Node, ...]:
        """Return the nodes of the tree that lie within a rank."""
        each = self.total // ranks.world_size
        return nodes_within(rank * each, (rank + 1) * each, self.total)


def _equal_units(total: int, world: int, cut_over_units: Callable[[int], Cut]) -> bool:
    try:
        cut = cut_over_units(total)
    except ValueError:  # fewer features than units
        return False
    return total % world == 0 and len(set(cut.sizes)) == 1 and not cut.replicated


def plus(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    """Return x + y; None counts as zeros."""
    if x is None or y is None:
        some = y if x is None else x
        return None if some is None else some + 0.0  # as a sum with zeros, which makes -0 to 0
    return x + y


def add_up(sums: dict[Node, Any], total: int, add: Callable[[Any, Any], Any] = plus) -> None:
    """Put one sum in the place of two, wherever these are the two sides of a node of the tree over `total` units.

    The left side of a node is the largest power of two below its size.

    Args:
        sums: by node; not every unit need be there.
        add: returns the sum of a left and a right side.
    """
    half = 1
    while half < total:
        for low in range(0, total - half, 2 * half):
            left, right = (low, low + half), (low + half, min(low + 2 * half, total))
            if left in sums and right in sums:
                sums[low, right[1]] = add(sums.pop(left), sums.pop(right))
        half *= 2


@cache
def nodes_within(first: int, stop: int, total: int) -> tuple[Node, ...]:
    """Return the largest nodes of the tree over `total` units that lie in first to stop, in order."""
    sums = {(unit, unit + 1): None for unit in range(first, stop)}
    add_up(sums, total)
    return tuple(sorted(sums))


def add_in_tree(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of units one after another; as `plus`."""
    sums = {(unit, unit + 1): part for unit, part in enumerate(parts)}
    add_up(sums, len(parts))
    return sums[0, len(parts)]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, with a [..., K] and b [K, N]."""
    return product_sum(a, b, 1, a.dtype)


def product_sum(a: torch.Tensor, b: torch.Tensor, leaves: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a @ b, added in fp32 in a tree over `leaves` equal parts of K.

    Args:
        a: [..., K], fp32, bf16 or fp16.
        b: [K, N].
        dtype: of the result: fp32, or the type of a.

    Raises:
        TypeError: another type, two types, or tensors that are neither on the CPU nor on a GPU that runs weft's
            kernels.
    """
    by_kernel = kernel_choice.on_kernel(a.device)
    if a.dtype not in _CODES or (b.dtype, b.device) != (a.dtype, a.device) or not (by_kernel or a.device.type == "cpu"):
        raise TypeError(
            f"invariant: {a.dtype} on {a.device} times {b.dtype} on {b.device}; both must be float32, bfloat16 or "
            "float16 on the CPU, or on a GPU that runs weft's kernels"
        )
    matrix = as_matrix(a)
    if by_kernel:
        return _sum_by_kernel(matrix, b, leaves).to(dtype).view(*a.shape[:-1], b.size(1))
    rows, depth = matrix.shape
    out = torch.empty(rows, b.size(1), dtype=dtype)
    _C.multiply(
        (matrix.data_ptr(), matrix.stride(0), matrix.stride(1)),
        (b.data_ptr(), b.stride(0), b.stride(1)),
        (out.data_ptr(), out.stride(0)),
        (rows, b.size(1), depth),
        _CODES[a.dtype],
        leaves,
        dtype == a.dtype,
        torch.get_num_threads(),
    )
    return out.view(*a.shape[:-1], b.size(1))


def _sum_by_kernel(a: torch.Tensor, b: torch.Tensor, leaves: int) -> torch.Tensor:
    """Return a @ b as `product_sum`, by one launch for each leaf; every second one adds to the leaf before it.

    A leaf may be aligned in another way than the whole, and has a tile of its own with the same block.
    """
    from weft.kernels.matmul import matmul
    from weft.kernels.matmul_tiles import tile_of_any_size

    depth = a.size(1)
    if depth % leaves:
        raise ValueError(f"invariant: a depth of {depth} does not divide into {leaves} leaves")
    each = depth // leaves

    def of_leaf(leaf: int, before: torch.Tensor | None = None) -> torch.Tensor:
        x, y = (part.narrow(dim, leaf * each, each) for dim, part in ((1, a), (0, b)))
        tile = tile_of_any_size(x, y)
        return matmul(x, y, addend=before, out=before, out_dtype=torch.float32, config=tile)[0]

    def add(left: int | torch.Tensor, right: int | torch.Tensor) -> torch.Tensor:  # a number is a leaf to be computed
        left = of_leaf(left) if isinstance(left, int) else left
        return of_leaf(right, left) if isinstance(right, int) else left.add_(right)

    sums: dict[Node, int | torch.Tensor] = {}
    for leaf in range(leaves):
        sums[leaf, leaf + 1] = leaf
        add_up(sums, leaves, add)
    [total] = sums.values()
    return of_leaf(total) if isinstance(total, int) else total


def batched_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b for a [..., M, K] and b [..., K, N], as torch.matmul; differentiable."""
    a, b = cast_operands(a, b)  # type: ignore[assignment]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return BatchedProductFunction.apply(a, b).view(*batch, a.size(-2), b.size(-1))


class BatchedProductFunction(torch.autograd.Function):
    """y_i = a_i @ b_i for i of a batch: a [B, M, K], b [B, K, N], y [B, M, N].

    forward   y = a @ b
    backward  da = dy @ b.T, db = a.T @ dy

    Saves a and b.
    """

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _of_batch(a, b)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return _of_batch(dy, b.mT) if needs_a else None, _of_batch(a.mT, dy) if needs_b else None


def _of_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([multiply(*pair) for pair in zip(a, b, strict=True)])


def in_own_memory(x: torch.Tensor) -> torch.Tensor:
    """Return x contiguous, and aligned as memory of its own: a part of a tensor begins elsewhere on fewer ranks.

    Kernels and libraries choose their code, and lanes their elements, by the alignment.
    """
    bytes = 64 if x.device.type == "cpu" else 16
    if x.is_contiguous() and x.storage_offset() * x.element_size() % bytes == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class ContiguousGradFunction(torch.autograd.Function):
    """y = x.

    backward  dx = dy in row-major memory, whatever the strides of dy
    """

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy.contiguous()


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = act(z) and z = x @ weight.T + bias, rounded once."""
    z = linear(x, weight, bias)
    return (z, z) if activation is None else (activation.apply(z), z)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias, rounded once."""
    if bias is None:
        return product_sum(x, weight.t(), 1, x.dtype)
    return product_sum(x, weight.t()).add_(bias).to(x.dtype)


def with_bias(total: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (total if bias is None else total.add_(bias)).to(dtype)


def wgrad(dz: torch.Tensor, x: torch.Tensor, into=None) -> torch.Tensor | None:
    """Return dw = dz.T @ x; or give it to a `ParameterOfUnits` or add it to an fp32 main_grad, and return None.

    Raises as `matmul.wgrad`.
    """
    if into is None:
        return product_sum(as_matrix(dz).t(), as_matrix(x), 1, dz.dtype)
    if not isinstance(into, torch.Tensor):
        into.put_product(dz, x)
        return None
    dw = product_sum(as_matrix(dz).t(), as_matrix(x))
    check_main_grad(into, dw.shape)
    into.add_(dw)
    return None


def column_sums(dz: torch.Tensor, into=None) -> torch.Tensor | None:
    """Return dz.sum over all dimensions but the last; or give it to a `ParameterOfUnits`, and return None."""
    matrix = as_matrix(dz)
    db = wgrad(matrix.new_ones(matrix.size(0), 1), matrix, into)
    return None if db is None else db[0]


def sum_over_ranks(ranks: Communicator, units: Units, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of a @ b in fp32, in the tree's order; a [..., K_r], b [K_r, N]."""
    if units.order is not None:
        order = units.order.to(a.device)
        a, b = a.index_select(-1, order), b.index_select(0, order)
    own, each = units.of_rank(ranks, ranks.rank), a.size(-1) * ranks.world_size // units.total
    start = own[0][0]
    places = [slice((low - start) * each, (high - start) * each) for low, high in own]
    sums = [product_sum(a[..., k], b[k], high - low) for k, (low, high) in zip(places, own, strict=True)]
    if ranks.world_size == 1:
        return sums[0]
    if len(sums) == 1:
        return sum_over_nodes(ranks, units, sums[0].view(1, -1, sums[0].size(-1))).view(sums[0].shape)
    shape = sums[0].shape
    local = torch.stack([total.reshape(-1, shape[-1]) for total in sums])
    return sum_over_nodes(ranks, units, local).view(shape)


def sum_over_nodes(ranks: Communicator, units: Units, local: torch.Tensor) -> torch.Tensor:
    """Return the sum [M, N] of all ranks' nodes [nodes, M, N], which may be overwritten.

    Each rank adds some of the rows for all.
    """
    if ranks.world_size == 2 and len(local) == 1:
        return ranks.all_reduce_(local)[0]  # two terms
    each, more = divmod(local.size(1), ranks.world_size)
    rows = [each + (rank < more) for rank in range(ranks.world_size)]
    nodes = [units.of_rank(ranks, rank) for rank in range(ranks.world_size)]
    parts = [part.contiguous() for part in local.split(rows, 1)]
    received = [local.new_empty(len(of_rank), rows[ranks.rank], local.size(2)) for of_rank in nodes]
    ranks.all_to_all_into(parts, received)
    sums = {
        node: total
        for of_rank, totals in zip(nodes, received, strict=True)
        for node, total in zip(of_rank, totals, strict=True)
    }
    add_up(sums, units.total)
    return ranks.all_gather(sums[0, units.total], 0, rows)


def total_of_units(ranks: Communicator, units: Units, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over all units of all ranks, in the tree's order; every rank must go on with it in the same way.

    Args:
        parts: a tensor of one shape for each unit of this rank.
    """
    if (seen := seen_by_modes(total_of_units, ranks, units, parts)) is not None:
        return seen[0]
    return _TotalFunction.apply(ranks, units, *parts)


def used_by_units(ranks: Communicator, units: Units, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return x, the same on every rank, once for each unit of this rank; its gradient is the sum over all units."""
    if (seen := seen_by_modes(used_by_units, ranks, units, x)) is not None:
        return seen[0]
    return _UsedByUnitsFunction.apply(ranks, units, x) if x.requires_grad else (x,) * len(units.here(ranks))


class _TotalFunction(RankFunction):
    """y = sum over units of x_unit, in the tree's order.

    backward  dx_unit = dy: every rank has the same y and so the same dy; nothing travels
    """

    @staticmethod
    def forward(ctx, ranks: Communicator, units: Units, *parts):
        ctx.count = len(parts)
        return tree_sum(ranks, units, parts)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return None, None, *[dy] * ctx.count


class _UsedByUnitsFunction(RankFunction):
    """y_unit = x.

    backward  dx = sum over units of dy_unit, in the tree's order
    """

    @staticmethod
    def forward(ctx, ranks: Communicator, units: Units, x):
        ctx.ranks, ctx.units = ranks, units
        return tuple(x.view_as(x) for _ in units.here(ranks))

    @staticmethod
    @first_order
    def backward(ctx, *dys):
        return None, None, tree_sum(ctx.ranks, ctx.units, dys)


def tree_sum(ranks: Communicator, units: Units, parts: Sequence[torch.Tensor], overwrite: bool = False) -> torch.Tensor:
    """Return the sum over all units in at least fp32, rounded once.

    Args:
        overwrite: the parts may be overwritten.
    """
    like = parts[0]
    wide = torch.promote_types(like.dtype, torch.float32)
    sums = {(unit, unit + 1): part.to(wide) for unit, part in zip(units.here(ranks), parts, strict=True)}
    add_up(sums, units.total)
    nodes = [sums[node].reshape(1, -1, 1) for node in units.of_rank(ranks, ranks.rank)]
    if ranks.world_size > 1:
        local = torch.cat(nodes) if len(nodes) > 1 or not overwrite else nodes[0]
        nodes = [sum_over_nodes(ranks, units, local)]
    return nodes[0].to(like.dtype).view(like.shape)


def matmul_all_reduce(place, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As `products.matmul_all_reduce`."""
    return sum_over_ranks(place.ranks, place.units, a, b).to(a.dtype)


def matmul_reduce_scatter(place, a: torch.Tensor, b: torch.Tensor, sizes) -> torch.Tensor:
    """As `products.matmul_reduce_scatter`."""
    return matmul_all_reduce(place, a, b).split(list(sizes), place.sequence_dim)[place.ranks.rank].contiguous()


def all_gather_matmul(
    place, x: torch.Tensor, sizes, b: torch.Tensor, bias=None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `products.all_gather_matmul`."""
    whole = place.ranks.all_gather(x, place.sequence_dim, sizes)
    return *forward(whole, b.t(), bias, activation), whole


def start_all_gather(place, x: torch.Tensor, sizes, b: torch.Tensor):
    """As `products.start_all_gather`, which starts nothing here."""
    return lambda: place.ranks.all_gather(x, place.sequence_dim, sizes)


def activation_in_any_shape(activation: Activation | None) -> Activation | None:
    """Return the activation with the same bits for an element wherever it lies in the tensor."""
    if activation is None:
        return None
    return Activation(
        activation.name,
        lambda z: pointwise(activation.apply, z),
        lambda dy, z: pointwise(activation.backward, dy, z),
    )


def pointwise(function, *tensors: torch.Tensor) -> torch.Tensor:
    """Return function(*tensors), an elementwise function of ATen, with every element computed in a full vector.

    ATen shares a tensor out among threads and computes by another function what is left of a share behind its last full
    vector. Here no share has such a rest. On a GPU one function computes every element.
    """
    first, count = tensors[0], tensors[0].numel()
    if first.device.type != "cpu":
        return function(*tensors)
    threads = torch.get_num_threads()
    few = threads <= _MOST_THREADS
    step = _VECTORS * (math.lcm(*range(1, threads + 1)) if few else 1)
    flat = [tensor.reshape(-1) for tensor in tensors]
    if count % step:
        flat = [F.pad(tensor, (0, -count % step)) for tensor in flat]
    if few:
        y = function(*flat)
    else:  # shares of so many threads cannot all be made of full vectors
        y = torch.cat([function(*parts) for parts in zip(*(x.split(_ONE_THREAD) for x in flat), strict=True)])
    return y[:count].view(first.shape)
