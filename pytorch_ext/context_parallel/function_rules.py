"""Rules for functions of a shared sequence.

A function without a rule gets the whole sequence, and so does a call that its rule does not cover.
"""

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from weft.comm.communicator import Communicator
from weft.context_parallel.pytree import ATOMS, leaves, mapped
from weft.context_parallel.shared_sequence import (
    NATIVE,
    VIEW_METHODS,
    VIEW_PROPERTIES,
    SharedSequence,
    Sharing,
    by_part,
    crossed,
    each_position_alone,
    in_each_part,
    localized,
    note_gathering,
    rule_for,
    rule_for_all_units,
    shared_in,
    shared_like,
    wholes,
    works_in_place,
)
from weft.context_parallel.units import Unit
from weft.ops.invariant import Units, total_of_units
from weft.ops.mappings import total, used_by_parts
from weft.rng import own_random_numbers


def _named(names: str) -> list[Callable]:
    """Every function of these names in torch, torch.Tensor and torch.nn.functional."""
    functions = []
    for name in names.split():
        owners = (torch.Tensor,) if name.startswith("__") else (torch, torch.Tensor, F, torch.special)
        functions += [getattr(owner, name) for owner in owners if callable(getattr(owner, name, None))]
    return functions


def _properties(names: str) -> list[Callable]:
    return [getattr(torch.Tensor, name).__get__ for name in names.split() if hasattr(torch.Tensor, name)]


NATIVE.update(_named("size dim ndimension numel nelement element_size is_floating_point is_complex __len__ __hash__"))
NATIVE.update(
    _properties("shape ndim dtype device layout requires_grad is_leaf itemsize nbytes is_cuda is_cpu is_meta")
)
NATIVE.update(_properties("is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xpu"))


def plain(x):
    """Return whether x is no shared sequence: every rank has it whole (a tensor or None)."""
    return not isinstance(x, SharedSequence)


def used(x, ranks: Communicator):
    """Return x for use with a part of the sequence: a tensor's gradient is summed over the ranks."""
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(ranks, Unit):
        return ranks.used(x)
    return used_by_parts(x, ranks)


# Position by position


_POINTWISE = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod rsub pow neg negative positive abs
    absolute sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan sinh cosh tanh asin acos
    atan atan2 sigmoid logit erf erfc lerp addcmul addcdiv where masked_fill clamp clamp_min clamp_max clip maximum
    minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
    bitwise_xor bitwise_not isnan isinf isfinite floor ceil round trunc frac nan_to_num relu relu6 gelu silu mish
    softplus softsign hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink leaky_relu elu celu selu
    logsigmoid xlogy
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __or__ __ror__
    __xor__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    add_ sub_ mul_ div_ floor_divide_ remainder_ pow_ neg_ abs_ exp_ log_ sqrt_ rsqrt_ sigmoid_ tanh_ relu_
    clamp_ clamp_min_ clamp_max_ masked_fill_ lerp_ addcmul_ addcdiv_ copy_ zero_ fill_
"""


@each_position_alone
@rule_for(*_named(_POINTWISE))
def pointwise(func, *args, **kwargs):
    """Apply a function of each position, with broadcasting.

    A plain tensor as long as the sequence (positions, rotary angles) is cut. A plain tensor that is not along the
    sequence is used by all parts.
    """
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    lead, target = shared_in(tensors)[0], args[0] if args else None
    if func is torch.where and len(tensors) == 1:
        return NotImplemented  # with one argument it returns indices
    if type(target) is not SharedSequence and works_in_place(func.__name__):
        return NotImplemented
    cut, back = lead.cut, lead.back
    parts: dict[int, torch.Tensor] = {}
    for x in tensors:
        if type(x) is SharedSequence:
            if (x.cut is not cut and x.cut != cut) or x.back != back:
                return NotImplemented
            parts[id(x)] = x.local
        elif x.ndim < -back or x.size(back) == 1:
            parts[id(x)] = used(x, cut.sharing.ranks) if x.requires_grad else x
        elif x.size(back) == cut.blocks * cut.length:
            parts[id(x)] = cut.pick(x, x.ndim + back)
        else:
            return NotImplemented
    out = func(*[parts.get(id(x), x) for x in args], **{name: parts.get(id(x), x) for name, x in kwargs.items()})
    if type(target) is SharedSequence and out is target.local:
        crossed()
        return target.written()
    return lead.like(out, out.ndim + lead.back)


_OF_ONE = """
    to type type_as float half bfloat16 double int long short bool cpu cuda clone contiguous detach detach_
    zeros_like ones_like full_like empty_like
