"""SharedSequence: a tensor with the shape of the whole and this rank's part of the data."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weft.comm.communicator import Communicator
from weft.context_parallel.learning import state
from weft.context_parallel.notes import note
from weft.context_parallel.pytree import ATOMS, leaves, mapped
from weft.context_parallel.units import Unit, UnitCall
from weft.ops.invariant import Units
from weft.ops.mappings import gather
from weft.ops.sequence_layout import SequenceLayout, shard_sequence, unshard_sequence
from weft.sharding.ruled_tensor import RuledTensor, TensorRule, plain, rule_of, ruled
from weft.sharding.sizes import split_sizes


@dataclass(frozen=True, eq=False)
class Sharing:
    """The way in which a model shares its sequence.

    Attributes:
        ranks: ranks that share it.
        method, layout: as in weft.context_attention.
        dim: the sequence dimension of the model's arguments.
        parts: the model is called with this rank's part, and returns it, instead of the whole.
        strict: nothing is gathered for a function without a rule.
        deterministic: as in weft.context_attention.
        units: number of units of the sequence, for a model with `invariant`; None: each rank has one part.
        checks: as in `weft.parallelize`.
    """

    ranks: Communicator
    method: str = "auto"
    layout: str = "zigzag"
    dim: int = 1
    parts: bool = False
    strict: bool = False
    deterministic: bool = True
    units: int | None = None
    checks: str = "first"

    @property
    def pieces(self) -> int:
        """Number of parts that the sequence is cut into."""
        return self.units or self.ranks.world_size

    @property
    def here(self) -> range:
        """Numbers of this rank's parts."""
        rank = self.ranks.rank
        return range(rank, rank + 1) if self.units is None else Units(self.units).here(self.ranks)

    @cached_property
    def of_units(self) -> list["Sharing"]:
        """The sharing of each of this rank's units, as if the unit were a rank."""
        assert self.units is not None
        units = (Unit(number, self.units) for number in self.here)
        return [replace(self, ranks=unit, units=None) for unit in units]  # type: ignore[arg-type]

    @property
    def unit(self) -> Unit:
        """The unit that stands in the place of a rank."""
        assert isinstance(self.ranks, Unit)
        return self.ranks


