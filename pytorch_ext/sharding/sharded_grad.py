"""Gradients that know that other ranks hold the rest, so that a script's own norms and checks are of the whole model.

`torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and a norm written by hand read `.grad` and know nothing of
ranks. A gradient of this class takes part in the torch functions that they call (PyTorch docs, "Extending torch with a
Tensor-like type"). The parameters themselves stay plain, because optimizers take their fast paths for these alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from weft.comm.communicator import Communicator
from weft.metadata import metadata, set_metadata

_WAY_OUT = (
    "use gradient.as_subclass(torch.Tensor) for this rank's part, or weft.shard_of(parameter).gather(gradient) for the "
    "whole"
)


def watch_gradient(parameter: torch.Tensor) -> None:
    """Make every gradient that backward leaves in `.grad` a ShardedGradient. Call once the parameter is marked."""
    if metadata(parameter, "watched") or not isinstance(parameter, torch.nn.Parameter):
        return
    trains = parameter.requires_grad
    if not trains and not parameter.is_floating_point():
        return
    parameter.requires_grad_()  # hooks are not taken by what is frozen, and may be unfrozen later
    parameter.register_post_accumulate_grad_hook(mark_gradient)
    parameter.requires_grad_(trains)
    set_metadata(parameter, "watched", True)


def mark_gradient(parameter: torch.Tensor) -> None:
    """The hook: runs when backward has accumulated into `.grad`."""
    if type(parameter.grad) is torch.Tensor:
        parameter.grad = gradient_like(parameter, parameter.grad)


def gradient_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a ShardedGradient on the same memory; as it is for a parameter that every rank has whole."""
    place = place_for(parameter)
    return gradient if place.is_whole or gradient.layout is not torch.strided else _sharded(gradient, place)


