"""Random calls of every function that has a rule for shared sequences, each call as it is and of the whole."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.context_parallel.shared_sequence import SequenceCut, SharedSequence, Sharing, in_units
from weft.ops.sequence_layout import LAYOUTS, SequenceLayout

Arguments = tuple[tuple, dict]


@dataclass(eq=False)
class Operand:
    """A tensor argument; `cut` is None where every rank has it whole."""

    leaf: torch.Tensor
    axis: int = 0
    cut: SequenceCut | None = None

    def tensor(self, shared: bool) -> torch.Tensor:
        """What the function is called with: a new tensor, which in-place functions may write to."""
        if self.cut is None or not shared:
            return self.leaf.clone()
        if self.cut.sharing.units is not None:
            units = in_units(self.leaf, self.axis, self.cut).units
            return SharedSequence.of_units([unit.like(unit.local.clone()) for unit in units], self.cut.sharing)
        return SharedSequence(self.cut.pick(self.leaf, self.axis).clone(), self.axis, self.cut)


class Draw(random.Random):
    """Random arguments. A sequence is along any dimension, and often as long as another one is.

    Attributes:
        function, owner: the name of the function that is to be called, and of the module or class that has it.
        shape, axis: of the first argument and of its sequence.
        of_shapes: only shapes are compared.
        shapes: the arguments that were drawn.
    """

    of_shapes = False
    shapes: object = None

    def __init__(self, ranks, function: str, owner: str, number: int, units: int | None = None):
        super().__init__(f"{function} {owner} {number}")
        self.function, self.owner = function, owner
        self.numbers = torch.Generator().manual_seed(self.randrange(2**31))
        length = max(units or 0, self.choice([1, 2, 3, 4, 5, 7]))
        kind = self.choice(LAYOUTS)
        layout = SequenceLayout(length, units or ranks.world_size, "contiguous" if units else kind)
        sharing = Sharing(ranks, layout=layout.kind, strict=self.often(0.2), units=units)
        self.cut = SequenceCut(sharing, layout, self.choice([1, 1, 1, 2]))
        self.sized(self.choice([1, 2, 3, 3, 3, 4]), length)

    def sized(self, dims: int, length: int | None = None) -> "Draw":
        """Draws the shape again, of so many dimensions."""
        length = length or self.cut.length
        self.axis = self.randrange(dims)
        self.shape = [self.choice([1, 2, 3, length, self.cut.blocks * length]) for _ in range(dims)]
        self.shape[self.axis] = self.cut.blocks * length
        return self

    @property
    def dims(self) -> int:
        return len(self.shape)

    def often(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def data(self, shape, dtype=torch.float64) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.numbers) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(0, 5, tuple(shape), generator=self.numbers).to(dtype)
        numbers = torch.randn(tuple(shape), generator=self.numbers, dtype=dtype)
        return numbers.requires_grad_("floor" not in self.function)  # floor_divide has no derivative

    def x(self, dtype=torch.float64) -> Operand:
        """The shared one."""
        return Operand(self.data(self.shape, dtype), self.axis, self.cut)

    def like(self, dtype=torch.float64) -> Operand:
        """Of the same shape."""
        return self.x(dtype) if self.often() else Operand(self.data(self.shape, dtype))

    def other(self, dtype=torch.float64, smaller: bool = False):
        """What broadcasts against it, or a number."""
        kind = self.randrange(5)
        if kind == 0:
            return {torch.bool: True}.get(dtype, self.choice([2, 3, -1] if dtype == torch.int64 else [0.5, 2.0, 3]))
        if kind == 1:
            return self.like(dtype)
        first = self.randrange(self.dims + 1)
        shape = [1 if self.often(0.4) else size for size in self.shape[first:]]
        if kind == 2 and first <= self.axis:
            shape[self.axis - first] = self.shape[self.axis]
            return Operand(self.data(shape, dtype), self.axis - first, self.cut)
        if kind == 3 and not smaller:
            shape = [self.choice([1, 2]), *(1 if size == 1 and self.often() else size for size in self.shape)]
        return Operand(self.data(shape, dtype))

    def tensor(self, dtype=torch.float64, smaller: bool = False) -> Operand:
        while not isinstance(found := self.other(dtype, smaller), Operand):
            pass
        return found

    def dim(self, dims: int | None = None) -> int:
        dims = dims or self.dims
        return self.randrange(-dims, dims)

    def some_dims(self):
        """One, several or none."""
        several = self.sample(range(self.dims), self.randint(1, self.dims))
        signed = [dim - self.dims * self.often() for dim in several]
        return self.choice([signed[0], signed[0], tuple(signed), signed])

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def parts_of(self, size: int) -> list[int]:
        first = self.randint(0, size)
        return [first, size - first]


CASES: dict[str, Callable[[Draw], Arguments]] = {}


def case(names: str):
    """Decorates what draws arguments for the functions of these names."""

    def register(arguments):
        CASES.update(dict.fromkeys(names.split(), arguments))
        return arguments

    return register


def _choice(draw: Draw, *calls: Callable[[], Arguments]) -> Arguments:
    return draw.choice(calls)()


# Position by position


@case("""
    neg negative positive abs absolute sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan
    sinh cosh tanh asin acos atan sigmoid logit erf erfc isnan isinf isfinite floor ceil round trunc frac nan_to_num
    relu relu6 gelu silu mish softplus softsign hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink
    leaky_relu elu celu selu log_sigmoid logical_not neg_ abs_ exp_ log_ sqrt_ rsqrt_ sigmoid_ tanh_ relu_
    zero_ special_exp2 special_expm1 special_log1p special_logit special_erf special_erfc special_round
    float half bfloat16 double int long short bool cpu clone contiguous detach detach_ zeros_like ones_like
    __get___data __repr__ __format__ __get___grad __get___T __get___mT __get___H __get___mH __iter__ is_contiguous
    adjoint type cuda