@dataclass(frozen=True)
class SequenceCut:
    """The way in which one dimension is shared.

    Attributes:
        blocks: number of sequences one after another in the dimension (batch and sequence, flattened), each of them
            cut.
        region: (rank, world) of the tensor-parallel ranks that share each part again, in a sequence-parallel region
            (Korthikanti et al. 2022); None outside of one.
    """

    sharing: Sharing
    layout: SequenceLayout
    blocks: int = 1
    region: tuple[int, int] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """Positions of each rank, in one block."""
        if self.region is None:
            return self.layout.sizes
        rank, world = self.region
        return [split_sizes(size, world)[rank] for size in self.layout.sizes]

    @cached_property
    def length(self) -> int:
        """Length of the whole, in one block."""
        return sum(self.sizes)

    @cached_property
    def mine(self) -> int:
        return sum(self.sizes[number] for number in self.sharing.here)

    @cached_property
    def of_units(self) -> list["SequenceCut"]:
        """The cut of each of this rank's units."""
        return [replace(self, sharing=sharing) for sharing in self.sharing.of_units]

    def pick(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part, or the unit, of a tensor that every rank has whole. Backward gathers."""
        ranks = self.sharing.ranks
        if not isinstance(ranks, Unit):
            return self._cross(shard_sequence, whole, dim, self.length)
        return self._cross(
            lambda x, dim, **_: self.layout.pick(x, dim, ranks.rank), ranks.used(whole), dim, self.length
        )

    def gather(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole from the parts of all ranks. Backward picks.

        Args:
            parts: this rank's parts: one, or its units.
        """
        crossed()
        if self.sharing.units is None:
            return self._cross(unshard_sequence, parts[0], dim, self.mine)
        blocks = [part.unflatten(dim, (self.blocks, -1)) for part in parts]
        each = self.sharing.units // self.sharing.ranks.world_size
        sizes = [sum(self.sizes[first : first + each]) for first in range(0, self.sharing.units, each)]
        return gather(torch.cat(blocks, dim + 1), dim + 1, self.sharing.ranks, sizes).flatten(dim, dim + 1)

    def _cross(self, way: Callable, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        crossed()
        if self.region is not None:
            raise ValueError(
                "a tensor of a sequence-parallel region can be used position by position alone; let a column layer "
                "with sequence_parallel=True gather it first"
            )
        options: dict[str, Any] = {"group": self.sharing.ranks, "layout": self.layout.kind}
        if self.blocks == 1:
            return way(x, dim=dim, **options)
        return way(x.unflatten(dim, (self.blocks, length)), dim=dim + 1, **options).flatten(dim, dim + 1)


class SharedSequence(torch.Tensor):
    """Tensor that looks whole; `local` is this rank's part along `axis`. Differentiable through `local` alone.

    With units, the tensor that the model's code sees has no `local`. Its `units` are this rank's, and each is a
    SharedSequence as if the unit were a rank.
    """

    local: torch.Tensor
    axis: int
    back: int  # the axis, counted from the end (negative)
    cut: SequenceCut
    units: tuple["SharedSequence", ...]
    source: "SharedSequence | None" = None  # what this is a view of
    views: list[weakref.ref] | None = None  # of this, if it required no gradient then

    @staticmethod
    def __new__(cls, local: torch.Tensor, axis: int, cut: SequenceCut):
        assert local.size(axis) == cut.blocks * cut.mine, (local.shape, axis, cut)
        self = cls._looking_whole(local, axis, cut, local.requires_grad)
        self.local, self.units = local, ()
        return self

    @classmethod
    def of_units(cls, units: Sequence["SharedSequence"], sharing: Sharing) -> "SharedSequence":
        """Return the sequence that has these units."""
        first = units[0]
        requires_grad = any(unit.local.requires_grad for unit in units)
        self = cls._looking_whole(first.local, first.axis, replace(first.cut, sharing=sharing), requires_grad)
        self.units = tuple(units)
        return self

    @classmethod
    def _looking_whole(cls, part: torch.Tensor, axis: int, cut: SequenceCut, requires_grad: bool) -> "SharedSequence":
        shape = list(part.shape)
        shape[axis] = cut.blocks * cut.length
        # It requires a gradient if its part does, so that its use in a custom autograd function is detected.
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=requires_grad
        )
        self.axis, self.cut, self.back = axis, cut, axis - len(shape)
        if state.recorder is not None and not isinstance(cut.sharing.ranks, Unit):
            state.recorder.made(self)
        if requires_grad and state.kind is None:  # a call that was learnt had no custom function
            with torch._C.DisableTorchFunction():
                self.register_hook(_refuse_gradient)
        return self

    def written(self) -> "SharedSequence":
        """Return this tensor, after a write to its part: it and all views of its memory may require a gradient now."""
        first = self
        while first.source is not None:
            first = first.source
        first._note_gradient()
        return self

    def _note_gradient(self) -> None:
        with torch._C.DisableTorchFunction():
            if not self.requires_grad and any(part.local.requires_grad for part in self.units or (self,)):
                self.requires_grad_()
                self.register_hook(_refuse_gradient)
        for reference in self.views or ():
            if (view := reference()) is not None:
                view._note_gradient()

    def view_of(self, source: "SharedSequence") -> "SharedSequence":
        """Return this tensor, noted as a view of another."""
        self.source = source
        with torch._C.DisableTorchFunction():
            if not self.requires_grad:
                source.views = [*(source.views or ()), weakref.ref(self)]
        return self

    def like(self, local: torch.Tensor, axis: int | None = None, source=None, **changes) -> "SharedSequence":
        """Return a SharedSequence with the same cut.

        Args:
            source: the sequence that it may be a view of.
        """
        cut = self.cut
        if changes and any(getattr(cut, name) != value for name, value in changes.items()):
            cut = replace(cut, **changes)
        made = SharedSequence(local, self.axis if axis is None else axis, cut)
        return made.view_of(source) if source is not None and local._is_view() else made

    def apart(self) -> tuple[tuple[torch.Tensor, ...], Callable[..., "SharedSequence"]]:
        """Return the plain tensors of the sequence, and a function that makes the sequence of such tensors again."""
        parts, sharing, axis, in_units = self.units or (self,), self.cut.sharing, self.axis, bool(self.units)
        cuts = [part.cut for part in parts]

        def together(*locals: torch.Tensor) -> SharedSequence:  # holds no tensor
            again = [SharedSequence(local, axis, cut) for local, cut in zip(locals, cuts, strict=True)]
            return SharedSequence.of_units(again, sharing) if in_units else again[0]

        return tuple(part.local for part in parts), together

    def whole(self) -> torch.Tensor:
        ranks = self.cut.sharing.ranks
        if isinstance(ranks, Unit):
            return ranks.whole_of(self)
        return self.cut.gather([unit.local for unit in self.units] or [self.local], self.axis)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, recorder = kwargs or {}, state.recorder
        if func in NATIVE:
            if recorder is not None and func in _OF_LENGTH and not _is_of_other_dim(func, args, kwargs):
                recorder.crossed()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        lead = refuse_results_of_custom_functions((args, kwargs))
        assert lead is not None
        rule = RULES.get(func) if kwargs.get("out") is None else None
        if rule is None:
            result = NotImplemented
        elif rule in _OF_ALL_UNITS or lead.cut.sharing.units is None:
            result = rule(func, *args, **kwargs)
        else:
            result = by_part(partial(rule, func), *args, **kwargs)
        if result is NotImplemented:
            return gathered(func, args, kwargs)
        if recorder is not None:
            if rule in _EACH_POSITION_ALONE and not kwargs.get("inplace"):
                recorder.function(lead, args, kwargs)
            else:
                recorder.crossed()
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise ValueError(f"{func} got a shared sequence and cannot handle it. {_WAY_OUT}")


_WAY_OUT = (
    "If the module treats every position alone, name it in the plan of weft.parallelize as "
    '{"its.name": "tokenwise"}, and it gets this rank\'s part.'
)
RULES: dict[Callable, Callable] = {}  # function to rule(func, *args, **kwargs); NotImplemented: gather
_OF_ALL_UNITS: set[Callable] = set()  # rules that get a sequence with all of its units
NATIVE: set[Callable] = set()  # functions that only read the shape, the type or the device
_EACH_POSITION_ALONE: set[Callable] = set()  # rules for functions that do the same with a part as with the whole
_OF_LENGTH = {
    *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__, torch.numel),
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
}


