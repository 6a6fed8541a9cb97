"""`weft.verify`: one step of a parallel model against the unsplit one, and whether anything leaks past a mask.

What to run first on a model of your own, small, before you train the large one: it works for every kind of parallelism
that keeps the parameters' names.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.grad_norm import gradient_of
from weft.data_parallel.sharded_optimizer import Piece, piece_of
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import local

FACTOR = 4.0  # times the unsplit model's own rounding error; a split sum is rounded once a rank more
ZERO = 1e-12  # a smaller share of the whole gradient's norm is 0 but for fp64's rounding


@dataclass(frozen=True)
class Difference:
    """A result's error against the unsplit model in fp64, the largest of all ranks, and what the type allows.

    The error is relative: of all elements together (Frobenius), or of the largest where that one stands out. Allowed
    is FACTOR times the error of the unsplit model in the parallel one's type, the larger of two runs. A gradient that
    is zero in exact arithmetic (of a bias before a batch norm, say) has no scale of its own: its elements are compared
    with the root mean square of the whole model's gradient.

    Attributes:
        note: what the error is relative to, where it is not the result's own norm.
    """

    name: str
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        text = f"{'ok   ' if self.ok else 'FAULT'} {self.error:9.2e} of {self.allowed:9.2e} allowed  {self.name}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Report:
    """The outputs, then each parameter's gradient; and the leaks that the probes found."""

    differences: tuple[Difference, ...]
    leaks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.leaks and all(difference.ok for difference in self.differences)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.differences), *(f"FAULT leak: {leak}" for leak in self.leaks)])

    def raise_faults(self) -> None:
        """AssertionError with the faults, where there are any."""
        if not self.ok:
            faults = [str(difference) for difference in self.differences if not difference.ok]
            raise AssertionError("\n".join(["the parallel model is not the unsplit one:", *faults, *self.leaks]))


@dataclass(frozen=True)
class Probe:
    """A change of the batch that must not show in a part of the output.

    Attributes:
        change: the changed batch.
        unaffected: the part of an output that must stay as it was.
    """

    name: str
    change: Callable[[Any], Any]
    unaffected: Callable[[torch.Tensor], torch.Tensor]


def causal_probe(position: int, *, dim: int = 1, vocabulary: int | None = None) -> Probe:
    """Changes the tokens from that position on; no output before it may change. Of a batch that is a tensor, or a tuple
    that begins with one; vocabulary: of integer tokens, their number (the largest in the batch by default)."""

    def change(batch):
        first, rest = (batch[0], batch[1:]) if isinstance(batch, tuple) else (batch, None)
        changed = first.clone()
        later = changed.narrow(dim, position, changed.size(dim) - position)
        if changed.is_floating_point():
            later.add_(torch.randn(later.shape, generator=torch.Generator().manual_seed(0)).to(later))
        else:
            later.copy_((later + 1) % (vocabulary or int(first.max()) + 1))
        return changed if rest is None else (changed, *rest)

    return Probe(f"tokens from {position} on are seen before", change, lambda out: out.narrow(dim, 0, position))


