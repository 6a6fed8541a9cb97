"""Form of a module of experts: what the experts are cut by, found in its structure and shown on small random weights.

A module is a layer of experts if its parameters are stacked, expert by expert, along their first dimension (fused
weights), and if its forward(tokens, chosen experts, routing weights) is a sum over the chosen experts that treats every
token alone. A name shows none of this, so the module's own forward is run on a few random experts, whole and in parts:
outputs and all gradients must agree.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

_EXPERTS = 5  # of the small layer
_CHOSEN = ((0, 1, 3), (4, 3, 0), (1, 0, 4), (3, 4, 1), (0, 4, 1), (1, 3, 4), (4, 0, 3))  # by each of its tokens
_PARTS = (range(2), range(2, 3), range(3, 5))  # expert 2 gets no token
_MOST_NUMBERS = 1 << 24  # elements of a trial at the layer's own widths
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


def has_form(module: nn.Module) -> bool:
    """Return whether the module's parameters look like fused experts. It may still be refused by `form_of`."""
    return _stacked(module) is not None and len(_arguments(module)) >= 3


def form_of(module: nn.Module) -> ExpertForm | str:
    """Return the form of a module of experts, or the reason why it has none."""
    experts = _stacked(module)
    if experts is None or len(_arguments(module)) < 3:
        return "it is no layer of fused experts, forward(tokens, chosen experts, routing weights)"
    key = _signature(module)
    if key not in _known:
        devices = torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu")
        with devices[0], devices[1], torch.random.fork_rng([]), torch.enable_grad():
            _known[key] = _shown(module, experts)
    return _known[key]


_known: dict[tuple, ExpertForm | str] = {}


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


def _shown(module: nn.Module, experts: int) -> ExpertForm | str:
    reasons: list[str] = []
    for small in (True, False):
        sizes = _small_sizes(module, experts) if small else {experts: _EXPERTS}
        numbers = sum(p.numel() for p in module.parameters()) // experts * _EXPERTS
        if not small and numbers > _MOST_NUMBERS:
            break
        for order in ((0, 1, 2), (0, 2, 1)):
            for counts in _counts(module, experts):
                for hidden in sorted({size for p in module.parameters() for size in p.shape[1:]}):
                    form = ExpertForm(experts, hidden, counts, order)
                    failed = _difference(module, form, sizes, sizes.get(hidden, hidden))
                    if not failed:
                        return form
                    reasons.append(failed)
    return next((reason for reason in reasons if _NO_SUM in reason), reasons[0])


def _counts(module: nn.Module, experts: int) -> Iterator[tuple[str, ...]]:
    """Yield attributes that may be the number of experts, the likeliest first."""
    equal = tuple(name for name, value in vars(module).items() if type(value) is int and value == experts)
    named = tuple(name for name in equal if "expert" in name)
    yield from dict.fromkeys([named, equal, ()])


def _small_sizes(module: nn.Module, experts: int) -> dict[int, int]:
    """Return the layer's sizes, to small ones in the same proportions by two."""
    sizes: dict[int, int] = {}
    for size in sorted({size for p in module.parameters() for size in p.shape[1:]}):
        half = sizes.get(size // 2) if size % 2 == 0 else None
        sizes[size] = 2 * half if half else 2 * len(sizes) + 6
    return {experts: _EXPERTS, **sizes} if experts not in sizes else sizes


def _difference(module: nn.Module, form: ExpertForm, sizes: dict[int, int], hidden: int) -> str:
    """Run the small layer whole and in parts; return how the results differ, "" if they do not."""
    message = ""
    for dtype in (torch.float64, torch.float32):
        try:
            if _alike(module, form, sizes, hidden, dtype):
                return ""
            message = message or _NO_SUM
        except Exception as error:  # a module's code may raise anything on another type or other sizes
            message = message or f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"on small random weights, {message}"


def _alike(module: nn.Module, form: ExpertForm, sizes: dict[int, int], hidden: int, dtype: torch.dtype) -> bool:
    """Return whether the small layer gives the same whole and in parts, in training and in evaluation."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    x, weights = draw(len(_CHOSEN), hidden), draw(len(_CHOSEN), len(_CHOSEN[0])).sigmoid()
    index = torch.tensor(_CHOSEN)
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
        expected = _results(partial(_call, small, form.order), x, index, weights, whole)
        in_parts = _results(partial(_summed, form, small, whole), x, index, weights, whole)
        pairs = zip(expected, in_parts, strict=True)
        if not all(torch.allclose(one, other, _TOLERANCE, _TOLERANCE) for one, other in pairs):
            return False
    return True


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


def _bare_copy(module: nn.Module, parameters) -> nn.Module:
    """Return a shallow copy with other parameters (or tensors in their place) and without a forward of its own."""
    part = copy.copy(module)
    vars(part).pop("forward", None)  # a trace's
    vars(part)["_parameters"] = parameters
    vars(part)["_modules"] = dict(module._modules)
    return part


def _call(part: nn.Module, order: tuple[int, int, int], *given: torch.Tensor) -> torch.Tensor:
    return type(part).forward(part, *(given[place] for place in order))
