"""Form of a module of experts: what the experts are cut by, found in its structure and shown on small random weights.

A module is a layer of experts if its parameters are stacked, expert by expert, along their first dimension (fused
weights), and if its forward(tokens, chosen experts, routing weights) is a sum over the chosen experts that treats every
token alone. A name shows none of this, so the module's own forward is run on a few random experts, whole and in parts:
outputs and all gradients must agree. `inner_of` finds the intermediate dimension of an expert in the same way.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from weft.sharding.sizes import Cut, cut_over, split_sizes

_EXPERTS = 5  # of the small layer
_CHOSEN = ((0, 1, 3), (4, 3, 0), (1, 0, 4), (3, 4, 1), (0, 4, 1), (1, 3, 4), (4, 0, 3))  # by each of its tokens
_PARTS = (range(2), range(2, 3), range(3, 5))  # expert 2 gets no token
_MOST_NUMBERS = 1 << 24  # elements of a trial at the layer's own widths
_AT_ONE = 24  # further tokens that all choose the same expert
_DROPS = "its output for a token depends on how many chose the same expert (a capacity drops tokens, say)"
_NO_SUM = "the sum over parts of its experts is not what all of them give"
_TOLERANCE = 1e-4  # of results in fp64, because some experts compute in fp32 inside; a wrong form is off by far more


@dataclass(frozen=True)
class ExpertForm:
    """Form of a module of fused experts.

    Attributes:
        experts: number of experts.
        hidden: features of a token.
        counts: the module's attributes that are the number of experts.
        order: places of the tokens, the chosen experts and the routing weights among the arguments of forward.
    """

    experts: int
    hidden: int
    counts: tuple[str, ...]
    order: tuple[int, int, int]

    def part_of(self, module: nn.Module, parameters: dict[str, nn.Parameter | None], experts: int) -> nn.Module:
        """Return a copy of the module that shares all but the parameters and the number of experts."""
        part = _bare_copy(module, parameters)
        for name in self.counts:
            setattr(part, name, experts)
        return part

    def run(self, part: nn.Module, rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the weighted output of one expert for each row."""
        return _call(part, self.order, rows, expert.unsqueeze(-1), scale.unsqueeze(-1))


