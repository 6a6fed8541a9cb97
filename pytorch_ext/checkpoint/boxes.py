"""A rank's memory as boxes of whole tensors, with an offset and a size along every dimension. Arithmetic only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weft.data_parallel.sharded_optimizer import Piece
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import local

Extent = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A box of a whole tensor that begins at `offset`, and a view of this rank's memory of it, of the same shape."""

    offset: Extent
    tensor: torch.Tensor

    @property
    def shape(self) -> Extent:
        return tuple(self.tensor.shape)


def whole_shape(parameter: torch.Tensor) -> Extent:
    """Return the shape of the unsplit parameter."""
    shard = shard_of(parameter)
    return tuple(parameter.shape) if shard is None else shard.global_shape


def parts_of(
    tensor: torch.Tensor, parameter: torch.Tensor, piece: Piece | None = None, *, counted: bool = False
) -> list[TensorPart]:
    """Return the parts of the unsplit parameter that a tensor covers.

    Args:
        tensor: the parameter itself, or a tensor of its shape (optimizer state, for example). If there is a piece, its
            elements in the order of memory, or a DTensor of them.
        parameter: this rank's parameter, a shard or whole.
        piece: stretch of the parameter that the flat tensor covers. None if the tensor covers all of it.
        counted: leave out parts that an earlier rank has too. This applies to pieces only, because their cuts differ
            between ranks. Replicas of whole tensors are the same parts on all ranks.
    """
    here = [TensorPart((0,) * parameter.dim(), tensor)] if piece is None else _parts_of_piece(tensor, parameter, piece)
    shard = shard_of(parameter)
    if shard is None:
        return here
    rank = shard.communicator.rank
    for dim, cut in shard.cuts:
        places = cut.places(rank)
        if counted and piece is not None and shard.replicated:
            places = {whole: place for whole, place in places.items() if cut.owner[whole] == rank}
        here = [
            moved
            for part in here
            for (begin, _), (start, stop) in places.items()
            if (moved := _moved(part, dim, start, stop, begin)) is not None
        ]
    return here


def _parts_of_piece(tensor: torch.Tensor, parameter: torch.Tensor, piece: Piece) -> list[TensorPart]:
    """Return the parts of a parameter that a stretch of its memory covers."""
    # The stretch is in the order of memory: row-major over the dimensions from the slowest to the fastest.
    strides = torch.empty_like(parameter, device="meta").stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(parameter.dim())]
    tensor, parts, begin = local(tensor).view(-1), [], 0
    for offset, size in boxes_of_stretch([parameter.size(dim) for dim in order], piece.start, piece.stop):
        view = tensor[begin : begin + prod(size)].view(size).permute(back)
        parts.append(TensorPart(tuple(offset[dim] for dim in back), view))
        begin += prod(size)
    return parts


def _moved(part: TensorPart, dim: int, start: int, stop: int, begin: int) -> TensorPart | None:
    """Return the overlap of a shard's part with [start, stop) of the shard, which is at `begin` in the whole."""
    first, last = max(part.offset[dim], start), min(part.offset[dim] + part.tensor.size(dim), stop)
    if first >= last:
        return None
    tensor = part.tensor.narrow(dim, first - part.offset[dim], last - first)
    return TensorPart((*part.offset[:dim], begin + first - start, *part.offset[dim + 1 :]), tensor)


def boxes_of_stretch(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Extent, Extent]]:
    """Yield (offset, size) of the boxes that cover elements start to stop, in row-major order.

    There are at most two boxes for each dimension but the slowest, and one more.

    Examples:
        >>> list(boxes_of_stretch((3, 4), 2, 9))
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
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
    """Return the intersection of two boxes in coordinates of the whole, or None if it is empty.

    Examples:
        >>> overlap((0, 2), (4, 4), (3, 0), (2, 4))
        (slice(3, 4, None), slice(2, 4, None))
    """
    begin = [max(a, b) for a, b in zip(offset, other, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, other, other_shape, strict=True)]
    if any(first >= last for first, last in zip(begin, end, strict=True)):
        return None
    return tuple(slice(first, last) for first, last in zip(begin, end, strict=True))


def seen_from(offset: Extent, box: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the box in coordinates that begin at `offset`."""
    return tuple(slice(side.start - begin, side.stop - begin) for begin, side in zip(offset, box, strict=True))
