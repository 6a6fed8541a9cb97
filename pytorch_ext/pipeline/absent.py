"""Stand-ins for tensors of other stages: shape, type and device without values.

A stage runs the model's own forward. The results of layers on other stages are absent unless they were sent. An
operation on absent tensors gives absent tensors, which remember the origins of the values that they lack.
"""

from collections.abc import Hashable, Iterable

import torch
from torch.utils._pytree import tree_leaves, tree_map

Origin = Hashable  # a result of a layer, or the name of a parameter or buffer


class AbsentValueError(RuntimeError):
    """Error of code that needs the values of an absent tensor.

    Attributes:
        origins: the origins of these values.
    """

    def __init__(self, origins: Iterable[Origin], message: str):
        super().__init__(message)
        self.origins = frozenset(origins)


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

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", None) in _BY_SHAPE:
            return func(_blank(args[0]), *args[1:], **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            tree = tree_map(lambda x: _blank(x) if isinstance(x, Absent) else x, (args, kwargs))
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
        shared = absent[0].origins if len(absent) == 1 and _is_view(func) else origins
        device = kwargs.get("device") or absent[0].device
        return tree_map(lambda x: Absent(x, device, shared) if isinstance(x, torch.Tensor) else x, results)


def absent_in(tree) -> list[Absent]:
    return [x for x in tree_leaves(tree) if isinstance(x, Absent)]


def like(x: torch.Tensor, origin: Origin) -> Absent:
    """Return an absent tensor in the place of `x`."""
    return Absent(torch.empty_like(x.detach(), device="meta"), x.device, {origin})


def _blank(x: torch.Tensor) -> torch.Tensor:
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