""")
def _unary(draw):
    draw.of_shapes = draw.function in ("__repr__", "__format__")
    return (draw.x(), *([""] if draw.function == "__format__" else [])), {}


@case("""
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod rsub pow maximum minimum fmax fmin
    atan2 xlogy special_xlogy eq ne lt le gt ge logical_and logical_or logical_xor clamp_min clamp_max
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
""")
def _binary(draw):
    x, y = draw.x(), draw.other()
    return ((y, x) if isinstance(y, Operand) and draw.often(0.3) else (x, y)), {}


@case("""
    __iadd__ __isub__ __imul__ __idiv__ __ifloordiv__ __imod__ add_ sub_ mul_ div_ floor_divide_ remainder_ pow_ clamp_min_ clamp_max_
    copy_
""")
def _in_place(draw):
    if draw.often(0.2):  # a part is written to what every rank has whole
        return (Operand(draw.data(draw.shape)), draw.x()), {}
    return (draw.x(), draw.other(smaller=True)), {}


@case("bitwise_and bitwise_or bitwise_xor __and__ __rand__ __or__ __ror__ __xor__ __rxor__")
def _bits(draw):
    dtype = draw.choice([torch.bool, torch.int64])
    return (draw.x(dtype), draw.other(dtype)), {}


@case("__iand__ __ior__ __ixor__")
def _bits_in_place(draw):
    dtype = draw.choice([torch.bool, torch.int64])
    return (draw.x(dtype), draw.other(dtype, smaller=True)), {}


@case("bitwise_not __invert__ __get___grad_fn")
def _not(draw):
    return (draw.x(draw.choice([torch.bool, torch.int64])),), {}


@case("addcmul addcdiv")
def _three(draw):
    return (draw.x(), draw.tensor(), draw.tensor()), {"value": 0.5} if draw.often() else {}


@case("addcmul_ addcdiv_")
def _three_in_place(draw):
    return (draw.x(), draw.tensor(smaller=True), draw.tensor(smaller=True)), {}


@case("lerp lerp_")
def _lerp(draw):
    return (draw.x(), draw.like(), draw.other(smaller=True)), {}


@case("where")
def _where(draw):
    if draw.owner == "torch":
        return _choice(
            draw,
            lambda: ((draw.like(torch.bool), draw.x(), draw.other()), {}),
            lambda: ((draw.x(torch.bool), draw.other(), draw.other()), {}),
            lambda: ((draw.x(torch.bool),), {}),
        )
    return (draw.x(), draw.tensor(torch.bool), draw.other()), {}


@case("masked_fill masked_fill_")
def _masked_fill(draw):
    mask = draw.tensor(torch.bool, smaller=draw.function.endswith("_"))
    return (draw.x(), mask, draw.choice([2.0, Operand(draw.data(()))])), {}


@case("clamp clip clamp_")
def _clamp(draw):
    if draw.often():
        return (draw.x(), -0.5, draw.choice([None, 0.5])), {}
    return (draw.x(),), {draw.choice(["min", "max"]): draw.tensor(smaller=True)}


@case("masked_scatter")
def _masked_scatter(draw):
    mask = draw.like(torch.bool)
    return (draw.x(), mask, Operand(draw.data((int(mask.leaf.sum()) + 1,)))), {}


@case("fill_")
def _fill(draw):
    return (draw.x(), draw.choice([2.0, Operand(draw.data(()))])), {}


@case("full_like")
def _full_like(draw):
    return (draw.x(), 1.5), {}


@case("empty_like")
def _empty_like(draw):
    draw.of_shapes = True
    return (draw.x(),), {}


@case("requires_grad_ __set___requires_grad")
def _requires_grad(draw):
    return (draw.x(torch.float64), True), {}


@case("type_as")
def _type_as(draw):
    return (draw.x(), draw.other(torch.int64) if draw.often() else draw.like()), {}


@case("to")
def _to(draw):
    return (draw.x(), draw.choice([torch.float32, torch.int64, "cpu", draw.tensor(torch.int64)])), {}


@case("new_zeros new_ones new_empty new_full new_tensor")
def _new(draw):
    draw.of_shapes = draw.function == "new_empty"
    more = {"new_full": (2.0,), "new_tensor": ()}.get(draw.function, ())
    if draw.function == "new_tensor":
        return (draw.x(), [2]), {}
    shape = [*draw.shape[: draw.axis + 1], *draw.choice([draw.shape[draw.axis + 1 :], [2], [2, draw.cut.length], []])]
    if draw.often(0.2):
        shape = [draw.choice([2, size]) for size in draw.shape]
    return _choice(
        draw,
        lambda: ((draw.x(), shape, *more), {}),
        lambda: ((draw.x(), *([shape] if more else shape), *more), {}),
        lambda: ((draw.x(),), {"size": shape, **({"fill_value": 2.0} if more else {})}),
    )


# The last dimensions


@case("linear")
def _linear(draw):
    width, wide = draw.size(-1), draw.choice([1, 2, draw.cut.length])
    weight = Operand(draw.data((width,) if draw.often(0.1) else (wide, width)))
    bias = [Operand(draw.data((wide,)))] if len(weight.leaf.shape) == 2 and draw.often() else []
    return (draw.x(), weight, *bias), {}


@case("matmul __matmul__")
def _matmul(draw):
    x, kind = draw.x(), draw.randrange(5)
    if draw.dims < 2:
        return (x, Operand(draw.data((draw.size(-1),)))), {}
    if kind == 0:  # with itself, and what is like it
        other = draw.like()
        turned = Operand(other.leaf.detach().mT.contiguous().requires_grad_(), cut=other.cut)
        turned.axis = {draw.dims - 1: draw.dims - 2, draw.dims - 2: draw.dims - 1}.get(draw.axis, draw.axis)
        return ((x, turned) if draw.often() else (turned, x)), {}
    wide = draw.choice([2, draw.cut.length])
    batch = [1 if draw.often(0.3) else size for size in draw.shape[draw.randrange(draw.dims - 1) : -2]]
    if kind == 1:
        return (Operand(draw.data((*batch, wide, draw.size(-2)))), x), {}
    if kind == 2:
        return (x, Operand(draw.data((draw.size(-1),)))), {}
    shape = [*([2] if draw.often(0.2) and len(batch) == draw.dims - 2 else []), *batch, draw.size(-1), wide]
    return (x, Operand(draw.data(shape))), {}


@case("mm bmm")
def _mm(draw):
    draw.sized(2 if draw.function == "mm" else 3)
    batch, wide = draw.shape[:-2], draw.choice([2, draw.cut.length])
    if draw.often():
        return (draw.x(), Operand(draw.data((*batch, draw.size(-1), wide)))), {}
    return (Operand(draw.data((*batch, wide, draw.size(-2)))), draw.x()), {}


@case("addmm")
def _addmm(draw):
    draw.sized(2)
    wide = draw.choice([2, draw.cut.length])
    shape = draw.choice([(), (wide,), (1,), (1, wide), (draw.size(0), 1), (draw.size(0), wide)])
    options = {"beta": 0.5, "alpha": 2.0} if draw.often() else {}
    return (Operand(draw.data(shape)), draw.x(), Operand(draw.data((draw.size(1), wide)))), options


@case("layer_norm rms_norm")
def _norm(draw):
    shape = tuple(draw.shape[draw.randrange(draw.dims) :])
    weights = [Operand(draw.data(shape)) for _ in range(2 if draw.function == "layer_norm" else 1)]
    return (draw.x(), shape, *weights[: draw.randint(0, 2)]), {"eps": 0.1} if draw.often() else {}


@case("embedding")
def _embedding(draw):
    options = draw.choice([{}, {"padding_idx": 1}, {"padding_idx": -1}, {"max_norm": 1.0}])
    return (draw.x(torch.int64), Operand(draw.data((5, draw.choice([2, draw.cut.length]))))), options


@case("softmax log_softmax special_softmax special_log_softmax cumsum cumprod logcumsumexp")
def _along(draw):
    return _choice(draw, lambda: ((draw.x(), draw.dim()), {}), lambda: ((draw.x(),), {"dim": draw.dim()}))


@case("normalize")
def _normalize(draw):
    return (draw.x(),), {"dim": draw.some_dims(), **({"p": draw.choice([1.0, 3.0])} if draw.often() else {})}


@case("dropout")
def _dropout(draw):
    return (draw.x(), draw.choice([0.0, 1.0]), draw.often()), {"inplace": draw.often()}


# Shapes


@case("transpose swapaxes swapdims")
def _transpose(draw):
    return (draw.x(), draw.dim(), draw.dim()), {}


@case("permute")
def _permute(draw):
    return (draw.x(), draw.sample(range(draw.dims), draw.dims)), {}


@case("movedim moveaxis")
def _movedim(draw):
    if draw.often():
        return (draw.x(), draw.dim(), draw.dim()), {}
    count = draw.randint(1, draw.dims)
    return (draw.x(), *(tuple(draw.sample(range(draw.dims), count)) for _ in range(2))), {}


@case("t")
def _t(draw):
    draw.sized(draw.choice([1, 2]))
    return (draw.x(),), {}


@case("unsqueeze")
def _unsqueeze(draw):
    return (draw.x(), draw.dim(draw.dims + 1)), {}


@case("squeeze")
def _squeeze(draw):
    return _choice(
        draw,
        lambda: ((draw.x(),), {}),
        lambda: ((draw.x(), draw.dim()), {}),
        lambda: ((draw.x(),), {"dim": draw.dim()}),
        lambda: ((draw.x(), tuple(draw.sample(range(draw.dims), draw.randint(1, draw.dims)))), {}),
    )


@case("chunk")
def _chunk(draw):
    return (draw.x(), draw.randint(1, 3), draw.dim()), {}


@case("tensor_split")
def _tensor_split(draw):
    dim = draw.dim()
    return (draw.x(), draw.choice([1, 2, 3, (0,), (1,), (-1,), (0, draw.size(dim))]), dim), {}


@case("split")
def _split(draw):
    dim = draw.dim()
    return (draw.x(), draw.choice([1, 2, 10**8, draw.parts_of(draw.size(dim))]), dim), {}


@case("split_with_sizes")
def _split_with_sizes(draw):
    dim = draw.dim()
    return (draw.x(), draw.choice([[draw.size(dim)], draw.parts_of(draw.size(dim))]), dim), {}


@case("unbind")
def _unbind(draw):
    return (draw.x(), *([draw.dim()] if draw.often() else [])), {}


@case("select")
def _select(draw):
    dim = draw.dim()
    return (draw.x(), dim, draw.randrange(-draw.size(dim), draw.size(dim))), {}


@case("narrow")
def _narrow(draw):
    dim = draw.dim()
    start, length = draw.parts_of(draw.size(dim))
    return (draw.x(), dim, *draw.choice([(start, length), (0, start), (0, draw.size(dim)), (-start, start)])), {}


@case("cat concat stack")
def _cat(draw):
    tensors = [draw.x(), *(draw.like() for _ in range(draw.randint(0, 2)))]
    dim = draw.dim(draw.dims + (draw.function == "stack"))
    if draw.function != "stack" and draw.often(0.3):
        shape = list(draw.shape)
        shape[dim] = draw.choice([0, 1, shape[dim] + 1])
        tensors.append(Operand(draw.data(shape)))
    draw.shuffle(tensors)
    return (tensors, *([dim] if draw.often() else [])), {}


@case("pad")
def _pad(draw):
    """Also by as much as is cut off at the other end, which keeps the length."""
    amounts = []
    for _ in range(draw.randint(1, draw.dims)):
        amounts += draw.choice([(0, 0), (1, 1), (0, 1), (1, -1), (-1, 1), (2, -2)])
    return (draw.x(), amounts), {"value": 2.0} if draw.often(0.3) else {}


@case("repeat")
def _repeat(draw):
    return (draw.x(), [draw.choice([1, 1, 2]) for _ in range(draw.dims + draw.often(0.3))]), {}


@case("repeat_interleave")
def _repeat_interleave(draw):
    dim = draw.dim()
    each = torch.randint(0, 3, (draw.size(dim),), generator=draw.numbers)
    return (draw.x(), draw.choice([1, 2, Operand(each)])), {"dim": dim} if draw.often(0.8) else {}


@case("glu")
def _glu(draw):
    return (draw.x(), draw.dim()), {}


@case("view_as_real view_as_complex")
def _complex(draw):
    if draw.function == "view_as_complex":
        draw.shape, draw.axis = [*draw.shape, 2], draw.axis
        return (draw.x(),), {}
    return (Operand(torch.complex(draw.data(draw.shape), draw.data(draw.shape)).detach(), draw.axis, draw.cut),), {}


@case("amax amin logsumexp special_logsumexp norm var std all any prod sum mean linalg_vector_norm")
def _reduced(draw):
    keep = {"keepdim": draw.often()} if draw.often() else {}
    if draw.function in ("prod", "logsumexp", "special_logsumexp") or draw.often():
        dim = draw.dim() if draw.function == "prod" else draw.some_dims()
    else:
        return (draw.x(),), {}
    if draw.function in ("norm", "linalg_vector_norm"):
        return (draw.x(), draw.choice([1.0, 2.0, float("inf")]), dim), keep
    return _choice(draw, lambda: ((draw.x(), dim), keep), lambda: ((draw.x(),), {"dim": dim, **keep}))


@case("argmax argmin")
def _place(draw):
    keep = {"keepdim": True} if draw.often() else {}
    return ((draw.x(), draw.dim()), keep) if draw.often(0.8) else ((draw.x(),), {})


@case("max min")
def _largest(draw):
    keep = {"keepdim": True} if draw.often() else {}
    if draw.often(0.3):
        return _binary_tensors(draw)
    return ((draw.x(), draw.dim()), keep) if draw.often(0.8) else ((draw.x(),), {})


def _binary_tensors(draw):
    x, y = draw.x(), draw.tensor()
    return draw.choice([((x, y), {}), ((y, x), {}), ((x,), {"other": y})])


@case("gather scatter scatter_add scatter_reduce scatter_ scatter_add_ scatter_reduce_")
def _by_index(draw):
    """By places that differ in each row, because the order of writes to one place is not defined."""
    dim = draw.dim()
    places = torch.rand(draw.shape, generator=draw.numbers).argsort(dim)
    places = places.narrow(dim, 0, draw.randint(1, draw.size(dim)))
    if draw.often(0.2):
        other = draw.dim()
        places = places.narrow(other, 0, draw.randint(1, places.size(other)))
    shared = draw.cut if places.size(draw.axis) == draw.size(draw.axis) and draw.often(0.7) else None
    index = Operand(places, draw.axis, shared)
    if draw.function == "gather":
        return (draw.x(), dim, index), {}
    source = Operand(draw.data(places.shape), draw.axis, draw.choice([shared, None]))
    if draw.function in ("scatter", "scatter_") and draw.often():
        return _choice(
            draw, lambda: ((draw.x(), dim, index, 2.0), {}), lambda: ((draw.x(), dim, index), {"value": 2.0})
        )
    reduce = [draw.choice(["sum", "amax"])] if "reduce" in draw.function else []
    return (draw.x(), dim, index, source, *reduce), {}


@case("one_hot")
def _one_hot(draw):
    return (draw.x(torch.int64), *draw.choice([[], [-1], [5]])), {}


@case("topk")
def _topk(draw):
    dim = draw.dim()
    return (draw.x(), draw.randint(1, draw.size(dim)), dim), {}


@case("__getitem__")
def _indexed(draw):
    return (draw.x(), draw_index(draw)), {}


@case("__setitem__")
def _assigned(draw):
    x, index = draw.x(), draw_index(draw)
    shape = list(torch.empty(draw.shape)[index].shape)
    if draw.often(0.2) and shape == draw.shape:
        return (Operand(draw.data(draw.shape)), index, x), {}
    if draw.often() and shape == draw.shape:
        return (x, index, draw.other(smaller=True)), {}
    value = Operand(draw.data([1 if draw.often(0.2) else size for size in shape[draw.randrange(len(shape) + 1) :]]))
    return (x, index, value if draw.often() else 2.0), {}


def draw_index(draw: Draw):
    entries: list = []
    for size in draw.shape[: draw.randint(0, draw.dims)]:
        first = draw.randint(0, size)
        whole = slice(None)
        entries.append(
            draw.choice([whole, whole, whole, slice(first, None), slice(first), slice(None, None, 2), 0, -1])
        )
        if draw.often(0.1):
            entries[-1] = draw.choice([slice(0, size), slice(-size, None), slice(None, size + 3)])
    if draw.often(0.3):
        left = len(entries)
        entries.append(...)
        entries += [slice(None), 0, -1][: draw.randint(0, min(3, draw.dims - left))]
    if draw.often(0.3):
        entries.insert(draw.randint(0, len(entries)), None)
    return entries[0] if len(entries) == 1 and draw.often() else tuple(entries)


@case("view reshape")
def _view(draw):
    return (draw.x(), draw_shape(draw)), {}


def draw_shape(draw: Draw) -> list[int]:
    """Of as many elements: neighbours joined, a dimension in two, or their factors in any order."""
    shape = list(draw.shape)
    for _ in range(draw.randint(1, 2)):
        kind = draw.randrange(4)
        if kind == 0 and len(shape) > 1:
            at = draw.randrange(len(shape) - 1)
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == 1:
            at = draw.randrange(len(shape))
            factor = draw.choice([n for n in range(1, shape[at] + 1) if shape[at] % n == 0])
            shape[at : at + 1] = [factor, shape[at] // factor]
        elif kind == 2:
            shape.insert(draw.randint(0, len(shape)), 1)
        else:
            draw.shuffle(shape)
    if draw.often(0.3):
        shape[draw.randrange(len(shape))] = -1
    return shape


@case("flatten")
def _flatten(draw):
    first = draw.randrange(draw.dims)
    return (draw.x(), first, draw.randrange(first, draw.dims) - draw.dims * draw.often()), {}


@case("unflatten")
def _unflatten(draw):
    dim = draw.dim()
    factor = draw.choice([n for n in range(1, draw.size(dim) + 1) if draw.size(dim) % n == 0])
    return (draw.x(), dim, draw.choice([(factor, -1), (-1, factor), (factor, draw.size(dim) // factor)])), {}


@case("view_as reshape_as")
def _view_as(draw):
    shape = [int(size) for size in torch.empty(draw.shape).reshape(draw_shape(draw)).shape]
    return (draw.x(), Operand(draw.data(shape))), {}


@case("expand broadcast_to")
def _expand(draw):
    shape = [draw.choice([-1, size, 3 if size == 1 else size]) for size in draw.shape]
    return (draw.x(), [*([2] if draw.often() else []), *shape]), {}


@case("expand_as")
def _expand_as(draw):
    shape = [draw.choice([size, 3 if size == 1 else size]) for size in draw.shape]
    return (draw.x(), Operand(draw.data([*([2] if draw.often() else []), *shape]))), {}


@case("cross_entropy")
def _cross_entropy(draw):
    draw.sized(draw.choice([2, 2, 3, 4]))
    classes, kept = draw.size(1), [0, *range(2, draw.dims)]
    target = torch.randint(0, classes, [draw.size(dim) for dim in kept], generator=draw.numbers)
    options: dict = {"reduction": draw.choice(["none", "sum", "mean"])}
    if draw.often():
        options["label_smoothing"] = 0.1
    if draw.often():
        options["ignore_index"] = 0
    if draw.often():
        options["weight"] = Operand(torch.rand(classes, generator=draw.numbers, dtype=torch.float64) + 0.5)
    at = kept.index(draw.axis) if draw.axis in kept else None
    shared = at is not None and draw.often()
    return (draw.x(), Operand(target, at or 0, draw.cut if shared else None)), options


@case("scaled_dot_product_attention")
def _attention(draw):
    dtype = draw.choice([torch.float32, torch.float64])
    draw.shape, draw.axis = [draw.choice([1, 2, 4]) for _ in range(4)], 2
    draw.shape[2] = draw.cut.blocks * draw.cut.length
    rows = draw.size(2)
    options: dict = draw.choice([{}, {"is_causal": True}, {"scale": 0.5}])
    if "is_causal" not in options and draw.often():
        allowed = draw.choice([torch.ones(rows, rows).tril(), torch.rand(rows, rows, generator=draw.numbers) + 0.4])
        options = {"attn_mask": Operand(allowed > 0.5 if draw.often() else draw.data((rows, rows), dtype))}
        if options["attn_mask"].leaf.dtype == torch.bool:
            options["attn_mask"].leaf[:, 0] = True
    return (draw.x(dtype), draw.like(dtype), draw.like(dtype)), options


@case("multi_head_attention_forward")
def _multihead(draw):
    dtype = torch.float32
    draw.shape, draw.axis = [0, draw.choice([1, 2, draw.cut.length]), 4], 0
    draw.shape[0] = draw.cut.blocks * draw.cut.length
    x = draw.x(dtype)
    weights = [Operand(draw.data(shape, dtype)) for shape in ((12, 4), (12,), (4, 4), (4,))]
    options: dict = {"need_weights": draw.often(0.2)}
    if draw.often():
        options["attn_mask"] = Operand(torch.ones(draw.size(0), draw.size(0), dtype=torch.bool).triu(1))
    projections = (4, 2, weights[0], weights[1], None, None, False, 0.0, weights[2], weights[3])
    return (x, x, x, *projections), options


# Called both ways


class RefusedError(Exception):
    """The function is not done of a shared sequence, and says so."""


def outcomes(draw: Draw, func: Callable) -> Iterator[tuple[object, object]]:
    """Pairs of what the function of the whole, and of the parts, gives and does: results, arguments, gradients.

    Raises:
        RefusedError: with a ValueError that is the shared sequence's own.
    """
    args, kwargs = CASES[draw.function](draw)
    if draw.often(0.1) and draw.owner != "TensorBase":
        args, kwargs = args[1:], {"input": args[0], **kwargs}
    draw.shapes = tree_map_only(Operand, lambda one: (tuple(one.leaf.shape), one.cut and one.axis), (args, kwargs))
    operands = list({id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, Operand)}.values())
    expected = _called(draw, func, args, kwargs, operands, shared=False)
    found = _called(draw, func, args, kwargs, operands, shared=True)
    if isinstance(found, ValueError) and ("strict: " in str(found) or "shared sequence" in str(found)):
        raise RefusedError(str(found))
    if isinstance(expected, Exception) or isinstance(found, Exception):
        yield isinstance(expected, Exception), isinstance(found, Exception) and found
        return
    assert len(expected) == len(found)
    yield from zip(expected, found, strict=True)


def _called(draw: Draw, func, args, kwargs, operands: list[Operand], shared: bool) -> list | Exception:
    tensors = {id(one): one.tensor(shared) for one in operands}
    here, named = tree_map_only(Operand, lambda one: tensors[id(one)], (args, kwargs))
    try:
        out = func(*here, **named)
    except Exception as error:
        return error
    results = [_whole(leaf) for leaf in tree_leaves((list(out) if draw.function == "__iter__" else out, here, named))]
    if draw.of_shapes:
        return [getattr(result, "shape", type(result)) for result in results]
    total = torch.zeros((), dtype=torch.float64)
    for place, result in enumerate(results):
        if isinstance(result, torch.Tensor) and result.requires_grad:
            weights = torch.linspace(0.3, 1.7, result.numel()).view(result.shape).to(result.dtype) + place
            total = total + (result * weights).sum()
    leaves = [one.leaf for one in operands if one.leaf.requires_grad]
    if total.requires_grad and leaves:
        try:
            results += torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            return error
    return [result.detach() if isinstance(result, torch.Tensor) else result for result in results]


def _whole(leaf):
    return leaf.whole() if isinstance(leaf, SharedSequence) else leaf