def _is_of_other_dim(func: Callable, args, kwargs) -> bool:
    """Return whether a function reads one size, and not that of the sequence."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return func is torch.Tensor.size and dim is not None and dim not in (args[0].axis, args[0].back)


def each_position_alone(rule):
    """Decorate a rule for functions that do the same with a part as with the whole, unless it says `crossed`."""
    _EACH_POSITION_ALONE.add(rule)
    return rule


def crossed() -> None:
    """Say that the function under way does more than treat each position alone."""
    if state.recorder is not None:
        state.recorder.crossed()


_REFUSED = {
    *("data_ptr", "untyped_storage", "storage", "set_", "resize_", "share_memory_", "backward"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__deepcopy__", "__reduce_ex__", "__set__"),
}


def rule_for(*functions: Callable):
    """Decorate the rule of these functions."""

    def register(rule):
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def rule_for_all_units(*functions: Callable):
    """Decorate the rule of these functions that gets a sequence with all of its units."""

    def register(rule):
        _OF_ALL_UNITS.add(rule)
        return rule_for(*functions)(rule)

    return register


def left_alone(forward: Callable, module: torch.nn.Module, args: tuple, kwargs: dict):
    """Return forward's result with this rank's part in place of each shared sequence, in a call that was learnt.

    Returns:
        NotImplemented if the call was not learnt, if the module is not left alone in it, or if the sequences differ.
    """
    kind, lead = state.kind, None
    alone = None if kind is None else kind.alone.get(module)
    if kind is None or alone is None:
        return NotImplemented
    given = (*args, *kwargs.values())
    for x in given:
        if type(x) is SharedSequence:
            lead = x if lead is None else lead
            if (x.cut is not lead.cut and x.cut != lead.cut) or x.back != lead.back:
                return NotImplemented
        elif type(x) in (tuple, list, dict) and shared_in(x):
            return NotImplemented
    if lead is None or (lead.axis, lead.back, lead.cut.blocks) != alone.given:
        return NotImplemented  # a branch that was not taken in the first call
    outs = []
    before = [members[name] for members, name, _ in alone.places]
    try:
        for number, given_out in enumerate(state.given_out):
            for members, name, index in alone.places:
                members[name] = given_out[index]
            own = [(x.units[number] if x.units else x).local if type(x) is SharedSequence else x for x in given]
            outs.append(forward(*own[: len(args)], **dict(zip(kwargs, own[len(args) :], strict=True))))
    finally:
        for (members, name, _), parameter in zip(alone.places, before, strict=True):
            members[name] = parameter
    if type(outs[0]) is tuple:
        return tuple([_of_parts(ys, axis, lead) for *ys, axis in zip(*outs, alone.axes, strict=True)])
    return _of_parts(outs, alone.axes[0], lead)


def _of_parts(parts: Sequence[torch.Tensor], axis: int, like: SharedSequence) -> SharedSequence:
    """Return the sequence of this rank's part, or of its units, cut as another one."""
    if not like.units:
        return SharedSequence(parts[0], axis, like.cut)
    units = [SharedSequence(part, axis, unit.cut) for part, unit in zip(parts, like.units, strict=True)]
    return SharedSequence.of_units(units, like.cut.sharing)