def gradient_elsewhere(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """What stands in `.grad` where the gradient is that of a sharded optimizer's piece; it needs no memory."""
    made = parameter.new_zeros(()).expand(parameter.shape).as_subclass(GradientElsewhere)
    made.piece = piece
    return made


class GradientPlace(NamedTuple):
    """Where a gradient stands in the whole model's.

    Attributes:
        shard: weft.shard.Shard | None, the place in the whole parameter under tensor parallelism.
        piece: weft.data_parallel.sharded_optimizer.Piece | None, the place in that under a sharded optimizer.
        owners: weft.sharding.owners.Owners | None, the stages of a pipeline that hold the parameter.
    """

    shard: Any
    piece: Any
    owners: Any

    @property
    def is_whole(self) -> bool:
        return self.shard is None and self.piece is None and self.owners is None

    @property
    def ranks(self) -> tuple[Communicator, ...]:
        """Those over whose ranks parts are summed, one after another, to be the whole parameter's."""
        pieces = () if self.piece is None else (self.piece.ranks,)
        return pieces if self.shard is None else (*pieces, self.shard.communicator)

    def counted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Of this rank's part, the elements that no rank of the shard's before has as well."""
        if self.shard is None or not self.shard.cut.replicated:
            return gradient
        if self.piece is None and tuple(gradient.shape) != self.shard.shape:
            raise TypeError(
                f"several ranks have the same rows of this gradient {self.shard.shape}, and in the shape "
                f"{tuple(gradient.shape)} these cannot be told: {_WAY_OUT}"
            )
        if self.piece is None:
            return self.shard.counted(gradient)
        base = self.piece.parameter
        mine = torch.zeros_like(base, dtype=torch.bool)
        for start, stop in self.shard.cut.owned(self.shard.communicator.rank):
            mine.narrow(self.shard.dim, start, stop - start).fill_(True)
        in_memory = mine.as_strided((mine.numel(),), (1,))
        return gradient[in_memory[self.piece.start : self.piece.stop]]


WHOLE = GradientPlace(None, None, None)


def place_for(parameter: torch.Tensor) -> GradientPlace:
    """Where the parameter's gradient stands, or that of a piece of one."""
    piece = metadata(parameter, "piece")
    whole = parameter if piece is None else piece.parameter
    return GradientPlace(metadata(whole, "shard"), piece, metadata(whole, "owners"))


def place_of(gradient: torch.Tensor) -> GradientPlace:
    """Where a gradient that knows its place stands; WHOLE for a plain tensor."""
    return gradient.place if isinstance(gradient, ShardedGradient) else WHOLE


def local(gradient: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the gradient's memory: this rank's part."""
    return gradient.as_subclass(torch.Tensor) if isinstance(gradient, ShardedGradient) else gradient


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient.

    Functions of each element act on this rank's part. Norms, sums, means, extremes, `any` and `all` over all elements
    are those of the whole gradient: a collective call. A function that mixes elements otherwise raises TypeError.

    Attributes:
        place: in the whole model's gradient.
    """

    place: GradientPlace

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        rule = _RULES.get(function)
        if rule is not None:
            return rule(function, arguments, options)
        name = function.__name__
        mixes = name in _MIXING or name.startswith("linalg_")
        if name in _JOINING or (mixes and any(place_of(x).ranks for x in arguments)):
            raise TypeError(
                f"{name} of a gradient that is split over ranks would be that of this rank's part alone: {_WAY_OUT}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return _marked_again(function(*arguments, **options), arguments)

    def refuse_to_join(self, what: str, members: Iterable[int]) -> None:
        """Raise TypeError where some of these ranks have other parts. The backend asks before a sum over them."""
        owners = () if self.place.owners is None else (self.place.owners.ranks,)
        for ranks in (*self.place.ranks, *owners):
            others = sorted(set(dist.get_process_group_ranks(ranks.group)) & set(members))
            if len(others) > 1:
                raise TypeError(
                    f"{what} of a gradient over ranks {others}, which have different parts of the model: sum over "
                    'those that have the same, group=mesh["dp"].get_group()'
                )

    def __reduce_ex__(self, protocol):
        return local(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return _sharded(local(self).clone(), self.place)


def _sharded(gradient: torch.Tensor, place: GradientPlace) -> ShardedGradient:
    made = gradient.as_subclass(ShardedGradient)
    made.place = place
    return made


class GradientElsewhere(torch.Tensor):
    """Stands for the gradient of a parameter whose optimizer is sharded: functions get that of this rank's piece.

    Attributes:
        piece: the parameter that the optimizer has in this one's place.
    """

    piece: torch.Tensor

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        if function.__name__ == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **options)
        arguments, options = tree_map_only(GradientElsewhere, lambda x: x.piece.grad, (arguments, options))
        return function(*arguments, **options)


def _marked_again(result: Any, arguments: Sequence) -> Any:
    """Mark the result of a function of each element: it is as much a part of a whole as the argument."""
    first = next((x for x in arguments if isinstance(x, ShardedGradient)), None)
    if first is not None and type(result) is torch.Tensor and result.numel() == first.numel():
        return _sharded(result, first.place)
    if arguments and isinstance(arguments[0], list | tuple) and isinstance(result, list | tuple):
        pairs = zip(result, arguments[0], strict=False)
        return [_marked_again(one, (given,)) if isinstance(one, torch.Tensor) else one for one, given in pairs]
    return result


def _counted(gradient: torch.Tensor) -> torch.Tensor:
    return place_of(gradient).counted(local(gradient))


# Norms.


class _Norms(torch.Tensor):
    """Norms of gradients, a scalar or [n], each still of this rank's part.

    They are summed over the ranks when they are used: all in one collective where their own norm is taken, as
    torch.nn.utils.clip_grad_norm_ does.

    Attributes:
        places: of each gradient.
        p: of the norm.
    """

    places: list[GradientPlace]
    p: float

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        first = arguments[0]
        if function in _NORMS and isinstance(first, _Norms) and _only_p(function, arguments, options) == first.p:
            return first.together()
        if function is torch.stack and len(arguments) == 1 and options.get("dim", 0) == 0:
            p = next(x.p for x in first if isinstance(x, _Norms))
            if all(x.dim() == 0 and (not isinstance(x, _Norms) or x.p == p) for x in first):
                places = [place for x in first for place in (x.places if isinstance(x, _Norms) else [WHOLE])]
                return _norms(torch.stack([x.as_subclass(torch.Tensor) for x in first]), places, p)
        if function in _MOVES or function.__name__ in ("__get__", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*arguments, **options)
            return _norms(result, first.places, first.p) if type(result) is torch.Tensor else result
        arguments, options = tree_map_only(_Norms, _Norms.each, (arguments, options))
        return function(*arguments, **options)

    def each(self) -> torch.Tensor:
        """The norms of the whole gradients. A collective call."""
        values = self.as_subclass(torch.Tensor).clone()
        flat = values.view(-1)
        of_parts: dict[tuple[Communicator, ...], list[int]] = {}
        for number, place in enumerate(self.places):
            if place.ranks:
                of_parts.setdefault(place.ranks, []).append(number)
        largest = math.isinf(self.p)
        for ranks, numbers in of_parts.items():
            powers = flat[numbers].double() if largest else flat[numbers].double().pow(self.p)
            for group in ranks:
                powers = joined_over(powers, group, largest)
            flat[numbers] = (powers if largest else powers.pow(1 / self.p)).to(flat.dtype)
        return values

    def together(self) -> torch.Tensor:
        """The norm of all gradients of the model, those of other stages included. A collective call."""
        flat = self.as_subclass(torch.Tensor).double().view(-1)
        largest = math.isinf(self.p)
        powers = flat if largest else flat.pow(self.p)
        stages = {place.owners.ranks for place in self.places if place.owners is not None}
        if len(stages) > 1:
            raise TypeError("the norm of gradients of several pipelines together: take each pipeline's alone")
        parts = [
            (power if place.owners is None or place.owners.counts else torch.zeros_like(power), place.ranks)
            for power, place in zip(powers, self.places, strict=True)
        ]
        total = over_ranks(parts, list(stages), torch.zeros_like(powers[0]), largest)
        return (total if largest else total.pow(1 / self.p)).to(self.dtype)


def _norms(values: torch.Tensor, places: list[GradientPlace], p: float) -> _Norms:
    made = values.as_subclass(_Norms)
    made.places, made.p = places, p
    return made


def _only_p(function: Callable, arguments: Sequence, options: dict) -> float | None:
    """The p of a norm over all elements; None where other options are given, or a norm of matrices."""
    given = dict(zip(_NORMS[function], arguments[1:], strict=False)) | options
    if function is torch.linalg.norm and given.get("ord") is not None and arguments[0].dim() > 1:
        return None
    p = given.pop("ord" if "ord" in given else "p", 2.0)
    p = 2.0 if p in (None, "fro") else p
    others = [name for name, value in given.items() if value is not None and value is not False and name != "dtype"]
    return None if others or isinstance(p, str) else float(p)


def _norm(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
    gradient, p = arguments[0], _only_p(function, arguments, options)
    if p is None and not gradient.place.ranks:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)
    if p is None or not p > 0:
        raise TypeError(f"the norm of a gradient that is split over ranks is of all its elements: {_WAY_OUT}")
    return _norms(_local_norm(gradient, p, options.get("dtype")), [gradient.place], p)


def _local_norm(gradient: torch.Tensor, p: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    counted = _counted(gradient)
    if not counted.numel():  # of which torch takes no largest element
        return counted.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(counted, p, dtype=dtype)


def _foreach_norm(function: Callable, arguments: Sequence, options: dict) -> list[torch.Tensor]:
    gradients, *others = arguments
    p = float(others[0] if others else options.get("ord", 2))
    return [
        _norms(norm, [one.place], p) if isinstance(one, ShardedGradient) else norm
        for one in gradients
        for norm in [_local_norm(one, p, options.get("dtype"))]
    ]


# Reductions of all elements.


def _reduction(combine: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def reduce(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
        gradient, *others = arguments
        place = place_of(gradient)
        if not place.ranks:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **options)
        if others or any(name != "dtype" for name in options):
            raise TypeError(
                f"{function.__name__} of a gradient that is split over ranks, other than of all its elements, would be "
                f"that of this rank's part alone: {_WAY_OUT}"
            )
        # An extreme may see an element twice, and sees where two ranks' copies of it differ.
        part = _counted(gradient) if combine is torch.sum else local(gradient)
        if function in _MEANS:
            sums = torch.stack([part.sum(dtype=torch.float64), torch.ones_like(part).sum(dtype=torch.float64)])
            for ranks in place.ranks:
                sums = ranks.all_reduce_(sums)
            return (sums[0] / sums[1]).to(options.get("dtype") or gradient.dtype)
        mine = function(part, **options) if part.numel() or combine is torch.sum else _extreme_of_none(function, part)
        for ranks in place.ranks:
            sent = mine.to(torch.uint8) if mine.dtype == torch.bool else mine
            mine = combine(ranks.all_gather(sent.reshape(1), 0, [1] * ranks.world_size)).to(mine.dtype)
        return mine

    return reduce


def _extreme_of_none(function: Callable, part: torch.Tensor) -> torch.Tensor:
    """What changes no other rank's extreme."""
    if function.__name__ in ("any", "all"):
        return function(part)
    lowest = function.__name__ in ("max", "amax")
    limits = torch.finfo(part.dtype) if part.is_floating_point() else torch.iinfo(part.dtype)
    return part.new_full((), limits.min if lowest else limits.max)


def _found_overflow(function: Callable, arguments: Sequence, options: dict) -> None:
    """GradScaler's: unscales gradients, and notes whether one overflowed; on any rank."""
    gradients, found, inverse = arguments
    function([local(gradient) for gradient in gradients], found, inverse, **options)
    places = [place_of(gradient) for gradient in gradients]
    groups = dict.fromkeys(ranks for place in places for ranks in place.ranks)
    for ranks in groups | dict.fromkeys(place.owners.ranks for place in places if place.owners is not None):
        ranks.all_reduce_(found, dist.ReduceOp.MAX)


def joined_over(x: torch.Tensor, ranks: Communicator, largest: bool) -> torch.Tensor:
    """The ranks' sum of x, or each element's largest. NaN stays NaN. A collective call."""
    if not largest:
        return ranks.all_reduce_(x)
    return ranks.all_gather(x.reshape(1, -1), 0, [1] * ranks.world_size).amax(0).reshape(x.shape)


def over_ranks(
    parts: Iterable[tuple[torch.Tensor, tuple[Communicator, ...]]],
    then: Sequence[Communicator],
    like: torch.Tensor,
    largest: bool = False,
) -> torch.Tensor:
    """The sum of the parts, or the largest; the same on every rank. A collective call.

    Args:
        parts: numbers, each with the groups whose ranks have others of the same tensors; none: every rank has the same.
        then: over whose ranks all of it is summed in the end.
        like: of the type and device of the result, where there are no parts.
        largest: of infinite norms. NaN stays NaN.
    """

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y) if largest else x + y

    total = torch.zeros_like(like)
    of_groups: dict[tuple[Communicator, ...], torch.Tensor] = {}
    for part, groups in parts:
        of_groups[groups] = joined(of_groups.get(groups, torch.zeros_like(like)), part)
    for groups, part in of_groups.items():
        for ranks in groups:
            part = joined_over(part, ranks, largest)
        total = joined(total, part)
    for ranks in then:
        total = joined_over(total, ranks, largest)
    return total


_T = torch.Tensor
_MOVES = {_T.to, _T.cpu, _T.cuda, _T.double, _T.float, _T.detach}
_NORMS: dict[Callable, tuple[str, ...]] = {  # with the names of what follows the tensor
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim"),
    _T.norm: ("p", "dim", "keepdim"),
}
_MEANS: set[Callable] = {torch.mean, _T.mean}
_RULES: dict[Callable, Callable] = {
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _found_overflow,
    **dict.fromkeys((torch.sum, _T.sum, torch.count_nonzero, _T.count_nonzero), _reduction(torch.sum)),
    **dict.fromkeys(_MEANS, _reduction(torch.sum)),
    **dict.fromkeys((torch.max, _T.max, torch.amax, _T.amax, torch.any, _T.any), _reduction(torch.max)),
    **dict.fromkeys((torch.min, _T.min, torch.amin, _T.amin, torch.all, _T.all), _reduction(torch.min)),
}
_JOINING = {"cat", "concat", "stack"}  # with gradients of other parameters, which other ranks may have
_MIXING = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot"),
    *("addmm", "addmm_", "baddbmm", "baddbmm_", "svd", "qr", "softmax", "log_softmax"),
    *("cumsum", "sort", "argsort", "topk", "kthvalue", "median", "quantile", "std", "var", "argmax", "argmin"),
}
