"""Rules for each operation on tensors with split features: the layout of the result, or a conflict."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd
from operator import add

from weft.tensor_parallel.auto.axis_layout import Axis, AxisLayout, ConflictError, viewed
from weft.tensor_parallel.auto.trace import ACTIVATION, Node, Value

Layouts = dict[Value, AxisLayout]
Rule = Callable[[Node, Layouts, "AxisJoin"], list[AxisLayout | None]]


class AxisJoin:
    """Axes that operations use together, so that they must be cut alike.

    Attributes:
        same: pairs of axes with the same units.
        copied: (fine, coarse, n): n units of the fine axis use each unit of the coarse axis (a KV head).
        ambiguous: layers with a split dimension of size 1 (the only KV head).
    """

    def __init__(self, ambiguous: frozenset[str] = frozenset()):
        self.same: list[tuple[Axis, Axis]] = []
        self.copied: list[tuple[Axis, Axis, int]] = []
        self.ambiguous = ambiguous

    def join(self, one: AxisLayout | None, other: AxisLayout, operation: str) -> AxisLayout:
        """Return the layout of an elementwise operation on two tensors, and record that their axes meet."""
        if one is None:
            return other
        if (one.dim, one.before, one.extent) != (other.dim, other.before, other.extent):
            raise ConflictError(f"{operation} joins features that are split in different ways")
        fine, coarse = (one, other) if one.copies <= other.copies else (other, one)
        if one.axis is other.axis:
            return replace(fine, units=gcd(one.units, other.units), minor=one.minor if one.minor == other.minor else ())
        if fine.copies not in (1, coarse.copies):
            raise ConflictError(f"{operation} joins features that are split in different ways")
        fine.use()
        coarse.use()
        if fine.copies == coarse.copies:
            self.same.append((fine.axis, coarse.axis))
        else:
            self.copied.append((fine.axis, coarse.axis, coarse.copies))
        return replace(fine, minor=(), constant=fine.constant & coarse.constant)


class UnknownOperationError(ConflictError):
    """Conflict of split features with an operation that has no rule and may need all of them."""


def rule_of(node: Node) -> Rule:
    """Return the rule of an operation.

    Raises:
        UnknownOperationError: the operation has no rule.
    """
    if node.op in RULES:
        return RULES[node.op]
    if node.pointwise:
        return pointwise
    raise UnknownOperationError(f"the planner has no rule for {_name(node)}")


# Element by element


def pointwise(node: Node, layouts: Layouts, meeting: AxisJoin) -> list[AxisLayout | None]:
    out = next(value for value in node.outputs if value is not None)
    joined = None
    for value in node.inputs:
        if value in layouts:
            shift = len(out.shape) - len(value.shape)
            joined = meeting.join(joined, layouts[value].moved(partial(add, shift)), _name(node))
    assert joined is not None
    if out.shape[joined.dim] != joined.before * joined.extent:
        raise ConflictError(f"{_name(node)} joins them with a tensor that is whole")
    for value in node.inputs:
        if value not in layouts:
            check_whole(node, value, joined, len(out.shape))
    if node.mutates and layouts.get(node.inputs[0]) is None:
        raise ConflictError(f"{_name(node)} writes them into a tensor that is whole")
    return [joined if value is not None and value.shape == out.shape else None for value in node.outputs]


def check_whole(node: Node, value: Value, layout: AxisLayout, dims: int) -> None:
    """Check a whole tensor that meets a tensor with split features.

    Its size along the split dimension must be 1. Its gradient must be summed over the ranks, so it may depend only on
    parameters and constants.

    Args:
        value: the whole tensor.
        layout: layout of the split tensor.
        dims: number of dimensions of the split tensor.
    """
    own = layout.dim - (dims - len(value.shape))
    if own >= 0 and value.shape[own] != 1:
        raise ConflictError(f"{_name(node)} joins them with a tensor that is whole")
    if value.origin is ACTIVATION:
        raise ConflictError(
            f"{_name(node)} joins them with an activation that is whole, and its gradient would be a part"
        )
    layout.axis.summed.update(value.origin)


def _name(node: Node) -> str:
    """Name an operation and its module, for messages."""
    return f"{node.op} in {node.where or 'the model'}"


def _alike(node, layouts, meeting):
    """Keep the layout for a result of the same shape, also of random or constant numbers."""
    layout = layouts[node.inputs[0]]
    if node.outputs[0].shape != node.inputs[0].shape:
        raise ConflictError(f"{_name(node)} uses all of its features")
    return [layout]


# Views and moves


def _view(node, layouts, meeting):
    value = node.inputs[0]
    layout = layouts[value]
    return [viewed(layout, value.shape, node.outputs[0].shape, first=layout.axis.layer in meeting.ambiguous)]


def _permute(node, layouts, meeting):
    order = [dim % len(node.inputs[0].shape) for dim in node.args[1]]
    return [layouts[node.inputs[0]].moved(order.index)]


def _transpose(node, layouts, meeting):
    dims = len(node.inputs[0].shape)
    first, second = (dim % dims for dim in (node.args[1:] or (0, 1)))
    return [layouts[node.inputs[0]].moved(lambda dim: {first: second, second: first}.get(dim, dim))]


def _unsqueeze(node, layouts, meeting):
    new = node.args[1] % len(node.outputs[0].shape)
    return [layouts[node.inputs[0]].moved(lambda dim: dim + (dim >= new))]


def _squeeze(node, layouts, meeting):
    value, layout = node.inputs[0], layouts[node.inputs[0]]
    dims = _dims(node.args[1] if len(node.args) > 1 else None, len(value.shape))
    gone = [dim for dim in dims if value.shape[dim] == 1]
    if layout.dim in gone:
        raise ConflictError(f"{_name(node)} takes away the dimension of its only unit")
    return [_without(layout, gone)]


def _without(layout: AxisLayout, gone) -> AxisLayout:
    kept = replace(
        layout,
        minor=() if {dim for dim, _ in layout.minor} & set(gone) else layout.minor,
        constant=layout.constant - set(gone),
    )
    return kept.moved(lambda dim: dim - sum(other < dim for other in gone))


def _expand(node, layouts, meeting):
    value, out = node.inputs[0], node.outputs[0]
    shift = len(out.shape) - len(value.shape)
    layout = layouts[value].moved(lambda dim: dim + shift)
    wider = {d for d in range(len(out.shape)) if d < shift or value.shape[d - shift] != out.shape[d]}
    if layout.dim in wider:  # the only KV head is repeated for all query heads
        return [replace(layout, extent=out.shape[layout.dim], copies=out.shape[layout.dim], minor=())]
    return [replace(layout, constant=(layout.constant | wider) - {layout.dim})]


def _slice(node, layouts, meeting):
    value, out = node.inputs[0], node.outputs[0]
    layout, dim = layouts[value], (node.args[1] if len(node.args) > 1 else 0) % len(value.shape)
    if value.shape == out.shape:
        return [layout]
    if dim != layout.dim:
        return [_cut_elsewhere(layout, dim)]
    start = min(node.args[2] or 0 if len(node.args) > 2 else 0, value.shape[dim])
    start += value.shape[dim] if start < 0 else 0
    if len(node.args) > 4 and node.args[4] != 1:
        raise ConflictError(f"{_name(node)} takes some of its features")
    return [_piece(node, layout, start, start + out.shape[dim])]


def _cut_elsewhere(layout: AxisLayout, dim: int) -> AxisLayout:
    """Return the layout after a cut along another dimension.

    If that dimension lies within the units, they are no longer complete, so the units now stay together.
    """
    if dim in dict(layout.minor):
        layout.axis.units = gcd(layout.axis.units, layout.units)
        return replace(layout, minor=())
    return layout


def _piece(node: Node, layout: AxisLayout, start: int, stop: int) -> AxisLayout:
    """Return the layout of the features, or of the heads that they were viewed as, from start to stop."""
    if layout.before != 1 or layout.copies != 1 or not (layout.raw or layout.minor):
        raise ConflictError(f"{_name(node)} takes some of its features")
    size = layout.axis.size // layout.extent
    axis = layout.axis.piece(start * size, stop * size, apart=False)
    return replace(layout, axis=axis, extent=stop - start, units=stop - start)


def _split(node, layouts, meeting):
    value = node.inputs[0]
    layout, dims = layouts[value], len(value.shape)
    dim = _dim_of(node, 2, 0) % dims
    if dim != layout.dim:
        return [_cut_elsewhere(layout, dim) for _ in node.outputs]
    found, start = [], 0
    for out in node.outputs:
        found.append(_piece(node, layout, start, start + out.shape[dim]))
        start += out.shape[dim]
    return found


def _select(node, layouts, meeting):
    value = node.inputs[0]
    dim = node.args[1] % len(value.shape)
    return [_selected(node, layouts[value], dim, node.args[2] % value.shape[dim])]


def _unbind(node, layouts, meeting):
    value = node.inputs[0]
    dim = _dim_of(node, 1, 0) % len(value.shape)
    return [_selected(node, layouts[value], dim, index) for index in range(value.shape[dim])]


def _selected(node: Node, layout: AxisLayout, dim: int, index: int) -> AxisLayout:
    if dim != layout.dim:
        return _without(_cut_elsewhere(layout, dim), [dim])
    if layout.before != 1 or not layout.minor or layout.copies != 1:
        raise ConflictError(f"{_name(node)} takes some of its features")
    size = layout.axis.size // layout.extent
    axis = layout.axis.piece(index * size, (index + 1) * size, apart=True)
    (first, extent), *rest = layout.minor
    found = AxisLayout(first, 1, extent, axis, extent, 1, tuple(rest), layout.constant)
    return _without(found, [dim])


def _as_pairs(node, layouts, meeting):
    """Follow the last dimension, a real and an imaginary part, into one complex number or back."""
    value, out = node.inputs[0], node.outputs[0]
    layout = layouts[value]
    if layout.dim >= min(len(value.shape), len(out.shape)):
        raise ConflictError(f"{_name(node)} takes some of its features")
    return [replace(layout, minor=(), constant=frozenset())]


def _cat(node, layouts, meeting):
    return [_joined_along(node, layouts, meeting, _dim_of(node, 1, 0) % len(node.outputs[0].shape))]


def _stack(node, layouts, meeting):
    new = _dim_of(node, 1, 0) % len(node.outputs[0].shape)
    return [_joined_along(node, layouts, meeting, None).moved(lambda dim: dim + (dim >= new))]


def _joined_along(node: Node, layouts: Layouts, meeting: AxisJoin, dim: int | None) -> AxisLayout:
    joined: AxisLayout | None = None
    for value in node.inputs:
        if value not in layouts:
            if len(value.shape) == 1 and value.shape[0] == 0:
                continue
            raise ConflictError(f"{_name(node)} joins them with a tensor that is whole")
        layout = layouts[value] if dim is None else _cut_elsewhere(layouts[value], dim)
        joined = meeting.join(joined, layout, _name(node))
    assert joined is not None
    if dim == joined.dim:
        raise ConflictError(f"{_name(node)} joins features one after another")
    return replace(joined, minor=())


# Sums and products


def _reduce(node, layouts, meeting, place=1):
    """Follow a reduction along dimensions; (x, dims, keepdim).

    Args:
        place: index of the dimensions among the arguments.
    """
    value = node.inputs[0]
    layout = layouts[value].use()
    dims = _dims(_dim_of(node, place, None), len(value.shape))
    if layout.dim in dims:
        raise ConflictError(f"{_name(node)} goes over all of its features")
    out = next(output for output in node.outputs if output is not None)
    after = replace(layout, minor=(), constant=frozenset())
    after = after if len(out.shape) == len(value.shape) else _without(after, dims)
    return [after if output is not None else None for output in node.outputs]


def _along(node, layouts, meeting, place=1):
    """Follow an operation along one dimension that keeps the others: softmax, cumsum, topk; (x, dim)."""
    value = node.inputs[0]
    layout = layouts[value].use()
    if layout.dim in _dims(_dim_of(node, place, -1), len(value.shape)):
        raise ConflictError(f"{_name(node)} goes over all of its features")
    return [replace(layout, minor=(), constant=frozenset()) for _ in node.outputs]


def _normalised(node, layouts, meeting):
    """Follow a layer or RMS norm: (x, normalized_shape, weight, ...)."""
    value = node.inputs[0]
    if value not in layouts:
        raise ConflictError(f"{_name(node)} has split weights")
    layout = layouts[value].use()
    if layout.dim >= len(value.shape) - len(node.args[1]):
        raise ConflictError(f"{_name(node)} goes over all of its features")
    for weight in node.inputs[1:]:
        check_whole(node, weight, layout, len(value.shape))
    after = replace(layout, minor=(), constant=frozenset())
    return [after if output is not None and len(output.shape) == len(value.shape) else None for output in node.outputs]


def _bmm(node, layouts, meeting):
    """Follow [N, M, K] @ [N, K, P]. The split may run along N, or along M or P if only one operand is split."""
    left, right = node.inputs[-2:]
    one, other = layouts.get(left), layouts.get(right)
    if one is not None and other is not None:
        if one.dim == other.dim == 0:
            return [replace(meeting.join(one.use(), other.use(), _name(node)), minor=(), constant=frozenset())]
        raise ConflictError(f"{_name(node)} sums over its features")
    layout, whole, dim = (one, right, 1) if one is not None else (other, left, 2)
    assert layout is not None
    if layout.dim != dim:
        raise ConflictError(f"{_name(node)} multiplies them by a matrix that is whole")
    layout.use()
    check_whole(node, Value((), whole.origin), layout, 3)
    return [replace(layout, minor=(), constant=frozenset())]


def _attention(node, layouts, meeting):
    """Follow scaled_dot_product_attention, split along heads (third dimension from the end) or an earlier dimension."""
    named = node.kwargs
    query = named["query"]
    dims, joined = len(query.shape), None
    for name in ("query", "key", "value"):
        value = named[name]
        layout = layouts.get(value)
        if layout is None:
            raise ConflictError(f"{_name(node)} joins them with {name}s that are whole")
        layout = layout.use()
        if layout.dim >= dims - 2:
            raise ConflictError(f"{_name(node)} sums over its features")
        fewer = dims > 2 and value.shape[-3] != query.shape[-3]
        if name != "query" and fewer and (named.get("enable_gqa") or value.shape[-3] == 1):
            each = query.shape[-3] // value.shape[-3]
            if layout.dim != dims - 3:
                raise ConflictError(f"{_name(node)} groups heads, and another dimension is split")
            layout = replace(layout, extent=layout.extent * each, copies=layout.copies * each)
        joined = meeting.join(joined, replace(layout, minor=(), constant=frozenset()), _name(node))
    mask = named.get("attn_mask")
    if mask is not None:
        assert joined is not None  # a mask is never split alone
        if mask in layouts:
            joined = meeting.join(joined, layouts[mask], _name(node))
        else:
            check_whole(node, mask, joined, dims)
    return [joined]


def _pool(node, layouts, meeting):
    """Follow a pooling over height and width."""
    layout = layouts[node.inputs[0]]
    if layout.dim != len(node.inputs[0].shape) - 3:
        raise ConflictError(f"{_name(node)} uses all of its features")
    return [layout for _ in node.outputs]


# Arguments


def _dim_of(node: Node, place: int, otherwise):
    return node.args[place] if len(node.args) > place else node.kwargs.get("dim", otherwise)


def _dims(dims, count: int) -> set[int]:
    if dims is None or dims == ():
        return set(range(count))
    return {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}


RULES: dict[str, Rule] = {
    "view": _view,
    "permute": _permute,
    **dict.fromkeys(["transpose", "t"], _transpose),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    **dict.fromkeys(["split", "split_with_sizes"], _split),
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(["view_as_complex", "view_as_real"], _as_pairs),
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(["detach", "lift_fresh", "_to_copy"], _alike),
    **dict.fromkeys(["empty_like", "zeros_like", "ones_like", "full_like"], _alike),
    **dict.fromkeys(["sum", "mean", "amax", "amin", "var", "std", "var_mean"], _reduce),
    **dict.fromkeys(["max", "min", "argmax", "argmin", "prod", "logsumexp", "all", "any"], _reduce),
    "linalg_vector_norm": partial(_reduce, place=2),
    **dict.fromkeys(["_softmax", "_log_softmax", "cumsum", "flip"], _along),
    **dict.fromkeys(["cumprod", "logcumsumexp", "sort"], _along),
    "topk": partial(_along, place=2),
    **dict.fromkeys(["native_layer_norm", "_fused_rms_norm"], _normalised),
    "bmm": _bmm,
    "attention": _attention,
    **dict.fromkeys(["max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"], _pool),
}