def by_part(function: Callable, *args, **kwargs):
    """Return function(*args, **kwargs), called with this rank's part, or with each of its units.

    Results of units are joined; NotImplemented if one of them is.
    """
    sharing = shared_in((args, kwargs))[0].cut.sharing
    if sharing.units is None:
        return function(*args, **kwargs)
    call, results = _in_each_unit(sharing, function, args, kwargs)
    if NotImplemented in [result if result is NotImplemented else None for result in results]:
        return NotImplemented

    def joined(of_units: Sequence):
        first = of_units[0]
        if not isinstance(first, SharedSequence):
            return first
        target = call.sequence_of(first)
        if target is not None:
            return target.written()
        made = SharedSequence.of_units(of_units, sharing)
        source = None if first.source is None else call.sequence_of(first.source)
        return made if source is None else made.view_of(source).written()

    if type(results[0]) is SharedSequence:
        return joined(results)
    rows = zip(*map(leaves, results), strict=True)
    return mapped(lambda _: joined(next(rows)), results[0])


def in_each_part(function: Callable, *args, **kwargs) -> list:
    """Return function(*args, **kwargs) for this rank's part, or for each of its units."""
    sharing = shared_in((args, kwargs))[0].cut.sharing
    return [function(*args, **kwargs)] if sharing.units is None else _in_each_unit(sharing, function, args, kwargs)[1]


def _in_each_unit(sharing: Sharing, function: Callable, args, kwargs) -> tuple[UnitCall, list]:
    call, state = UnitCall(sharing.ranks, Units(sharing.pieces)), torch.get_rng_state()
    for x in shared_in((args, kwargs)):
        call.sequences.update(dict.fromkeys(map(id, x.units), x))
    results = []
    for number, of_unit in enumerate(sharing.of_units):
        own = _units_in((*args, *kwargs.values()), number)
        torch.set_rng_state(state)  # the state after the call does not depend on the number of units here
        with of_unit.unit.during(call):
            results.append(function(*own[: len(args)], **dict(zip(kwargs, own[len(args) :], strict=True))))
    return call, results