"""


@each_position_alone
@rule_for(*_named(_OF_ONE), *_properties("data"))
def of_one(func, x, *args, **kwargs):
    """Apply a function of one tensor; another argument only gives its type or device."""
    out = func(*localized((x, *args)), **localized(kwargs))
    if plain(x) or not isinstance(out, torch.Tensor):
        return out
    return x if out is x.local and func not in _DETACHES else x.like(out)


_DETACHES = set(_named("detach_"))  # the sequence that was there still refuses a custom function


@rule_for(*_named("new_zeros new_ones new_empty new_full"))
def new_of_size(func, x, *size, **kwargs):
    """Make a tensor: shared like x if it has its dimensions up to the sequence, and no other of that length."""
    if "size" in kwargs:
        size = (kwargs.pop("size"),)
    given, *others = size if isinstance(size[0], (tuple, list)) else (size,)
    shape = list(given)
    along = shape[: x.axis + 1] == list(x.shape[: x.axis + 1]) and shape.count(x.size(x.axis)) == 1
    if along:
        shape[x.axis] = x.local.size(x.axis)
    out = func(x.local, shape, *others, **kwargs)
    return x.like(out) if along else out


@rule_for(*_properties("grad_fn grad"), torch.Tensor.is_contiguous, torch.Tensor.new_tensor)
def of_part(func, x, *args, **kwargs):
    return func(x.local, *args, **kwargs)


@rule_for_all_units(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def set_requires_grad(func, x, value=True):
    for part in x.units or (x,):
        func(part.local, value)
    return x.written()


@rule_for(*_named("__repr__ __format__"))
def written(func, x, *_, **__):
    ranks = x.cut.sharing.ranks
    return f"SharedSequence({tuple(x.shape)} {x.dtype}, dimension {x.axis} over {ranks.world_size} ranks)"


# Within other dimensions


def _embeds(tokens, weight, padding_idx=None, max_norm=None, norm_type=2.0, *others, **named) -> tuple | None:
    odd = max_norm is not None or any(others) or any(named.values())  # scale_grad_by_freq, sparse
    return None if odd else ()


def _normalizes(x, normalized_shape, *_, **__) -> range:
    return range(-len(normalized_shape), 0)


_WITHIN: dict[Callable, Callable] = {  # function: the dimensions of x that its results mix; None if it is not known
    **dict.fromkeys(_named("softmax log_softmax cumsum cumprod logcumsumexp"), lambda x, dim=None, *_, **__: dim),
    **dict.fromkeys(_named("layer_norm rms_norm"), _normalizes),
    F.linear: lambda x, weight, bias=None: -1,
    F.normalize: lambda x, p=2.0, dim=1, eps=1e-12, out=None: dim if out is None else None,
    F.embedding: _embeds,
    F.one_hot: lambda x, num_classes=-1: () if num_classes >= 0 else None,
}


@each_position_alone
@rule_for(*_WITHIN)
def within(func, x, *args, **kwargs):
    """Apply a function that works within dimensions other than the sequence; all parts use its other tensors."""
    dims = _WITHIN[func](x, *args, **kwargs)
    if dims is None or plain(x) or shared_in((args, kwargs)):
        return NotImplemented
    if x.axis in [dim % x.local.ndim for dim in ((dims,) if isinstance(dims, int) else dims)]:
        return NotImplemented
    ranks = x.cut.sharing.ranks
    named = {name: used(each, ranks) for name, each in kwargs.items()}
    return x.like(func(x.local, *[used(each, ranks) for each in args], **named))


@each_position_alone
@rule_for(*_named("matmul mm bmm __matmul__"))
def matmul(func, a, b=None, **named):
    """Multiply a and b, with the rows of a along the sequence. A shared b is gathered."""
    if b is None:
        (b,) = named.values()  # other, mat2
    if plain(a) or a.ndim < 2 or b.ndim < 2 or a.back == -1:
        return NotImplemented
    same_batch = not plain(b) and b.cut == a.cut and b.back == a.back
    if a.back < -2 and not same_batch and not (plain(b) and b.ndim < -a.back):
        return NotImplemented
    if same_batch and a.back < -2:
        b = b.local
    elif plain(b):
        b = used(b, a.cut.sharing.ranks)
    else:
        note_gathering("the right factor of a product of two sequences", b)
        b = used(b.whole(), a.cut.sharing.ranks)
    out = func(a.local, b)
    return a.like(out, out.ndim + a.back)


@each_position_alone
@rule_for(*_named("addmm"))
def addmm(func, input, a=None, b=None, *, mat1=None, mat2=None, **kwargs):
    a, b = mat1 if a is None else a, mat2 if b is None else b
    if plain(a) or a.axis != 0 or not plain(b) or not plain(input) or (input.ndim == 2 and input.size(0) != 1):
        return NotImplemented
    ranks = a.cut.sharing.ranks
    return a.like(func(used(input, ranks), a.local, used(b, ranks), **kwargs))


@each_position_alone
@rule_for(F.dropout)
def dropout(func, input, p=0.5, training=True, inplace=False):
    if training and p:
        crossed()
    with draws_of(input) if training and p else nullcontext():
        return input.like(func(input.local, p, training, inplace))


def draws_of(x: SharedSequence) -> AbstractContextManager:
    """Return a context in which this part of a sequence draws numbers of its own."""
    ranks = x.cut.sharing.ranks
    return nullcontext() if isinstance(ranks, Unit) else own_random_numbers(ranks, x.device)  # units: UnitDraws


# Shapes

_MARK = 1_048_583  # the sequence's length in a trial on the meta device; no other dimension has it


_CARRIED = """
    transpose swapaxes swapdims permute movedim moveaxis t adjoint unsqueeze squeeze select narrow cat concat stack
    repeat repeat_interleave glu view_as_real view_as_complex
    amax amin argmax argmin logsumexp norm var std all any prod max min topk
