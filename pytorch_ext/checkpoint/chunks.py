"""A rank's memory as boxes of whole tensors: offsets and sizes along every dimension. Arithmetic only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weft.data_parallel.sharded_optimizer import Piece
from weft.sharding.shard import shard_of

Extent = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A box of a whole tensor, from `offset` on, and this rank's memory of it (a view, shaped as in the whole)."""

    offset: Extent
    tensor: torch.Tensor

    @property
    def shape(self) -> Extent:
        return tuple(self.tensor.shape)


def whole_shape(parameter: torch.Tensor) -> Extent:
    shard = shard_of(parameter)
    return tuple(parameter.shape) if shard is None else shard.global_shape


def parts_of(
    tensor: torch.Tensor, parameter: torch.Tensor, piece: Piece | None = None, *, counted: bool = False
) -> list[TensorPart]:
    """Where a tensor stands in the whole of a parameter that it is shaped like, as is the parameter itself.

    Args:
        piece: the tensor is flat, and covers this stretch of the parameter only.
        counted: without what a rank before has as well. Pieces are cut anywhere, and not alike on these ranks; of
            whole tensors replicas are parts too, the same on all ranks.
    """
    local = [TensorPart((0,) * parameter.dim(), tensor)] if piece is None else _parts_of_piece(tensor, parameter, piece)
    shard = shard_of(parameter)
    if shard is None:
        return local
    rank = shard.communicator.rank
    places = shard.cut.places(rank)
    if counted and piece is not None:
        places = {whole: place for whole, place in places.items() if shard.cut.owner[whole] == rank}
    return [
        moved
        for part in local
        for (begin, _), (start, stop) in places.items()
        if (moved := _moved(part, shard.dim, start, stop, begin)) is not None
    ]


def _parts_of_piece(tensor: torch.Tensor, parameter: torch.Tensor, piece: Piece) -> list[TensorPart]:
    """Where a stretch of a parameter's memory stands in the parameter."""
    # The stretch is in the order of memory: row-major over the dimensions from the slowest to the fastest.
    strides = torch.empty_like(parameter, device="meta").stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(parameter.dim())]
    parts, begin = [], 0
    for offset, size in boxes_of_stretch([parameter.size(dim) for dim in order], piece.start, piece.stop):
        view = tensor[begin : begin + prod(size)].view(size).permute(back)
        parts.append(TensorPart(tuple(offset[dim] for dim in back), view))
        begin += prod(size)
    return parts


def _moved(part: TensorPart, dim: int, start: int, stop: int, begin: int) -> TensorPart | None:
    """What a part of a shard has between start and stop of it, which lie from `begin` on in the whole."""
    first, last = max(part.offset[dim], start), min(part.offset[dim] + part.tensor.size(dim), stop)
    if first >= last:
        return None
    tensor = part.tensor.narrow(dim, first - part.offset[dim], last - first)
    return TensorPart((*part.offset[:dim], begin + first - start, *part.offset[dim + 1 :]), tensor)


def boxes_of_stretch(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Extent, Extent]]:
    """(offset, size) of the boxes that elements start to stop, in row-major order, are made of, in that order: at most
    two for each dimension but the slowest, and one."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, into = divmod(start, row)
    last, beyond = divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, into, beyond)
        return
    if into:
        yield from _in_row(shape, first, into, row)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, beyond)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Extent, Extent]]:
    for offset, size in boxes_of_stretch(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def overlap(offset: Extent, shape: Extent, other: Extent, other_shape: Extent) -> tuple[slice, ...] | None:
    """What two boxes share, in coordinates of the whole; None where that is nothing."""
    begin = [max(a, b) for a, b in zip(offset, other, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, other, other_shape, strict=True)]
    if any(first >= last for first, last in zip(begin, end, strict=True)):
        return None
    return tuple(slice(first, last) for first, last in zip(begin, end, strict=True))


def seen_from(offset: Extent, box: tuple[slice, ...]) -> tuple[slice, ...]:
    """The box in coordinates that begin at `offset`."""
    return tuple(slice(one.start - begin, one.stop - begin) for begin, one in zip(offset, box, strict=True))
