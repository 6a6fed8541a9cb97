"""Gradients that know that other ranks hold the rest, so that a script's own norms and checks are of the whole model.

`torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and a norm written by hand read `.grad` and know nothing of
ranks. A gradient of this class takes part in the torch functions that they call (PyTorch docs, "Extending torch with a
Tensor-like type"). The parameters themselves stay plain, because optimizers take their fast paths for these alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator

_WAY_OUT = (
    "use gradient.as_subclass(torch.Tensor) for this rank's part, or weft.shard_of(parameter).gather(gradient) for the "
    "whole"
)


def watch_gradient(parameter: torch.Tensor) -> None:
    """Make every gradient that backward leaves in `.grad` a ShardedGradient. Call once the parameter is marked."""
    if getattr(parameter, "_weft_watched", False) or not isinstance(parameter, torch.nn.Parameter):
        return
    trains = parameter.requires_grad
    if not trains and not parameter.is_floating_point():
        return
    parameter.requires_grad_()  # hooks are not taken by what is frozen, and may be unfrozen later
    parameter.register_post_accumulate_grad_hook(mark_gradient)
    parameter.requires_grad_(trains)
    parameter._weft_watched = True  # type: ignore[attr-defined]


def mark_gradient(parameter: torch.Tensor) -> None:
    if type(parameter.grad) is torch.Tensor:
        parameter.grad = gradient_like(parameter, parameter.grad)


def gradient_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a ShardedGradient on the same memory; as it is for a parameter that every rank has whole."""
    shard, owners = getattr(parameter, "_weft_shard", None), getattr(parameter, "_weft_owners", None)
    if (shard is None and owners is None) or gradient.layout is not torch.strided:
        return gradient
    return _sharded(gradient, shard, owners)