@dataclass(frozen=True)
class InnerForm:
    """Cut of the intermediate dimension of fused experts: the outputs of the parts add up.

    Attributes:
        size: the intermediate dimension of an expert.
        cuts: by parameter, the dimension that is cut, the number of parts in it that are each cut by themselves, and
            the number of elements that stay together.
        once: parameters without that dimension (the bias of the output), which one part adds and the others do not.
        attributes: the module's attributes that are the intermediate dimension.
    """

    size: int
    cuts: dict[str, tuple[int, int, int]]
    once: tuple[str, ...]
    attributes: tuple[str, ...]

    def cut_over(self, name: str, length: int, world: int) -> tuple[int, Cut]:
        """Return the dimension of a parameter that is cut, and its cut over `world` ranks."""
        dim, parts, unit = self.cuts[name]
        return dim, cut_over(length, world, unit=unit, parts=[length // parts] * parts)


def has_form(module: nn.Module) -> bool:
    """Return whether the module's parameters look like fused experts. It may still be refused by `form_of`."""
    return _stacked(module) is not None and len(_arguments(module)) >= 3


def form_of(module: nn.Module) -> ExpertForm | str:
    """Return the form of a module of experts, or the reason why it has none."""
    if not has_form(module):
        return "it is no layer of fused experts, forward(tokens, chosen experts, routing weights)"
    return _tried(_shown, module)


def inner_of(module: nn.Module) -> InnerForm | str:
    """Return how the intermediate dimension of a module of fused experts is cut, or the reason why it cannot be."""
    form = form_of(module)
    return form if isinstance(form, str) else _tried(_shown_inner, module, form)


_known: dict[tuple, Any] = {}


def _tried(trial: Callable, module: nn.Module, *given: ExpertForm) -> Any:
    """Return the result of a trial of the module, which is run once for all modules like it."""
    key = trial, *_signature(module)
    if key not in _known:
        devices = torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu")
        with devices[0], devices[1], torch.random.fork_rng([]), torch.enable_grad():
            _known[key] = trial(module, *given)
    return _known[key]


def _stacked(module: nn.Module) -> int | None:
    """Return the first size that all parameters have in common; None if they are no fused experts."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not any(parameter.dim() == 3 for parameter in own) or any(parameter.dim() < 2 for parameter in own):
        return None
    if any(True for child in module.children() for _ in (*child.parameters(), *child.buffers())):
        return None
    if any(buffer is not None for buffer in module._buffers.values()):
        return None
    sizes = {parameter.size(0) for parameter in own}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 1 else None


def _arguments(module: nn.Module) -> list[str]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _signature(module: nn.Module) -> tuple:
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    simple = (int, float, str, bool, type(None))
    attributes = tuple(sorted((name, value) for name, value in vars(module).items() if isinstance(value, simple)))
    kind = getattr(vars(module).get("config"), "_experts_implementation", None)
    children = tuple((name, type(child), repr(child)) for name, child in module.named_children())
    return type(module), shapes, repr(attributes), kind, children


def _shown(module: nn.Module) -> ExpertForm | str:
    reasons: list[str] = []
    for sizes, form in product(_sizes_of_trials(module), _forms(module)):
        failed = _difference(module, form, None, sizes)
        if not failed:
            return form
        reasons.append(failed)
    return next((reason for found in (_DROPS, _NO_SUM) for reason in reasons if found in reason), reasons[0])


def _shown_inner(module: nn.Module, form: ExpertForm) -> InnerForm | str:
    reason = "no dimension of its parameters is that inside of an expert"
    for sizes, inner in product(_sizes_of_trials(module), _inner_forms(module, form)):
        failed = _difference(module, form, inner, sizes)
        if not failed:
            return inner
        reason = failed.replace(_NO_SUM, "the sum over parts of their intermediate dimension is not the whole")
    return reason


def _sizes_of_trials(module: nn.Module) -> Iterator[dict[int, int]]:
    """Yield sizes of the layer to those of a trial: small ones in the same proportions by two, then its own widths."""
    parameters = list(module.parameters())
    experts = parameters[0].size(0)
    sizes: dict[int, int] = {}
    for size in sorted({size for parameter in parameters for size in parameter.shape[1:]}):
        half = sizes.get(size // 2) if size % 2 == 0 else None
        sizes[size] = 2 * half if half else 2 * len(sizes) + 6
    yield {experts: _EXPERTS, **sizes}
    if sum(parameter.numel() for parameter in parameters) // experts * _EXPERTS <= _MOST_NUMBERS:
        yield {experts: _EXPERTS}


def _forms(module: nn.Module) -> Iterator[ExpertForm]:
    """Yield forms that may be right, the likeliest first."""
    parameters = list(module.parameters())
    experts = parameters[0].size(0)
    equal = tuple(name for name, value in vars(module).items() if type(value) is int and value == experts)
    named = tuple(name for name in equal if "expert" in name)
    widths = sorted({size for parameter in parameters for size in parameter.shape[1:]})
    for order, counts, hidden in product(((0, 1, 2), (0, 2, 1)), dict.fromkeys([named, equal, ()]), widths):
        yield ExpertForm(experts, hidden, counts, order)


def _inner_forms(module: nn.Module, form: ExpertForm) -> Iterator[InnerForm]:
    """Yield cuts that may be right: gate and up one after another or in turns, and each dimension that is possible."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    choices: list[list] = []
    for parameter in own.values():
        other = [dim for dim in range(1, parameter.dim()) if parameter.size(dim) != form.hidden]
        both = [dim for dim in range(1, parameter.dim()) if parameter.size(dim) == form.hidden]
        # A matrix has one of each. If it has two dimensions of the size of a token, either may be the inner one.
        choices.append(other if other else both if parameter.dim() == 3 else [None, *both])
    chosen: tuple[int | None, ...]
    for chosen in product(*choices):
        dims = dict(zip(own, chosen, strict=True))
        sizes = {name: own[name].size(dim) for name, dim in dims.items() if dim is not None}
        size = min(sizes.values())
        if set(sizes.values()) - {size, 2 * size}:
            continue
        equal = tuple(name for name, value in vars(module).items() if type(value) is int and value == size)
        named = tuple(name for name in equal if "hidden" not in name)
        for attributes in dict.fromkeys([named, equal, ()]):
            for parts, unit in ((2, 1), (1, 2)) if len(set(sizes.values())) > 1 else ((1, 1),):
                cuts = {
                    name: (dim, parts if sizes[name] > size else 1, unit if sizes[name] > size else 1)
                    for name, dim in dims.items()
                    if dim is not None
                }
                yield InnerForm(size, cuts, tuple(name for name in own if name not in cuts), attributes)


def _difference(module: nn.Module, form: ExpertForm, inner: InnerForm | None, sizes: dict[int, int]) -> str:
    """Run a layer of these sizes whole and in parts; return how the results differ, "" if they do not.

    Args:
        inner: how the parts are cut; None: by experts.
    """
    message = ""
    for dtype in (torch.float64, torch.float32):
        try:
            difference = _unlike(module, form, inner, sizes, dtype)
            if not difference:
                return ""
            message = message or difference
        except Exception as error:  # a module's code may raise anything on another type or other sizes
            message = message or f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"on small random weights, {message}"


def _unlike(
    module: nn.Module, form: ExpertForm, inner: InnerForm | None, sizes: dict[int, int], dtype: torch.dtype
) -> str:
    """Return how the layer differs whole and in parts, in training and in evaluation; "" if it does not."""
    hidden = sizes.get(form.hidden, form.hidden)
    if inner is None:
        summed: Callable = partial(_summed, form)
    else:
        summed = partial(_summed_inner, form, inner, sizes.get(inner.size, inner.size))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    loads = [torch.tensor(_CHOSEN), torch.full((_AT_ONE, 1), 1)]
    calls = [(draw(len(index), hidden), index, draw(*index.shape).sigmoid()) for index in loads]
    whole: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        shape = [] if parameter is None else [_EXPERTS, *(sizes.get(size, size) for size in parameter.shape[1:])]
        whole[name] = None if parameter is None else nn.Parameter(draw(*shape) / 2)
    small = _bare_copy(module, whole)
    for name, value in vars(module).items():
        if type(value) is int and value in sizes:
            setattr(small, name, sizes[value])
    for name in form.counts:
        setattr(small, name, _EXPERTS)
    for training in (True, False):
        small.training = training
        for (x, index, weights), difference in zip(calls, (_NO_SUM, _DROPS), strict=True):
            expected = _results(partial(_call, small, form.order), x, index, weights, whole)
            in_parts = _results(partial(summed, small, whole), x, index, weights, whole)
            pairs = zip(expected, in_parts, strict=True)
            if not all(torch.allclose(one, other, _TOLERANCE, _TOLERANCE) for one, other in pairs):
                return difference
    return ""


def _results(run, x, index, weights, parameters) -> list[torch.Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = run(x, index, weights)
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        raise TypeError(f"its forward returns no tensor of the shape of the tokens {tuple(x.shape)}")
    inputs = [x, weights, *(p for p in parameters.values() if p is not None)]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def _summed(form: ExpertForm, small: nn.Module, whole, x, index, weights) -> torch.Tensor:
    """Return the sum over parts of the experts, each with the tokens that chose it alone."""
    y = torch.zeros_like(x)
    for experts in _PARTS:
        own = {name: None if p is None else p[experts.start : experts.stop] for name, p in whole.items()}
        token, choice = torch.where((index >= experts.start) & (index < experts.stop))
        if len(token):
            part = form.part_of(small, own, len(experts))
            rows = form.run(part, x[token], index[token, choice] - experts.start, weights[token, choice])
            y = y.index_add(0, token, rows)
    return y


def _summed_inner(form: ExpertForm, inner: InnerForm, size: int, small: nn.Module, whole, x, index, weights):
    """Return the sum over parts of the intermediate dimension, each with all tokens."""
    y = torch.zeros_like(x)
    given = {name: p for name, p in whole.items() if p is not None}
    world = min(3, size)
    for rank in range(world):
        own: dict[str, torch.Tensor | None] = dict.fromkeys(whole)
        for name, parameter in given.items():
            if name in inner.once:
                own[name] = parameter if rank == 0 else torch.zeros_like(parameter)
                continue
            dim, cut = inner.cut_over(name, parameter.size(inner.cuts[name][0]), world)
            stretches = cut.stretches[rank]
            own[name] = torch.cat([parameter.narrow(dim, start, stop - start) for start, stop in stretches], dim)
        part = form.part_of(small, own, _EXPERTS)  # type: ignore[arg-type]
        for name in inner.attributes:
            setattr(part, name, split_sizes(size, world)[rank])
        y = y + _call(part, form.order, x, index, weights)
    return y


def _bare_copy(module: nn.Module, parameters) -> nn.Module:
    """Return a shallow copy with other parameters (or tensors in their place) and without a forward of its own."""
    part = copy.copy(module)
    vars(part).pop("forward", None)  # a trace's
    vars(part)["_parameters"] = parameters
    vars(part)["_modules"] = dict(module._modules)
    return part


def _call(part: nn.Module, order: tuple[int, int, int], *given: torch.Tensor) -> torch.Tensor:
    return type(part).forward(part, *(given[place] for place in order))
