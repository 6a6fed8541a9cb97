"""Parameters in a call on several units of a batch at once: each unit's gradients, added in the tree over units.

Such a parameter has an attribute that the functions of ops find. A product gives the sums of its units at once, as
leaves of its depth. Any other function takes one view for each unit, whose gradients autograd keeps apart.
"""

from collections.abc import Callable, Sequence

import torch

from weft.ops.backward import RankFunction, as_matrix, first_order
from weft.ops.invariant import add_in_tree, column_sums, linear, multiply, product_sum, wgrad

_ATTRIBUTE = "_weft_units"


class ValueOfUnits:
    """A tensor that all units use, made of parameters by functions that no unit takes part in.

    Args:
        each: the tensor once for each unit; gradients of these are kept apart.
    """

    def __init__(self, each: list[torch.Tensor]):
        self._each = each

    def each(self, _: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor for each unit, given the tensor for all."""
        return self._each


class ParameterOfUnits(ValueOfUnits):
    """A parameter that several units use. The parameter is marked with it.

    Args:
        count: number of the units here.
        nodes: nodes of the tree that lie here, as (first unit, unit after the last), counted from the first one here;
            None if `by_unit` is to return the gradients.
        complete: is called when all uses have given their gradients, if there are no nodes.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        count: int,
        nodes: Sequence[tuple[int, int]] | None,
        complete: Callable[[], None] | None = None,
    ):
        self._each = []
        self._complete, self._uses = complete, 0
        self.count, self.nodes = count, nodes
        self.products = self.others = 0  # uses in products, and as views for each unit, whose gradients autograd adds
        self._sums: list[torch.Tensor | None] | None = None
        self._of_units: list[torch.Tensor | None] | None = None
        setattr(parameter, _ATTRIBUTE, self)

    def each(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        self.others += 1
        if not self._each:
            self._each = list(_EachUnitFunction.apply(self, parameter))
        return self._each

    def end(self) -> None:
        """Forget the views, whose graph holds this: no function uses the parameter any more."""
        self._each = []

    def put(self, of_units: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of one use, by unit."""
        held = self._of_units
        self._of_units = (
            list(of_units)
            if held is None
            else [y if x is None else x if y is None else x + y for x, y in zip(held, of_units, strict=True)]
        )
        once = not (self.products and self.others) and self.products < 2
        if once and self.nodes is not None and None not in self._of_units:
            self._sums, self._of_units = self.sums_of(self._of_units), None
        self._uses += 1
        if self._complete is not None and self._uses == self.products + (self.others > 0):
            self._complete()

    def put_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take a.T @ b as the gradient of one use: a [M, N], b [M, K], with M the rows of all units."""
        a, b = as_matrix(a), as_matrix(b)
        rows = a.size(0) // self.count
        if self.products + self.others == 1 and a.dtype == torch.float32 and self.nodes is not None:
            self._sums = [
                product_sum(a[low * rows : high * rows].t(), b[low * rows : high * rows], high - low)
                for low, high in self.nodes
            ]
        else:
            pairs = zip(a.split(rows), b.split(rows), strict=True)
            self.put([multiply(x.t(), y) for x, y in pairs])

    def sums_of(self, of_units: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the sums of the nodes here of gradients by unit."""
        wide = [None if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in of_units]
        return [add_in_tree(wide[low:high]) for low, high in self.nodes or ()]

    def by_unit(self) -> list[torch.Tensor | None]:
        """Return the gradients of the units, and begin anew."""
        found = self._of_units or [None] * self.count
        self._of_units, self._uses = None, 0
        return found

    def take(self) -> tuple[list[torch.Tensor | None], int]:
        """Return the sums of the nodes and the number of units without a gradient, and begin anew."""
        sums, of_units = self._sums, self._of_units
        self._sums = self._of_units = None
        if sums is not None:
            return sums, 0  # type: ignore[return-value]
        of_units = of_units or [None] * self.count
        return self.sums_of(of_units), sum(x is None for x in of_units)


def give_units(x: torch.Tensor, value: ValueOfUnits) -> None:
    """Say that a tensor is used by several units."""
    setattr(x, _ATTRIBUTE, value)


def units_of(x: object) -> ValueOfUnits | None:
    """Return what was given to a tensor by `give_units`, or None."""
    return getattr(x, _ATTRIBUTE, None)


def parameter_of_units(x: torch.Tensor | None, product: bool = True) -> ParameterOfUnits | None:
    """Return the parameter that is about to be used for several units, in a product or otherwise; None for others."""
    found = getattr(x, _ATTRIBUTE, None)
    if type(found) is not ParameterOfUnits:
        return None
    if product:
        found.products += 1
    else:
        found.others += 1
    return found


class _EachUnitFunction(RankFunction):
    """y_unit = p.

    backward  leaves each dp_unit with the parameter
    """

    @staticmethod
    def forward(ctx, of_units: ParameterOfUnits, parameter):
        ctx.of_units = of_units
        ctx.set_materialize_grads(False)
        return tuple([parameter.view_as(parameter) for _ in range(of_units.count)])

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        ctx.of_units.put(gradients)
        return None, None


class WholeLinearFunction(RankFunction):
    """y = x @ w.T + b, with bits that depend on no number of rows.

    x [..., K]        w [N, K]        b [N]        y [..., N]

    forward   y = x @ w.T + b
    dgrad     dx = dy @ w
    wgrad     dw = dy.T @ x
    dbias     db = dy.sum(0)

    Saves x and w.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.of_units = parameter_of_units(weight), parameter_of_units(bias)
        y = linear(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape)  # autograd forbids writing to a function's view

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_weight, of_bias = ctx.of_units
        dx = multiply(dy, weight) if needs_x else None
        dw = wgrad(dy, x, of_weight) if needs_weight else None
        return dx, dw, column_sums(dy, of_bias) if needs_bias else None