def local(gradient: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the gradient's memory: this rank's part."""
    return gradient.as_subclass(torch.Tensor) if isinstance(gradient, ShardedGradient) else gradient


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient.

    Functions of each element act on this rank's part. Norms, sums, means, extremes, `any` and `all` over all elements
    are those of the whole gradient: a collective call. A function that mixes elements otherwise raises TypeError.

    Attributes:
        shard: the place in the whole gradient; None where this rank has all of it.
        owners: the stages of a pipeline that hold the parameter; None where the model is in one piece.
    """

    shard: Any  # weft.shard.Shard | None
    owners: Any  # weft.stages.owners.Owners | None

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        options = options or {}
        rule = _RULES.get(function)
        if rule is not None:
            return rule(function, arguments, options)
        name = function.__name__
        mixes = name in _MIXING or name.startswith("linalg_")
        if name in _JOINING or (mixes and any(_ranks_of(x) is not None for x in arguments)):
            raise TypeError(
                f"{name} of a gradient that is split over ranks would be that of this rank's part alone: {_WAY_OUT}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return _marked_again(function(*arguments, **options), arguments)

    def __reduce_ex__(self, protocol):
        return local(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return _sharded(local(self).clone(), self.shard, self.owners)


def _sharded(gradient: torch.Tensor, shard: Any, owners: Any) -> ShardedGradient:
    made = gradient.as_subclass(ShardedGradient)
    made.shard, made.owners = shard, owners
    return made


def _marked_again(result: Any, arguments: Sequence) -> Any:
    """What a function of each element returns is as much a part of a whole as its argument."""
    first = next((x for x in arguments if isinstance(x, ShardedGradient)), None)
    if first is not None and type(result) is torch.Tensor and result.numel() == first.numel():
        return _sharded(result, first.shard, first.owners)
    if arguments and isinstance(arguments[0], list | tuple) and isinstance(result, list | tuple):
        pairs = zip(result, arguments[0], strict=False)
        return [_marked_again(one, (given,)) if isinstance(one, torch.Tensor) else one for one, given in pairs]
    return result


def _counted(gradient: torch.Tensor) -> torch.Tensor:
    """Of this rank's part, the elements that no rank before has as well."""
    mine, shard = local(gradient), getattr(gradient, "shard", None)
    if shard is None or not shard.cut.replicated:
        return mine
    if tuple(mine.shape) != shard.shape:
        raise TypeError(
            f"several ranks have the same rows of this gradient {shard.shape}, and in the shape {tuple(mine.shape)} "
            f"these cannot be told: {_WAY_OUT}"
        )
    return shard.counted(mine)


def _ranks_of(gradient: torch.Tensor) -> Communicator | None:
    shard = getattr(gradient, "shard", None)
    return None if shard is None else shard.communicator


# Norms.


class _Norms(torch.Tensor):
    """Norms of gradients, a scalar or [n], each still of this rank's part.

    They are summed over the ranks when they are used: all in one collective where their own norm is taken, as
    torch.nn.utils.clip_grad_norm_ does.

    Attributes:
        gradients: shard and owners of each; None of one that every rank has whole.
        p: of the norm.
    """

    gradients: list[tuple[Any, Any]]
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
                gradients = [pair for x in first for pair in (x.gradients if isinstance(x, _Norms) else [(None, None)])]
                return _norms(torch.stack([x.as_subclass(torch.Tensor) for x in first]), gradients, p)
        if function in _MOVES or function.__name__ in ("__get__", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*arguments, **options)
            return _norms(result, first.gradients, first.p) if type(result) is torch.Tensor else result
        arguments, options = torch.utils._pytree.tree_map_only(_Norms, _Norms.each, (arguments, options))
        return function(*arguments, **options)

    def each(self) -> torch.Tensor:
        """The norms of the whole gradients. A collective call."""
        values = self.as_subclass(torch.Tensor).clone()
        flat = values.view(-1)
        of_shards: dict[Communicator, list[int]] = {}
        for place, (shard, _) in enumerate(self.gradients):
            if shard is not None:
                of_shards.setdefault(shard.communicator, []).append(place)
        largest = math.isinf(self.p)
        for ranks, places in of_shards.items():
            powers = flat[places].double() if largest else flat[places].double().pow(self.p)
            whole = joined_over(powers, ranks, largest)
            flat[places] = (whole if largest else whole.pow(1 / self.p)).to(flat.dtype)
        return values

    def together(self) -> torch.Tensor:
        """The norm of all gradients of the model, those of other stages included. A collective call."""
        flat = self.as_subclass(torch.Tensor).double().view(-1)
        largest = math.isinf(self.p)
        powers = flat if largest else flat.pow(self.p)
        parts, stages = [], set()
        for power, (shard, owners) in zip(powers, self.gradients, strict=True):
            counts = owners is None or owners.counts
            parts.append((power if counts else torch.zeros_like(power), shard and shard.communicator))
            if owners is not None:
                stages.add(owners.ranks)
        if len(stages) > 1:
            raise TypeError("the norm of gradients of several pipelines together: take each pipeline's alone")
        total = over_ranks(parts, list(stages), torch.zeros_like(powers[0]), largest)
        return (total if largest else total.pow(1 / self.p)).to(self.dtype)


def _norms(values: torch.Tensor, gradients: list, p: float) -> _Norms:
    made = values.as_subclass(_Norms)
    made.gradients, made.p = gradients, p
    return made


def _only_p(function: Callable, arguments: Sequence, options: dict) -> float | None:
    """The p of a norm over all elements; None where other options are given."""
    given = dict(zip(_NORMS[function], arguments[1:], strict=False)) | options
    p = given.pop("ord" if "ord" in given else "p", 2.0)
    p = 2.0 if p in (None, "fro") else p
    others = [name for name, value in given.items() if value is not None and value is not False and name != "dtype"]
    return None if others or isinstance(p, str) else float(p)


def _norm(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
    gradient, p = arguments[0], _only_p(function, arguments, options)
    if p is None and gradient.shard is None:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)
    if p is None or not p > 0:
        raise TypeError(f"the norm of a gradient that is split over ranks is of all its elements: {_WAY_OUT}")
    norm = torch.linalg.vector_norm(_counted(gradient), p, dtype=options.get("dtype"))
    return _norms(norm, [(gradient.shard, gradient.owners)], p)


def _foreach_norm(function: Callable, arguments: Sequence, options: dict) -> list[torch.Tensor]:
    gradients, *others = arguments
    norms = function([_counted(gradient) for gradient in gradients], *others, **options)
    p = float(others[0] if others else options.get("ord", 2))
    return [
        _norms(norm, [(one.shard, one.owners)], p) if isinstance(one, ShardedGradient) else norm
        for norm, one in zip(norms, gradients, strict=True)
    ]


# Reductions of all elements.


def _reduction(combine: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def reduce(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
        gradient, *others = arguments
        ranks = _ranks_of(gradient)
        if ranks is None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **options)
        if others or any(name != "dtype" for name in options):
            raise TypeError(
                f"{function.__name__} of a gradient that is split over ranks, other than of all its elements, would be "
                f"that of this rank's part alone: {_WAY_OUT}"
            )
        counted = _counted(gradient)
        if function in _MEANS:
            wide = torch.promote_types(counted.dtype, torch.float32)
            total = over_ranks([(counted.sum(dtype=wide), ranks)], [], counted.new_zeros((), dtype=wide))
            return (total / math.prod(gradient.shard.global_shape)).to(options.get("dtype") or gradient.dtype)
        mine = function(counted, **options)
        sent = mine.to(torch.uint8) if mine.dtype == torch.bool else mine
        return combine(ranks.all_gather(sent.reshape(1), 0, [1] * ranks.world)).to(mine.dtype)

    return reduce


def _found_overflow(function: Callable, arguments: Sequence, options: dict) -> None:
    """GradScaler's: unscales gradients, and notes whether one overflowed; on any rank."""
    gradients, found, inverse = arguments
    function([local(gradient) for gradient in gradients], found, inverse, **options)
    groups = dict.fromkeys(_ranks_of(one) for one in gradients)
    groups |= dict.fromkeys(one.owners.ranks for one in gradients if isinstance(one, ShardedGradient) and one.owners)
    for ranks in groups:
        if ranks is not None:
            ranks.all_reduce_(found, dist.ReduceOp.MAX)


def joined_over(x: torch.Tensor, ranks: Communicator, largest: bool) -> torch.Tensor:
    """The ranks' sum of x, or each element's largest. NaN stays NaN. A collective call."""
    if not largest:
        return ranks.all_reduce_(x)
    return ranks.all_gather(x.reshape(1, -1), 0, [1] * ranks.world).amax(0).reshape(x.shape)


def over_ranks(
    parts: Iterable[tuple[torch.Tensor, Communicator | None]],
    then: Sequence[Communicator],
    like: torch.Tensor,
    largest: bool = False,
) -> torch.Tensor:
    """The sum of the parts, or the largest; the same on every rank. A collective call.

    Args:
        parts: numbers, each with the ranks that have others of the same tensors; None: every rank has the same.
        then: over whose ranks all of it is summed in the end.
        like: of the type and device of the result, where there are no parts.
        largest: of infinite norms. NaN stays NaN.
    """

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y) if largest else x + y

    total = torch.zeros_like(like)
    of_shards: dict[Communicator, torch.Tensor] = {}
    for part, ranks in parts:
        if ranks is None:
            total = joined(total, part)
        else:
            of_shards[ranks] = joined(of_shards.get(ranks, torch.zeros_like(like)), part)
    for ranks, part in of_shards.items():
        total = joined(total, joined_over(part, ranks, largest))
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
