"""Gradients that know the other ranks' parts, so that a script's own norms and checks cover the whole model.

`torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and a norm written by hand read `.grad` and know nothing of
ranks. A split gradient has a rule for the torch functions that they call, its GradientPlace. The parameters stay plain
tensors, because optimizers take their fast paths only for these.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft.comm.communicator import Communicator
from weft.comm.purpose import calls_for
from weft.metadata import ATTRIBUTE, metadata, set_metadata
from weft.sharding.ruled_tensor import RuledTensor, TensorRule, plain, rule_of, ruled, unruled

_WAY_OUT = (
    "use gradient.as_subclass(torch.Tensor) for this rank's part, or weft.shard_of(parameter).gather(gradient) for the "
    "whole"
)

watched = 0  # parameters so far that are watched
when_watched: list[Callable[[], object]] = []  # called for each of them
_NONE: dict[str, Any] = {}
_marked: dict[int, list[torch.Tensor]] = {}  # autograd's number of a backward to the parameters that it has reached
_OVER_RANKS = (
    "the {} of a split gradient, which is over all its ranks: take it on each of them, or of "
    "gradient.as_subclass(torch.Tensor), this rank's part"
)


def watch_gradient(parameter: torch.Tensor) -> None:
    """Give every gradient that backward leaves in `.grad` its place. Call it after the parameter is marked."""
    if metadata(parameter, "watched") or not isinstance(parameter, torch.nn.Parameter):
        return
    trains = parameter.requires_grad
    if not trains and not parameter.is_floating_point():
        return
    parameter.requires_grad_()  # torch refuses hooks on frozen parameters, which may be unfrozen later
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:
        parameter._post_accumulate_grad_hooks = hooks  # torch.utils.swap_tensors leaves them without effect
    if hooks is None or mark_gradient not in hooks.values():
        parameter.register_post_accumulate_grad_hook(mark_gradient)
    parameter.requires_grad_(trains)
    set_metadata(parameter, "watched", True)
    for call in when_watched:
        call()
    global watched
    watched += 1


def mark_gradient(parameter: torch.Tensor) -> None:
    """Give `.grad` its place. This is the hook that runs when backward has accumulated into `.grad`."""
    gradient = parameter.grad
    if type(gradient) is torch.Tensor or type(gradient) is DTensor:
        parameter.grad = gradient_like(parameter, gradient)
    if isinstance(gradient, DTensor):  # FSDP2 calls the hook when it has reduced the gradient, at the end of all
        return
    task = torch._C._current_graph_task_id()
    if task not in _marked:
        for ended in list(_marked)[:-8]:  # by an error
            del _marked[ended]
        _marked[task] = []
        Variable._execution_engine.queue_callback(partial(_mark_again, task))  # type: ignore[attr-defined]
    _marked[task].append(parameter)


def _mark_again(task: int) -> None:
    """Mark at the end of backward what was replaced since: DistributedDataParallel puts views of its buckets there."""
    for parameter in _marked.pop(task, ()):
        if type(parameter.grad) is torch.Tensor:
            parameter.grad = gradient_like(parameter, parameter.grad)


def gradient_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with its place, on the same memory; unchanged if every rank has the whole parameter."""
    marks = parameter.__dict__.get(ATTRIBUTE, _NONE)
    place = marks.get("place") or place_for(parameter)
    if place is WHOLE or gradient.layout is not torch.strided:
        return gradient
    if type(gradient) is not torch.Tensor:
        return ruled(gradient, place)
    made = gradient.as_subclass(RuledTensor)
    made.rule = place
    return made