def verify(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    *,
    step: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    probes: Sequence[Probe] = (),
) -> Report:
    """Runs one step of both models and compares outputs and gradients; then the probes. A collective call.

    Both models are left as they were, with the gradients and buffers that they had.

    Args:
        model: this rank's.
        reference: the unsplit model with the same weights, on every rank.
        batch: what the models are called with: a tensor, a tuple of arguments or a dict of named ones; whole, and the
            same on every rank.
        step: runs forward and backward and returns the whole output, the same on every rank: for a model whose input is
            sharded or whose loss is its own, say. It is called with the model and the batch, and with copies of the
            reference in fp64 and in its own type (for one of fp64, in fp32, whose rounding is scaled).
            By default the batch goes in as it is and the loss is a weighted sum of the output.
        probes: changes that a mask must hide (`causal_probe`).

    Raises:
        ValueError: the models' parameters do not have the same names; of a model in stages, those of all ranks.
    """
    step = step or _plain_step
    exact_model = copy.deepcopy(reference).double()
    plain_model = copy.deepcopy(reference)
    plain_type = None
    if any(tensor.dtype == torch.float64 for tensor in reference.parameters()):
        plain_model, plain_type = plain_model.float(), torch.float32  # there is nothing finer to compare fp64 with
    exact = step(exact_model, _as_type(batch, torch.float64))
    whole = {name: _gradient(parameter) for name, parameter in exact_model.named_parameters()}
    outputs, gradients = [], []
    for nudged in (False, True):
        if nudged:
            _nudge(plain_model)
        outputs.append(step(plain_model, batch if plain_type is None else _as_type(batch, plain_type)))
        gradients.append({name: _gradient(one).clone() for name, one in plain_model.named_parameters()})
    scale = _RoundingScale.of(whole, gradients)
    pieces = _pieces(model)
    with _left_as_it_was(model, [piece for piece, _ in pieces.values()]):
        output = step(model, batch)
        found = [_difference("output", output, outputs, exact)]
        seen = set()
        for name, parameter in model.named_parameters():
            plain_name = name.removeprefix("module.") if name not in whole else name
            if plain_name not in whole:
                raise ValueError(f"verify: the reference has no parameter {name!r}; it has {', '.join(whole)}")
            expected = [whole[plain_name], *(in_type[plain_name] for in_type in gradients)]
            shard = shard_of(parameter)
            if shard is not None:
                expected = [shard.take(gradient) for gradient in expected]
            result = gradient_of(parameter)
            if id(parameter) in pieces:
                piece, at = pieces[id(parameter)]
                result = gradient_of(piece)
                expected = [_in_memory(gradient, parameter)[at.start : at.stop] for gradient in expected]
            exactly, *in_type = expected
            result = torch.zeros_like(in_type[0]) if result is None else result
            found.append(_difference(f"gradient of {name}", result, in_type, exactly, scale))
            seen.add(plain_name)
        leaks = [leak for probe in probes if (leak := _leak(model, batch, step, probe, output))]
    return _over_ranks(found, leaks, set(whole) - seen)


@dataclass(frozen=True)
class _RoundingScale:
    """The whole model's gradient: what the gradient of one parameter is measured by where it has no scale of its own.

    Attributes:
        norm: of all elements.
        elements: their number.
        rounding: the relative error of all of them in the type of the reference.
    """

    norm: float
    elements: int
    rounding: float

    @classmethod
    def of(cls, whole: dict[str, torch.Tensor], runs: list[dict[str, torch.Tensor]]) -> "_RoundingScale":
        norm = sum(g.square().sum().item() for g in whole.values()) ** 0.5
        errors = [
            sum((in_type[name].double() - g).square().sum().item() for name, g in whole.items()) ** 0.5
            for in_type in runs
        ]
        return cls(norm, max(1, sum(g.numel() for g in whole.values())), max(errors) / (norm or 1.0))

    @property
    def element(self) -> float:
        """The root mean square."""
        return self.norm / self.elements**0.5 or 1.0


@contextmanager
def _left_as_it_was(model: nn.Module, pieces: list[nn.Parameter]) -> Iterator[None]:
    """Gradients are zero inside; afterwards they and the buffers are what they were."""
    trained = [*model.parameters(), *pieces]
    kept = [(p.grad, None if p.grad is None else local(p.grad).clone()) for p in trained]
    main = [x for parameter in trained if (x := getattr(parameter, "main_grad", None)) is not None]
    sums = [(x, x.clone()) for x in main]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    _zero_gradients(model, trained)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, (gradient, values) in zip(trained, kept, strict=True):
                parameter.grad = gradient
                if gradient is not None:
                    assert values is not None
                    local(gradient).copy_(values)
            for tensor, values in (*sums, *buffers):
                tensor.copy_(values)


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    """Change each parameter by one rounding, up or down: another sample of what rounding makes of the gradients, which
    one run may meet by luck."""
    generator = torch.Generator().manual_seed(0)
    for parameter in filter(torch.is_floating_point, model.parameters()):
        sides = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1)
        parameter.mul_((1 + torch.finfo(parameter.dtype).eps * sides).to(parameter))
    _zero_gradients(model, list(model.parameters()))