"""


@each_position_alone
@rule_for(*_named(_CARRIED), *_properties("T mT H mH"), torch.linalg.vector_norm)
def carried(func, *args, **kwargs):
    """Apply a function that moves, cuts, joins or reduces other dimensions.

    A trial on the meta device finds the dimension of the sequence in the result.
    """
    lead = shared_in((args, kwargs))[0]
    if func in _TWO_OR_ALONG and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return pointwise(func, *args, **kwargs)
    shapes = _shapes_after(func, lead, args, kwargs)
    if shapes is None:
        return NotImplemented
    for shape in shapes:
        if shape.count(_MARK) != 1:
            return NotImplemented
    if func in _SQUEEZES:
        crossed()
        if lead.size(lead.axis) == 1:
            return NotImplemented
        given = args[1] if len(args) > 1 else kwargs.get("dim", range(lead.ndim))
        dims = (given,) if isinstance(given, int) else given
        args, kwargs = (lead, tuple(dim for dim in dims if lead.size(dim) == 1)), {}  # a rank's part may be 1 long

    def part(x):
        if isinstance(x, SharedSequence):
            return x.local
        return lead.cut.pick(x, lead.axis) if isinstance(x, torch.Tensor) else x

    out = func(*mapped(part, args), **mapped(part, kwargs))
    if out is lead.local:  # scatter_
        crossed()
        return lead.written()
    coming, source = iter(shapes), lead if func in _VIEWING else None

    def shared(x):
        return lead.like(x, next(coming).index(_MARK), source) if isinstance(x, torch.Tensor) else x

    return mapped(shared, out)


_TWO_OR_ALONG = set(_named("max min"))
_VIEWING = {*_named(VIEW_METHODS), *_properties(VIEW_PROPERTIES)}


_trials: dict[tuple, list[torch.Size] | None] = {}
_MOST_TRIALS = 4096


def _shapes_after(func, lead: SharedSequence, args, kwargs, length: int = _MARK) -> list[torch.Size] | None:
    """Return the shapes of a function's results, found by a trial or remembered; None if no trial can find them.

    Args:
        length: size of the sequence's dimension in the trial.
    """
    key = None
    if args and args[0] is lead:
        part, cut = lead.local, lead.cut
        key = func, part.shape, part.dtype, lead.axis, cut.length, cut.blocks, length, args[1:], *kwargs.items()
    for x in (*args[1:], *kwargs.values()):
        if type(x) is tuple or type(x) is torch.Size:
            key = key if {int}.issuperset(map(type, x)) else None
        elif type(x) not in ATOMS or type(x) is slice:
            key = None
    if key is None:
        return _tried(func, lead, args, kwargs, length)
    if key not in _trials:
        if len(_trials) >= _MOST_TRIALS:
            _trials.clear()
        _trials[key] = _tried(func, lead, args, kwargs, length)
    return _trials[key]


def _tried(func, lead: SharedSequence, args, kwargs, length: int) -> list[torch.Size] | None:
    """Try a function that leaves all positions in place, or else changes the length of every sequence."""

    def trial(x):
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, SharedSequence) and (x.cut != lead.cut or x.axis != lead.axis):
            raise _NotTheSameError
        if plain(x) and (x.ndim != lead.local.ndim or x.size(lead.axis) != lead.cut.blocks * lead.cut.length):
            raise _NotTheSameError
        shape = list(x.local.shape if isinstance(x, SharedSequence) else x.shape)
        shape[lead.axis] = length
        return torch.empty(shape, dtype=x.dtype, device="meta")

    try:
        results = leaves(func(*mapped(trial, args), **mapped(trial, kwargs)))
    except (_NotTheSameError, RuntimeError, TypeError, IndexError, NotImplementedError):
        return None  # if the call itself is wrong, the call on whole tensors raises
    return [x.shape for x in results] if all(isinstance(x, torch.Tensor) for x in results) else None


class _NotTheSameError(Exception):
    """Error for tensors that one trial cannot cover."""


_SQUEEZES = set(_named("squeeze"))


_BY_INDEX = _named("gather scatter scatter_add scatter_reduce scatter_ scatter_add_ scatter_reduce_")
_DIM = {  # the place of `dim` among the arguments after x, and its default
    **dict.fromkeys(_named("chunk split tensor_split split_with_sizes"), (1, 0)),
    **dict.fromkeys(_named("unbind"), (0, 0)),
    **dict.fromkeys(_BY_INDEX, (0, None)),
}


@each_position_alone
@rule_for(*_DIM)
def along(func, x, *args, **kwargs):
    """Cut, or read or write by an index, along a dimension other than the sequence.

    A trial along the sequence would make as many pieces as `_MARK` has positions.
    """
    place, otherwise = _DIM[func]
    dim = kwargs.get("dim", args[place] if len(args) > place else otherwise)
    if plain(x) or type(dim) is not int or dim % x.ndim == x.axis:
        return NotImplemented
    if func in _BY_INDEX:
        crossed()
    return carried(func, x, *args, **kwargs)


@each_position_alone
@rule_for(F.pad)
def padded(func, input, pad, mode="constant", value=None):
    """Pad along other dimensions.

    The sequence's length is no test: a pad of (1, -1) keeps it and moves every position.
    """
    if plain(input) or any(pad[-2 * input.back - 2 : -2 * input.back]):
        return NotImplemented
    return carried(func, input, pad, mode, value)


@rule_for_all_units(torch.Tensor.__iter__)
def iterated(func, x):
    return iter(x.unbind(0))


@rule_for(torch.Tensor.__getitem__)
def indexed(func, x, index):
    if plain(x):
        return NotImplemented
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is ... or type(entry) in (int, slice) for entry in entries):
        return NotImplemented
    taken = sum(entry is not None and entry is not ... for entry in entries)
    if not any(entry is ... for entry in entries):
        entries.append(...)
    place = next(i for i, entry in enumerate(entries) if entry is ...)
    entries[place : place + 1] = [slice(None)] * (x.ndim - taken)
    dims = [i for i, entry in enumerate(entries) if entry is not None]
    at = dims[x.axis]
    entry = entries[at]
    length = x.size(x.axis)
    if not isinstance(entry, slice) or entry.indices(length) != (0, length, 1):
        return NotImplemented
    entries[at] = slice(None)
    return carried(func, x, tuple(entries))


@rule_for(torch.Tensor.__setitem__)
def assigned(func, x, index, value):
    """Assign to all positions: each rank writes to its part."""
    target = NotImplemented if plain(x) else indexed(torch.Tensor.__getitem__, x, index)
    if target is NotImplemented:
        return NotImplemented
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    while value.ndim > target.ndim and value.size(0) == 1:  # as an assignment does, and copy_ does not
        value = value[0]
    return pointwise(torch.Tensor.copy_, target, value)


@each_position_alone
@rule_for(*_named("view reshape flatten unflatten view_as reshape_as"))
def reshaped(func, x, *args, **kwargs):
    """Reshape: the sequence stays a dimension, joins the dimension before it, or leaves that again."""
    target = _whole_shape(func, x, args, kwargs)
    if not target:
        return NotImplemented
    before = math.prod([x.cut.blocks, *x.local.shape[: x.axis]])
    found = _place_of(x.cut.length, before, target, x.axis)
    if found is None:
        return NotImplemented
    axis, blocks = found
    if func not in _OF_SOME_DIMENSIONS or blocks != x.cut.blocks:
        crossed()  # sizes in the arguments may be the sequence's
    target[axis] = blocks * x.cut.mine
    return x.like(x.local.reshape(target), axis, x, blocks=blocks)


def _whole_shape(func, x, args, kwargs) -> list[int] | None:
    """Return the shape of the result on the whole; None if the call changes the type or fails, or x is no sequence."""
    for other in (*args, *kwargs.values()):
        if isinstance(other, torch.Tensor):  # view_as, reshape_as, expand_as
            return None if plain(x) else list(other.shape)
        if isinstance(other, torch.dtype):
            return None
    shapes = _shapes_after(func, x, (x, *args), kwargs, x.cut.blocks * x.cut.length)
    return None if shapes is None else list(shapes[0])


_OF_SOME_DIMENSIONS = set(_named("flatten unflatten"))


def _place_of(length: int, before: int, shape: list[int], axis: int) -> tuple[int, int] | None:
    """Return (dimension, blocks) of the sequence in a shape that has `before` sequences one after another.

    If there are several (a sequence of one position, an empty batch), a dimension of its own comes first, then the old
    place.
    """
    products = accumulate(shape, operator.mul)
    places = [
        (dim, size // length)
        for dim, (size, product) in enumerate(zip(shape, products, strict=True))
        if product == before * length and size % length == 0
    ]
    return min(places, key=lambda place: (place[1] != 1, place[0] != axis), default=None)


@rule_for(*_named("expand expand_as broadcast_to"))
def expanded(func, x, *args, **kwargs):
    target = _whole_shape(func, x, args, kwargs)
    if not target:
        return NotImplemented
    axis = len(target) + x.back
    if target[axis] != x.size(x.axis):
        return NotImplemented
    target[axis] = x.local.size(x.axis)
    return x.like(x.local.expand(target), axis)


@rule_for_all_units(*_named("masked_scatter"))
def masked_scatter(func, x, mask, source):
    """Put an image's tokens, say, among a text's: by the whole mask, and the sequence stays shared."""
    if plain(x) or x.cut.region is not None:
        return NotImplemented
    note_gathering("masked_scatter counts the positions before", *shared_in((x, mask, source)))
    return shared_like(x, func(x.whole(), wholes(mask), wholes(source)))


# Sums over the sequence


@each_position_alone
@rule_for_all_units(*_named("sum mean"))
def summed(func, x, *args, **kwargs):
    carried_on = by_part(carried, func, x, *args, **kwargs)
    if carried_on is not NotImplemented or not x.is_floating_point() or x.cut.region is not None:
        return carried_on
    if kwargs.get("out") is not None:
        return NotImplemented
    trial = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs)
    wide = torch.promote_types(trial.dtype, torch.float32)
    sums = {**kwargs, "dtype": wide}
    out = _total([part.local.sum(*args, **sums) for part in x.units or (x,)], x.cut.sharing)
    if func in _MEANS and trial.numel():
        out = out / (x.numel() / trial.numel())
    return out.to(trial.dtype)


_MEANS = set(_named("mean"))


def _total(parts: Sequence[torch.Tensor], sharing: Sharing) -> torch.Tensor:
    """Return the sum of this rank's parts and all others'."""
    crossed()
    if sharing.units is None:
        return total(parts[0], sharing.ranks)
    return total_of_units(sharing.ranks, Units(sharing.units), parts)


@rule_for_all_units(F.cross_entropy)
def cross_entropy(func, input, *args, **kwargs):
    """Compute the cross entropy over the positions of all ranks. The logits stay on their rank.

    Args:
        input: logits, [N, classes, ...].
    """
    if plain(input):
        return NotImplemented
    call = partial(_cross_entropy_of_part, func)
    found = _CROSS_ENTROPY.bind(input, *args, **kwargs).arguments
    if found.get("reduction") == "none":
        return by_part(call, **found)
    parts = in_each_part(call, **found)
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    losses, counts = zip(*parts, strict=True)
    loss = _total(losses, input.cut.sharing)
    return loss if found.get("reduction") == "sum" else loss / _total(counts, input.cut.sharing).to(loss.dtype)


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


def _cross_entropy_of_part(
    func, input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, **deprecated
):
    """Return the losses of a part if there is no reduction, else their sum and the number, or weight, of targets."""
    odd = reduction not in ("none", "sum", "mean") or any(x is not None for x in deprecated.values())
    if odd or plain(input) or input.ndim < 2 or input.axis == 1 or target.is_floating_point() or not plain(weight):
        return NotImplemented
    axis, cut = max(0, input.axis - 1), input.cut
    if cut.region is not None or target.shape != (input.size(0), *input.shape[2:]):
        return NotImplemented
    if plain(target):
        target = cut.pick(target, axis)
    elif target.cut == cut and target.axis == axis:
        target = target.local
    else:
        return NotImplemented
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = func(input.local, target, weight, reduction="none" if reduction == "none" else "sum", **options)
    if reduction == "none":
        return input.like(losses, axis)
    kept = target[target != ignore_index]
    counted = kept.new_tensor(kept.numel(), dtype=torch.float64) if weight is None else weight[kept].sum()
    return losses, counted.detach()