def gradient_elsewhere(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Return the placeholder for `.grad` of a parameter with a sharded optimizer. It needs no memory.

    Args:
        piece: the sharded optimizer's parameter, which has the gradient.
    """
    return ruled(parameter.new_zeros(()).expand(parameter.shape), GradientElsewhere(piece))


@dataclass(frozen=True, eq=False)
class GradientPlace(TensorRule):
    """Place of a gradient in the whole model's gradient: the rule of this rank's part.

    Elementwise functions act on this rank's part. Norms, sums, means, extremes, `any` and `all` over all elements are
    collective calls and cover the whole gradient. Any other function that mixes elements raises TypeError.

    Attributes:
        shard: weft.sharding.shard.Shard | None, the place in the whole parameter under tensor parallelism.
        piece: weft.data_parallel.sharded_optimizer.Piece | None, the place in that shard under a sharded optimizer.
        owners: weft.sharding.owners.Owners | None, the stages of a pipeline that hold the parameter.
    """

    shard: Any
    piece: Any
    owners: Any

    def function(self, function, types, arguments, options):
        rule = _RULES.get(function)
        if rule is not None:
            return rule(function, arguments, options)
        name = function.__name__
        mixes = name in _MIXING or name.startswith("linalg_")
        if name in _JOINING or (mixes and any(place_of(x).ranks for x in arguments)):
            raise TypeError(
                f"{name} of a gradient that is split over ranks would be that of this rank's part alone: {_WAY_OUT}"
            )
        return _marked_again(unruled(function, arguments, options), arguments)

    def refuse_to_join(self, operation: str, members: Iterable[int]) -> None:
        owners = () if self.owners is None else (self.owners.ranks,)
        for ranks in (*self.ranks, *owners):
            others = sorted(set(dist.get_process_group_ranks(ranks.group)) & set(members))
            if len(others) > 1:
                raise TypeError(
                    f"{operation} of a gradient over ranks {others}, which have different parts of the model: sum over "
                    'those that have the same, group=mesh["dp"].get_group()'
                )

    @property
    def ranks(self) -> tuple[Communicator, ...]:
        """Groups to sum over, one after another, to get from this part to the whole parameter."""
        pieces = () if self.piece is None else (self.piece.ranks,)
        return pieces if self.shard is None else (*pieces, self.shard.communicator)

    def counted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the elements of this rank's part that no earlier rank of the shard has."""
        if self.shard is None or not self.shard.replicated:
            return gradient
        if self.piece is None and tuple(gradient.shape) != self.shard.shape:
            raise TypeError(
                f"several ranks have the same rows of this gradient {self.shard.shape}, and in the shape "
                f"{tuple(gradient.shape)} these rows cannot be found: {_WAY_OUT}"
            )
        if self.piece is None:
            return self.shard.counted(gradient)
        base = self.piece.parameter
        owned = torch.zeros_like(base, dtype=torch.bool, device=gradient.device)
        for start, stop in self.shard.cut.owned(self.shard.communicator.rank):
            owned.narrow(self.shard.dim, start, stop - start).fill_(True)
        in_memory = owned.as_strided((owned.numel(),), (1,))
        return gradient.reshape(-1)[in_memory[self.piece.start : self.piece.stop]]


WHOLE = GradientPlace(None, None, None)


def place_for(parameter: torch.Tensor) -> GradientPlace:
    """Return the place of the gradient of a parameter, or of a sharded optimizer's piece; WHOLE for a whole one."""
    piece = metadata(parameter, "piece")
    whole = parameter if piece is None else piece.parameter
    shard, owners = metadata(whole, "shard"), metadata(whole, "owners")
    if shard is None and piece is None and owners is None:
        return WHOLE
    place = GradientPlace(shard, piece, owners)
    if piece is None:
        set_metadata(parameter, "place", place)
    return place


def place_of(gradient: torch.Tensor) -> GradientPlace:
    """Return the place of a gradient; WHOLE for a plain tensor."""
    return rule_of(gradient, GradientPlace) or WHOLE


def local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor on the gradient's memory."""
    return plain(gradient) if rule_of(gradient, GradientPlace) or isinstance(gradient, DTensor) else gradient


@dataclass(frozen=True, eq=False)
class GradientElsewhere(TensorRule):
    """Rule of a placeholder for the gradient of a parameter with a sharded optimizer: functions get that of the piece.

    Attributes:
        piece: this rank's piece, which the optimizer has in place of the parameter.
    """

    piece: torch.Tensor

    def function(self, function, types, arguments, options):
        if function.__name__ == "__get__":
            return unruled(function, arguments, options)

        def gradient(x: RuledTensor) -> torch.Tensor | None:
            return x.rule.piece.grad if is_elsewhere(x) else x

        arguments, options = tree_map_only(RuledTensor, gradient, (arguments, options))
        return function(*arguments, **options)


def is_elsewhere(gradient: torch.Tensor | None) -> bool:
    """Return whether a parameter's gradient is a placeholder."""
    return rule_of(gradient, GradientElsewhere) is not None


def _marked_again(result: Any, arguments: Sequence) -> Any:
    """Mark the result of an elementwise function with the place of its argument."""
    first = next((x for x in arguments if rule_of(x, GradientPlace)), None)
    if first is not None and type(result) in (torch.Tensor, DTensor) and result.numel() == first.numel():
        return ruled(result, first.rule)
    if arguments and isinstance(arguments[0], list | tuple) and isinstance(result, list | tuple):
        pairs = zip(result, arguments[0], strict=False)
        return [_marked_again(x, (given,)) if isinstance(x, torch.Tensor) else x for x, given in pairs]
    return result


def _counted(gradient: torch.Tensor) -> torch.Tensor:
    return place_of(gradient).counted(local(gradient))


# Norms.


@dataclass(frozen=True, eq=False)
class _Norms(TensorRule):
    """Rule of norms of gradients, a scalar or [n], each still of this rank's part only.

    They are summed over the ranks at their first use. If that use is the norm of these norms, as in
    torch.nn.utils.clip_grad_norm_, one collective sums all of them.

    Attributes:
        places: place of each gradient.
        p: order of the norm.
    """

    places: list[GradientPlace]
    p: float

    def function(self, function, types, arguments, options):
        first = arguments[0]
        if function in _NORMS and rule_of(first, _Norms) and _only_p(function, arguments, options) == self.p:
            return self.together(plain(first))
        if function is torch.stack and len(arguments) == 1 and options.get("dim", 0) == 0:
            rules = [rule_of(x, _Norms) for x in first]
            if all(x.dim() == 0 and (not rule or rule.p == self.p) for x, rule in zip(first, rules, strict=True)):
                places = [place for rule in rules for place in (rule.places if rule else [WHOLE])]
                return ruled(torch.stack([plain(x) for x in first]), _Norms(places, self.p))
        if function in _MOVES or (function.__name__ in ("__get__", "dim") and function != _BASE):
            result = unruled(function, arguments, options)
            return ruled(result, self) if type(result) is torch.Tensor else result

        def each(x: RuledTensor) -> torch.Tensor:
            return x.rule.each(plain(x)) if rule_of(x, _Norms) else x

        arguments, options = tree_map_only(RuledTensor, each, (arguments, options))
        return function(*arguments, **options)

    def each(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norm of each whole gradient. A collective call."""
        values = norms.clone()
        flat = values.view(-1)
        of_parts: dict[tuple[Communicator, ...], list[int]] = {}
        for number, place in enumerate(self.places):
            if place.ranks:
                of_parts.setdefault(place.ranks, []).append(number)
        largest = math.isinf(self.p)
        for ranks, numbers in of_parts.items():
            powers = flat[numbers].double() if largest else flat[numbers].double().pow(self.p)
            with calls_for(_OVER_RANKS.format("norm")):
                powers = joined_over(powers, ranks, largest)
            flat[numbers] = (powers if largest else powers.pow(1 / self.p)).to(flat.dtype)
        return values

    def together(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norm of all gradients of the model, including other stages. A collective call."""
        flat = norms.double().view(-1)
        largest = math.isinf(self.p)
        powers = flat if largest else flat.pow(self.p)
        stages = {place.owners.ranks for place in self.places if place.owners is not None}
        if len(stages) > 1:
            raise TypeError("the norm of gradients of several pipelines together: take each pipeline's alone")
        parts = [
            (power if place.owners is None or place.owners.counted_here else torch.zeros_like(power), place.ranks)
            for power, place in zip(powers, self.places, strict=True)
        ]
        with calls_for(_OVER_RANKS.format("norm")):
            total = over_ranks(parts, list(stages), torch.zeros_like(powers[0]), largest)
        return (total if largest else total.pow(1 / self.p)).to(norms.dtype)


def _only_p(function: Callable, arguments: Sequence, options: dict) -> float | None:
    """Return the p of a norm over all elements; None for a matrix norm or with other options."""
    given = dict(zip(_NORMS[function], arguments[1:], strict=False)) | options
    if function is torch.linalg.norm and given.get("ord") is not None and arguments[0].dim() > 1:
        return None
    p = given.pop("ord" if "ord" in given else "p", 2.0)
    p = 2.0 if p in (None, "fro") else p
    others = [name for name, value in given.items() if value is not None and value is not False and name != "dtype"]
    return None if others or isinstance(p, str) else float(p)


def _norm(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
    gradient, p = arguments[0], _only_p(function, arguments, options)
    place = place_of(gradient)
    if p is None and not place.ranks:
        return unruled(function, arguments, options)
    if p is None or not p > 0:
        raise TypeError(f"the norm of a gradient that is split over ranks is of all its elements: {_WAY_OUT}")
    return ruled(_local_norm(gradient, p, options.get("dtype")), _Norms([place], p))


def _local_norm(gradient: torch.Tensor, p: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    counted = _counted(gradient)
    if not counted.numel():  # torch takes no maximum of an empty tensor
        return counted.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(counted, p, dtype=dtype)


def _foreach_norm(function: Callable, arguments: Sequence, options: dict) -> list[torch.Tensor]:
    gradients, *others = arguments
    p = float(others[0] if others else options.get("ord", 2))
    return [
        ruled(norm, _Norms([place], p)) if (place := rule_of(gradient, GradientPlace)) else norm
        for gradient in gradients
        for norm in [_local_norm(gradient, p, options.get("dtype"))]
    ]


# Reductions of all elements.


def _reduction(combine: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def reduce(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor:
        gradient, *others = arguments
        place = place_of(gradient)
        if not place.ranks:
            return unruled(function, arguments, options)
        if others or any(name != "dtype" for name in options):
            raise TypeError(
                f"{function.__name__} of a gradient that is split over ranks, other than of all its elements, would be "
                f"that of this rank's part alone: {_WAY_OUT}"
            )
        # An extreme may count an element twice, and so shows a difference between two ranks' copies of it.
        part = _counted(gradient) if combine is torch.sum else local(gradient)
        with calls_for(_OVER_RANKS.format(function.__name__)):
            return joined(function, part, place.ranks, options)

    def joined(function: Callable, part: torch.Tensor, groups: Sequence[Communicator], options: dict) -> torch.Tensor:
        if function in _MEANS:
            sums = torch.stack([part.sum(dtype=torch.float64), torch.ones_like(part).sum(dtype=torch.float64)])
            sums = joined_over(sums, groups, largest=False)
            return (sums[0] / sums[1]).to(options.get("dtype") or part.dtype)
        total = function(part, **options) if part.numel() or combine is torch.sum else _extreme_of_none(function, part)
        for ranks in groups:
            sent = total.to(torch.uint8) if total.dtype == torch.bool else total
            total = combine(ranks.all_gather(sent.reshape(1), 0, [1] * ranks.world_size)).to(total.dtype)
        return total

    return reduce


def _extreme_of_none(function: Callable, part: torch.Tensor) -> torch.Tensor:
    """Return the extreme of an empty part, which leaves the other ranks' extreme unchanged."""
    if function.__name__ in ("any", "all"):
        return function(part)
    lowest = function.__name__ in ("max", "amax")
    limits = torch.finfo(part.dtype) if part.is_floating_point() else torch.iinfo(part.dtype)
    return part.new_full((), limits.min if lowest else limits.max)


def _found_overflow(function: Callable, arguments: Sequence, options: dict) -> None:
    """Unscale gradients for GradScaler, and record in `found` an overflow on any rank."""
    gradients, found, inverse = arguments
    function([local(gradient) for gradient in gradients], found, inverse, **options)
    places = [place_of(gradient) for gradient in gradients]
    groups = dict.fromkeys(ranks for place in places for ranks in place.ranks)
    with calls_for(_OVER_RANKS.format("overflow")):
        for ranks in groups | dict.fromkeys(place.owners.ranks for place in places if place.owners is not None):
            ranks.all_reduce_(found, dist.ReduceOp.MAX)


def joined_over(x: torch.Tensor, groups: Iterable[Communicator], largest: bool) -> torch.Tensor:
    """Return the sum of x over one group after another, or the maximum of each element. A collective call.

    NaN stays NaN.
    """
    for ranks in groups:
        if largest:
            x = ranks.all_gather(x.reshape(1, -1), 0, [1] * ranks.world_size).amax(0).reshape(x.shape)
        else:
            x = ranks.all_reduce_(x)
    return x


def over_ranks(
    parts: Iterable[tuple[torch.Tensor, tuple[Communicator, ...]]],
    then: Sequence[Communicator],
    like: torch.Tensor,
    largest: bool = False,
) -> torch.Tensor:
    """Return the sum of the parts, or their maximum; the same on every rank. A collective call.

    Args:
        parts: numbers, each with the groups to combine it over. No groups: every rank has the same number.
        then: groups to combine the total over at the end.
        like: a tensor with the type and device of the result, used if there are no parts.
        largest: take the maximum instead of the sum, for infinite norms. NaN stays NaN.
    """

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y) if largest else x + y

    total = torch.zeros_like(like)
    of_groups: dict[tuple[Communicator, ...], torch.Tensor] = {}
    for part, groups in parts:
        of_groups[groups] = joined(of_groups.get(groups, torch.zeros_like(like)), part)
    for groups, part in of_groups.items():
        total = joined(total, joined_over(part, groups, largest))
    return joined_over(total, then, largest)


def _base(function: Callable, arguments: Sequence, options: dict) -> torch.Tensor | None:
    """Return the tensor behind a view as it is: marked again, it would be a view with a tensor behind it."""
    return unruled(function, arguments, options)


_T = torch.Tensor
_BASE = _T._base.__get__  # type: ignore[union-attr]
_MOVES = {_T.to, _T.cpu, _T.cuda, _T.double, _T.float, _T.detach}
_NORMS: dict[Callable, tuple[str, ...]] = {  # to the names of the arguments after the tensor
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim"),
    _T.norm: ("p", "dim", "keepdim"),
}
_MEANS: set[Callable] = {torch.mean, _T.mean}
_RULES: dict[Callable, Callable] = {
    **dict.fromkeys(_NORMS, _norm),
    _BASE: _base,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _found_overflow,
    **dict.fromkeys((torch.sum, _T.sum, torch.count_nonzero, _T.count_nonzero), _reduction(torch.sum)),
    **dict.fromkeys(_MEANS, _reduction(torch.sum)),
    **dict.fromkeys((torch.max, _T.max, torch.amax, _T.amax, torch.any, _T.any), _reduction(torch.max)),
    **dict.fromkeys((torch.min, _T.min, torch.amin, _T.amin, torch.all, _T.all), _reduction(torch.min)),
}
_JOINING = {"cat", "concat", "stack"}  # they join gradients of parameters that other ranks may have
_MIXING = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot"),
    *("addmm", "addmm_", "baddbmm", "baddbmm_", "svd", "qr", "softmax", "log_softmax"),
    *("cumsum", "sort", "argsort", "topk", "kthvalue", "median", "quantile", "std", "var", "argmax", "argmin"),
}