def _zero_gradients(model: nn.Module, trained: list[nn.Parameter]) -> None:
    model.zero_grad()
    for parameter in trained:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def _pieces(model: nn.Module) -> dict[int, tuple[nn.Parameter, Piece]]:
    """By the id of a parameter, the piece of it that this rank's sharded optimizer steps."""
    wrappers = [module for module in model.modules() if isinstance(module, DataParallel)]
    pieces = [piece for wrapper in wrappers for piece in wrapper.pieces()]
    return {id(at.parameter): (piece, at) for piece in pieces if (at := piece_of(piece)) is not None}


def _in_memory(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient's elements in the order in which the parameter's lie."""
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient).as_strided((gradient.numel(),), (1,))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for a parameter that got none."""
    gradient = gradient_of(parameter)
    return torch.zeros_like(parameter) if gradient is None else gradient


def _plain_step(model: nn.Module, batch: Any) -> torch.Tensor:
    output = _call(model, batch)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    (output * weights).sum().backward()
    return output.detach()


def _call(model: nn.Module, batch: Any) -> torch.Tensor:
    arguments = batch if isinstance(batch, tuple) else (batch,)
    output = model(**batch) if isinstance(batch, dict) else model(*arguments)
    return output if isinstance(output, torch.Tensor) else output[0]  # of models that return more


def _as_type(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {name: _as_type(value, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_as_type(value, dtype) for value in batch)
    return batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


def _difference(name: str, result, plain: list, exact, scale: _RoundingScale | None = None) -> Difference:
    """The error of all elements together or of the largest, whichever is the larger part of what is allowed."""
    if result.shape != exact.shape:
        return Difference(f"{name}: shape {tuple(result.shape)} instead of {tuple(exact.shape)}", float("inf"), 0.0)
    if not result.numel():
        return Difference(name, 0.0, 0.0)
    eps = torch.finfo(result.dtype).eps
    coarse = torch.finfo(plain[0].dtype).eps
    finer = 2 * eps / coarse if eps < coarse else 1.0  # both are rounded
    errors = [x.double() - exact for x in (result, *plain)]
    zero = scale is not None and exact.norm().item() <= ZERO * scale.norm
    found = []
    for order, note in ((2, ""), (float("inf"), "its largest element")):
        size = torch.linalg.vector_norm(exact, order).item() or 1.0
        least = max(eps, finer * scale.rounding) if scale is not None else eps
        if zero:
            assert scale is not None
            size = scale.element * (exact.numel() ** 0.5 if order == 2 else 1.0)
            least, note = eps**0.5, "zero but for rounding; of the model's mean gradient"
        relative, *rounding = (torch.linalg.vector_norm(x, order).item() / size for x in errors)
        relative = relative if relative == relative else float("inf")
        found.append(Difference(name, relative, FACTOR * max(finer * max(rounding), least), note))
    return max(found, key=lambda difference: difference.error / difference.allowed)


def _leak(model, batch, step, probe: Probe, output: torch.Tensor) -> str | None:
    _zero_gradients(model, list(model.parameters()))
    before, after = (probe.unaffected(out) for out in (output, step(model, probe.change(batch)).detach()))
    changed = (after.double() - before.double()).abs().max().item() if before.numel() else 0.0
    allowed = FACTOR * torch.finfo(before.dtype).eps * max(1.0, before.abs().max().item() if before.numel() else 0.0)
    return f"{probe.name}: the output changed by {changed:.2e}" if not changed <= allowed else None


def _over_ranks(found: list[Difference], leaks: list[str], unseen: set[str]) -> Report:
    """Every rank's findings together; `unseen` are the reference's parameters that this rank's model has not."""
    told: list = [(found, leaks, unseen)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (found, leaks, unseen))
    if nowhere := set.intersection(*(of_rank for _, _, of_rank in told)):
        raise ValueError(f"verify: the model has no parameter {', '.join(sorted(nowhere))}, and the reference has")
    by_result: dict[str, list[Difference]] = {}  # of a model in stages, a rank has the gradients of its own
    for differences, _, _ in told:
        for difference in differences:
            by_result.setdefault(difference.name, []).append(difference)
    worst = (max(same, key=lambda d: d.error / d.allowed if d.allowed else d.error) for same in by_result.values())
    return Report(
        tuple(worst), tuple(f"rank {rank}: {leak}" for rank, (_, of_rank, _) in enumerate(told) for leak in of_rank)
    )
