"""Parameters for use with parts of a sequence; their gradients are summed over the parts of all ranks."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from weft.ops.backward import RankFunction, first_order
from weft.ops.invariant import Units, add_in_tree, tree_sum
from weft.ops.unit_parameters import ParameterOfUnits, parameter_of_units

_BUCKET_BYTES = 25 << 20  # of parameters whose gradients travel together
_BYTES_OF_UNITS = 1 << 18  # the same, where each unit of the batch has gradients of its own


def give_out(ranks, units: int | None, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters once for each part of the sequence here.

    Args:
        units: number of parts on all ranks; None: each rank has one.
    """
    parts = 1 if units is None else units // ranks.world_size
    sums = None
    if units is not None:
        of_batch = [parameter_of_units(parameter, product=False) for parameter in parameters]
        if of_batch[0] is not None:
            sums = _SumsOfParts(ranks, units, parameters, of_batch)  # type: ignore[arg-type]
    with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):  # the forward may turn gradients on
        made = _GivenOut.apply(ranks, units, parts, sums, *parameters)
    given_out = [list(made[first : first + len(parameters)]) for first in range(0, len(made), len(parameters))]
    for part in given_out:
        for parameter, x in zip(parameters, part, strict=True):
            vars(x).update(vars(parameter))
            x._is_param = True  # for isinstance
        if sums is not None:
            sums.add_part(part)
    return given_out


class _GivenOut(RankFunction):
    """y_part,i = p_i for each parameter, once for each part of the sequence here.

    backward  dp_i = sum over the parts of all ranks of dy_part,i, of all parameters at once: an all_reduce, or of units
              their tree. A parameter without a gradient on any rank gets none. Where several units of the batch run at
              once, each has such a sum, and functions have left the gradients elsewhere.
    """

    @staticmethod
    def forward(ctx, ranks, units, parts, sums, *parameters):
        ctx.ranks, ctx.units, ctx.sums = ranks, units, sums
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple([p.view_as(p) for _ in range(parts) for p in parameters])

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        count = len(ctx.like)
        if ctx.sums is not None:
            ctx.sums.finish()
            return *[None] * 4, *[None] * count
        of_parts = [gradients[first : first + count] for first in range(0, len(gradients), count)]
        return *[None] * 4, *_summed(ctx.ranks, ctx.units, ctx.like, of_parts)


class _SumsOfParts:
    """Gradients of parameters by unit of the batch, summed over the units of the sequence as soon as they are complete.

    Args:
        of_batch: takes the sums of each parameter.
    """

    def __init__(self, ranks, units: int, parameters: Sequence[torch.Tensor], of_batch: Sequence[ParameterOfUnits]):
        self._ranks, self._units, self._of_batch = ranks, units, of_batch
        self._like = [(p.shape, p.dtype, p.device) for p in parameters]
        self._parts: list[list[ParameterOfUnits]] = []
        self._begin()

    def _begin(self) -> None:
        self._missing = [len(self._parts)] * len(self._of_batch)  # parts whose gradient is not complete
        self._ready: list[int] = []
        self._bytes = 0

    def add_part(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients that come to a part's parameters."""
        count, made = self._of_batch[0].count, []
        for number, x in enumerate(parameters):
            made.append(ParameterOfUnits(x, count, None, partial(self._complete, number)))
        self._parts.append(made)
        self._begin()

    def _complete(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            shape, dtype, _ = self._like[number]
            self._ready.append(number)
            self._bytes += shape.numel() * dtype.itemsize
            if self._bytes >= _BYTES_OF_UNITS:
                self._add_up()

    def _add_up(self) -> None:
        numbers, self._ready, self._bytes = self._ready, [], 0
        by_unit = [[part[number].by_unit() for number in numbers] for part in self._parts]
        batch = range(self._of_batch[0].count)
        of_parts = [[x[unit] for unit in batch for x in part] for part in by_unit]
        sums = _summed(self._ranks, self._units, [self._like[n] for _ in batch for n in numbers], of_parts)
        for place, number in enumerate(numbers):
            self._of_batch[number].put(sums[place :: len(numbers)])

    def finish(self) -> None:
        """Sum what is left, and begin anew."""
        self._ready += [number for number, missing in enumerate(self._missing) if missing]
        if self._ready:
            self._add_up()
        self._begin()


def _summed(ranks, units: int | None, like: Sequence, of_parts: Sequence[Sequence[torch.Tensor | None]]) -> list:
    """Return the sums of gradients over the parts of all ranks. A collective call.

    Args:
        units: as `give_out`.
        like: shape, type and device of each gradient.
        of_parts: the gradients of each part here.
    """
    sums: list[torch.Tensor | None] = [None] * len(like)
    if ranks.world_size == 1 and units is not None:
        for index, (_, dtype, _) in enumerate(like):
            wide = torch.promote_types(dtype, torch.float32)
            total = add_in_tree([x if (x := part[index]) is None else x.to(wide) for part in of_parts])
            sums[index] = None if total is None else total.to(dtype)
        return sums
    of_type: dict[torch.dtype, list[int]] = {}
    for index, (_, dtype, _) in enumerate(like):
        of_type.setdefault(dtype, []).append(index)
    for dtype, indices in of_type.items():
        sizes = [like[index][0].numel() for index in indices]
        flats = []
        for gradients in of_parts:
            flat = torch.empty(sum(sizes) + len(indices), dtype=dtype, device=like[indices[0]][2])
            *places, used = flat.split([*sizes, len(indices)])
            used.copy_(torch.tensor([gradients[index] is not None for index in indices]))
            for index, place in zip(indices, places, strict=True):
                gradient = gradients[index]
                place.zero_() if gradient is None else place.view(gradient.shape).copy_(gradient)
            flats.append(flat)
        total = ranks.all_reduce_(flats[0]) if units is None else tree_sum(ranks, Units(units), flats, overwrite=True)
        *places, used = total.split([*sizes, len(indices)])
        for index, place, by_some in zip(indices, places, used.tolist(), strict=True):
            sums[index] = place.view(like[index][0]) if by_some else None
    return sums


def buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in groups, so that the gradients of one are summed while those of the next are computed."""
    bucket: list[torch.Tensor] = []
    bytes = 0
    for parameter in parameters:
        bucket.append(parameter)
        bytes += parameter.nbytes
        if bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, bytes = [], 0
    if bucket:
        yield bucket
