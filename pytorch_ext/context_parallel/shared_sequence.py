"""SharedSequence: a tensor with the shape of the whole and this rank's part of the data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from weft.comm.communicator import Communicator
from weft.context_parallel.notes import note
from weft.context_parallel.pytree import leaves, mapped
from weft.ops.sequence_layout import SequenceLayout, shard_sequence, unshard_sequence
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
    """

    ranks: Communicator
    method: str = "auto"
    layout: str = "zigzag"
    dim: int = 1
    parts: bool = False
    strict: bool = False


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

    @property
    def mine(self) -> int:
        return self.sizes[self.sharing.ranks.rank]

    def pick(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor that every rank has whole. Backward gathers."""
        return self._cross(shard_sequence, whole, dim, self.length)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole from the parts of all ranks. Backward picks."""
        return self._cross(unshard_sequence, part, dim, self.mine)

    def _cross(self, way: Callable, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
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
    """Tensor that looks whole; `local` is this rank's part along `axis`. Differentiable through `local` alone."""

    local: torch.Tensor
    axis: int
    cut: SequenceCut

    @staticmethod
    def __new__(cls, local: torch.Tensor, axis: int, cut: SequenceCut):
        shape = list(local.shape)
        assert shape[axis] == cut.blocks * cut.mine, (shape, axis, cut)
        shape[axis] = cut.blocks * cut.length
        # It requires a gradient if its part does, so that its use in a custom autograd function is detected.
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self.local, self.axis, self.cut = local, axis, cut
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self

    def __init__(self, *_):
        pass

    def like(self, local: torch.Tensor, axis: int | None = None, **changes) -> "SharedSequence":
        """Return a SharedSequence with the same cut."""
        return SharedSequence(
            local, self.axis if axis is None else axis, replace(self.cut, **changes) if changes else self.cut
        )

    def whole(self) -> torch.Tensor:
        return self.cut.gather(self.local, self.axis)

    @property
    def back(self) -> int:
        """Axis, counted from the end (negative)."""
        return self.axis - self.local.ndim

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in NATIVE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        refuse_results_of_custom_functions((args, kwargs))
        rule = RULES.get(func) if kwargs.get("out") is None else None
        result = NotImplemented if rule is None else rule(func, *args, **kwargs)
        return gathered(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise ValueError(f"{func} got a shared sequence and cannot handle it. {_WAY_OUT}")


_WAY_OUT = (
    "If the module treats every position alone, name it in the plan of weft.parallelize as "
    '{"its.name": "tokenwise"}, and it gets this rank\'s part.'
)
RULES: dict[Callable, Callable] = {}  # function to rule(func, *args, **kwargs); NotImplemented: gather
NATIVE: set[Callable] = set()  # functions that only read the shape, the type or the device
_REFUSED = {
    *("data_ptr", "untyped_storage", "storage", "set_", "resize_", "share_memory_", "backward", "__setitem__"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__deepcopy__", "__reduce_ex__", "__set__"),
}


def rule_for(*functions: Callable):
    """Decorate the rule of these functions."""

    def register(rule):
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def shared_in(tree) -> list[SharedSequence]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, SharedSequence)]


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
        return name.startswith("__i") and name not in ("__invert__", "__iter__", "__index__", "__int__")
    return name.endswith("_")


def gathered(func: Callable, args, kwargs):
    """Call the function on the whole tensors, on every rank: always right, and as large as unsplit."""
    name = name_of(func)
    if name.split()[0] in _REFUSED or works_in_place(name) or kwargs.get("out") is not None:
        writes = works_in_place(name) or name == "__setitem__"
        instead = "Use the form that returns a new tensor. " if writes else ""
        raise ValueError(f"{name} cannot be applied to a shared sequence. {instead}{_WAY_OUT}")
    note_gathering(f"{name} has no rule for this", *shared_in((args, kwargs)))
    out = func(*wholes(args), **wholes(kwargs))
    return _read_only(out) if name in _VIEWS else out


class GatheredView(torch.Tensor):
    """Whole tensor from a function that gives a view.

    A write to a view would have to change the sequence, and cannot. So a write raises.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if SharedSequence in types:
            return NotImplemented
        name = name_of(func)
        if args and isinstance(args[0], cls) and (works_in_place(name) or name == "__setitem__"):
            raise ValueError(
                f"{name} cannot be applied to a tensor that was gathered from a shared sequence; clone it. {_WAY_OUT}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return _read_only(out) if name in _VIEWS else out


_VIEW_METHODS = """
    __getitem__ select narrow chunk split tensor_split unbind view view_as reshape reshape_as flatten unflatten diagonal
    transpose swapaxes swapdims permute movedim t squeeze unsqueeze expand expand_as unfold detach
"""
_VIEWS = {*_VIEW_METHODS.split(), *(f"__get__ of {name}" for name in ("T", "mT", "H", "mH", "data"))}


def _read_only(tree):
    return tree_map_only(torch.Tensor, lambda x: x.as_subclass(GatheredView), tree)


def without_guards(tree):
    """Return the tree with plain tensors in place of gathered views."""
    return tree_map_only(GatheredView, lambda x: x.as_subclass(torch.Tensor), tree)


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


def refuse_results_of_custom_functions(tree) -> None:
    for x in shared_in(tree):
        with torch._C.DisableTorchFunctionSubclass():
            function = x.grad_fn
        if function is not None:
            raise ValueError(f"{type(function).__name__}: {_CUSTOM}")


def _refuse_gradient(gradient):
    raise ValueError(_CUSTOM)
