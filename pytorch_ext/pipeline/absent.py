"""Stand-ins for tensors of other stages: shape, type and device without values.

A stage runs the model's own forward. The results of layers on other stages are absent unless they were sent. An
operation on absent tensors gives absent tensors, which remember the origins of the values that they lack.
"""

from collections.abc import Hashable, Iterable

import torch
from torch.utils._pytree import tree_leaves, tree_map

from weft.context_parallel.pytree import leaves
from weft.context_parallel.shared_sequence import parts_here

Origin = Hashable  # a result of a layer, or the name of a parameter or buffer


class AbsentValueError(RuntimeError):
    """Error of code that needs the values of an absent tensor.

    Attributes:
        origins: the origins of these values.
    """

    def __init__(self, origins: Iterable[Origin], message: str):
        super().__init__(message)
        self.origins = frozenset(origins)

    def __reduce__(self):
        return AbsentValueError, (self.origins, str(self))


_BY_SHAPE = {  # results that depend on the shape, type and device of the first argument alone
    getattr(torch.ops.aten, name)
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full"),
    )
}


class Absent(torch.Tensor):
    """Tensor without values.

    Attributes:
        meta: a tensor of this shape and type on the meta device.
        origins: origins of the missing values; views share one set.
    """

    meta: torch.Tensor
    origins: set

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, origins: set):
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta, made.origins = meta, origins
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def data_ptr(self) -> int:
        raise AbsentValueError(self.origins, "a collective needs values of another stage")

    def numpy(self, *_, **__):
        raise AbsentValueError(self.origins, "it needs values of another stage")

    tolist = __array__ = numpy

    def __deepcopy__(self, memo):
        return self

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        key, absent = _form(func, args, kwargs)
        if key in _KNOWN:
            shape, stride, dtype = _KNOWN[key]
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return Absent(meta, absent[0].device, set().union(*[x.origins for x in absent]))
        if getattr(func, "overloadpacket", None) in _BY_SHAPE:
            return func(blank(args[0]), *args[1:], **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            tree = tree_map(lambda x: blank(x) if isinstance(x, Absent) else x, (args, kwargs))
            func(*tree[0], **tree[1])  # draws the numbers that other stages draw here
        absent = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Absent)]
        origins = set().union(*(x.origins for x in absent))
        written = _written(func, args, kwargs)
        if any(not isinstance(x, Absent) for x in written):
            raise AbsentValueError(origins, f"{func} writes values of another stage")
        try:
            tree = tree_map(lambda x: _on_meta(x), (args, kwargs))
            results = func(*tree[0], **tree[1])
        except Exception as error:  # it needs values: item(), nonzero()
            raise AbsentValueError(origins, f"{func} needs values of another stage") from error
        for x in written:
            x.origins.update(origins)  # type: ignore[attr-defined]
        if written and len(written) == 1 and isinstance(results, torch.Tensor):
            return written[0]
        if written:
            raise AbsentValueError(origins, f"{func} writes several tensors, one of another stage")
        is_view = _is_view(func)
        if key is not None and not is_view and isinstance(results, torch.Tensor):
            if len(_KNOWN) > _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = results.shape, results.stride(), results.dtype
        shared = absent[0].origins if len(absent) == 1 and is_view else origins
        device = kwargs.get("device") or absent[0].device
        return tree_map(lambda x: Absent(x, device, shared) if isinstance(x, torch.Tensor) else x, results)


def absent_in(tree) -> list[Absent]:
    """Return the tensors without values in a tree, also those in shared sequences."""
    found = [part for x in leaves(tree) if isinstance(x, torch.Tensor) for _, part in parts_here(x)]
    return [x for x in found if type(x) is Absent]


def origins_in(tree) -> set[Origin]:
    """Return the origins of the values that a tree lacks."""
    return set().union(*(x.origins for x in absent_in(tree)))


def like(x: torch.Tensor, origin: Origin, device: torch.device | None = None) -> Absent:
    """Return an absent tensor in the place of `x`, on its device or another."""
    return Absent(torch.empty_like(x.detach(), device="meta"), device or x.device, {origin})


_KNOWN: dict[tuple, tuple] = {}  # shape, strides and type of the results of functions that only compute one tensor
_MOST_KNOWN = 10_000
_KINDS = {bool, int, float, str, type(None), torch.dtype}


def _form(func, args, kwargs) -> tuple[tuple | None, list[Absent]]:
    """Return what the form of the result follows from, and the absent arguments; None if more may follow."""
    key: list = [func, torch.get_default_dtype()]
    absent = []
    for x in args:
        if type(x) is Absent:
            absent.append(x)
            key.append((x.shape, x.stride(), x.dtype))
        elif type(x) in _KINDS:
            key.append((type(x), x))
        else:
            return None, absent
    drawing = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return None if kwargs or drawing else tuple(key), absent


def blank(x: torch.Tensor) -> torch.Tensor:
    """Return zeros in the place of an absent tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _on_meta(x):
    if isinstance(x, Absent):
        return x.meta
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _written(func, args, kwargs) -> list[torch.Tensor]:
    """Return the tensors that an operation writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    names = [
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for name in names for x in tree_leaves(given.get(name)) if isinstance(x, torch.Tensor)]


def _is_view(func) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)