def _units_in(values: Iterable, number: int) -> list:
    """Return the values with the unit of this number in place of shared sequences."""
    return [
        x.units[number]
        if type(x) is SharedSequence
        else x
        if type(x) in ATOMS or isinstance(x, torch.Tensor)
        else mapped(lambda y: y.units[number] if isinstance(y, SharedSequence) else y, x)
        for x in values
    ]


def in_units(whole: torch.Tensor, axis: int, cut: SequenceCut) -> SharedSequence:
    """Return this rank's units of a tensor that every rank has whole."""
    call, units = UnitCall(cut.sharing.ranks, Units(cut.sharing.pieces)), []
    for of_unit in cut.of_units:
        with of_unit.sharing.unit.during(call):
            units.append(SharedSequence(of_unit.pick(whole, axis), axis, of_unit))
    return SharedSequence.of_units(units, cut.sharing)


def shared_like(x: SharedSequence, whole: torch.Tensor) -> SharedSequence:
    """Return this rank's part, or its units, of a tensor that every rank has whole and that is shared as x is."""
    return in_units(whole, x.axis, x.cut) if x.units else x.like(x.cut.pick(whole, x.axis))


def shared_in(tree) -> list[SharedSequence]:
    """Return the shared sequences in a tree, in order."""
    found: list = []
    trees = [tree]
    while trees:  # in one call of Python for the usual arguments of functions
        part = trees.pop()
        kind = type(part)
        if kind is SharedSequence:
            found.append(part)
        elif kind is tuple or kind is list:
            trees += reversed(part)
        elif kind is dict:
            trees += reversed(part.values())
        elif kind not in ATOMS and not isinstance(part, torch.Tensor):
            trees += reversed([leaf for leaf in leaves(part) if type(leaf) is SharedSequence])
    return found


def parts_here(x: torch.Tensor) -> list[tuple[int | None, torch.Tensor]]:
    """Return what this rank has of a tensor: the parts of a shared sequence by number, or the whole with None."""
    if not isinstance(x, SharedSequence):
        return [(None, x)]
    return list(zip(x.cut.sharing.here, (part.local for part in x.units or (x,)), strict=True))


def localized(tree):
    """Return the tree with the local part of every shared tensor."""
    return mapped(lambda x: x.local if isinstance(x, SharedSequence) else x, tree)


def wholes(tree):
    """Return the tree with the whole of every shared tensor."""
    return mapped(lambda x: x.whole() if isinstance(x, SharedSequence) else x, tree)


def name_of(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{name} of {getattr(func.__self__, '__name__', func.__self__)}"  # type: ignore[attr-defined]
    return name


def works_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = {"__invert__", "__iter__", "__index__", "__int__"}


def gathered(func: Callable, args, kwargs):
    """Call the function on the whole tensors, on every rank: always right, and as large as unsplit."""
    name = name_of(func)
    if name.split()[0] in _REFUSED or kwargs.get("out") is not None:
        raise ValueError(f"{name} cannot be applied to a shared sequence. {_WAY_OUT}")
    note_gathering(f"{name} has no rule for this", *shared_in((args, kwargs)))
    if works_in_place(name) or kwargs.get("inplace"):
        target = args[0] if args else next(iter(kwargs.values()))
        if isinstance(target, SharedSequence):
            return _written(func, target, args, kwargs)
        if not isinstance(target, torch.Tensor):  # torch._foreach_mul_
            raise ValueError(f"{name} cannot be applied to a shared sequence. {_WAY_OUT}")
    given: list[torch.Tensor] = []

    def whole(x):
        if not isinstance(x, SharedSequence):
            return x
        given.append(x.whole())
        return given[-1]

    return _guarded(name, func(*mapped(whole, args), **mapped(whole, kwargs)), given)


def _written(func: Callable, target: SharedSequence, args, kwargs):
    """Call a function that works in place: it writes to the gathered whole, and each rank takes its part of that."""
    whole = target.whole().clone()
    form = whole.shape, whole.stride()
    args, kwargs = mapped(lambda x: whole if x is target else wholes(x), (args, kwargs))
    out = func(*args, **kwargs)
    if (whole.shape, whole.stride()) != form:
        raise ValueError(
            f"{name_of(func)} cannot be applied to a shared sequence: it would change its shape. {_WAY_OUT}"
        )
    again = shared_like(target, whole)
    for part, new in zip(target.units or (target,), again.units or (again,), strict=True):
        part.local.copy_(new.local)
    target.written()
    return target if out is whole else out


class GatheredView(TensorRule):
    """Rule of a whole tensor from a function that gives a view.

    A write to a view would have to change the sequence, and cannot. So a write raises.
    """

    def function(self, function, types, arguments, options):
        if SharedSequence in types:
            return NotImplemented
        name = name_of(function)
        if arguments and is_guarded(arguments[0]) and (works_in_place(name) or options.get("inplace")):
            raise ValueError(
                f"{name} cannot be applied to a tensor that was gathered from a shared sequence; clone it. {_WAY_OUT}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*arguments, **options)
        return _guarded(name, out, [x for x in leaves((arguments, options)) if is_guarded(x)])


_VIEW = GatheredView()


def is_guarded(x: object) -> bool:
    """Return whether a write to this tensor raises."""
    return rule_of(x, GatheredView) is not None


VIEW_METHODS = """
    __getitem__ select narrow chunk split tensor_split unbind view view_as reshape reshape_as flatten unflatten diagonal
    transpose swapaxes swapdims permute movedim t squeeze unsqueeze expand expand_as unfold detach
"""
VIEW_PROPERTIES = "T mT H mH data"
_VIEWS = {*VIEW_METHODS.split(), *(f"__get__ of {name}" for name in VIEW_PROPERTIES.split())}


def _guarded(name: str, out, given: Sequence[torch.Tensor]):
    """Return what a function gives. A write to it raises if it is, or may be, a view of a gathered tensor.

    Args:
        given: the gathered tensors that the function got.
    """
    memory = {_memory_of(x) for x in given} - {None}

    def guard(x: torch.Tensor) -> torch.Tensor:
        return ruled(x, _VIEW) if name in _VIEWS or _memory_of(x) in memory else x

    return tree_map_only(torch.Tensor, guard, out)


def _memory_of(x: torch.Tensor) -> int | None:
    with torch._C.DisableTorchFunction():
        if x.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
        return x.untyped_storage().data_ptr() or None


def without_guards(tree):
    """Return the tree with plain tensors in place of gathered views."""
    return tree_map_only(RuledTensor, lambda x: plain(x) if is_guarded(x) else x, tree)


def note_gathering(why: str, *shared: SharedSequence) -> None:
    """Record a gather for weft.explain. Raise ValueError if the model is strict."""
    shapes = ", ".join(str(tuple(x.shape)) for x in shared)
    if shared[0].cut.sharing.strict and any(x.is_floating_point() for x in shared):
        raise ValueError(f"strict: {shapes} would be gathered along the sequence: {why}. {_WAY_OUT}")
    mib = sum(x.numel() * x.element_size() for x in shared) / 2**20
    note(f"gathered: {why}", f"{shapes}, {mib:.2f} MiB on every rank")


_CUSTOM = (
    "a custom autograd function (or checkpoint with use_reentrant=True) got a shared sequence, and its gradient would "
    f"be lost; checkpoint with use_reentrant=False can do it. {_WAY_OUT}"
)


def refuse_results_of_custom_functions(tree) -> "SharedSequence | None":
    """Raise ValueError if a shared sequence in the tree has a graph; return the first one in it."""
    shared = shared_in(tree)
    with torch._C.DisableTorchFunction():
        for x in shared:
            if x.grad_fn is not None:
                raise ValueError(f"{type(x.grad_fn).__name__}: {_CUSTOM}")
    return shared[0] if shared else None


def _refuse_gradient(gradient):
    raise ValueError(_CUSTOM)
