"""`weft.verify`: one step of a parallel model against the unsplit one, and whether anything leaks past a mask.

What to run first on a model of your own, small, before you train the large one: it works for every kind of parallelism
that keeps the parameters' names.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.gradients.norms import gradient_of
from weft.shard import shard_of

FACTOR = 4.0  # times the unsplit model's own rounding error; a split sum is rounded once a rank more


@dataclass(frozen=True)
class Difference:
    """A result's relative error (Frobenius) against the unsplit model in fp64, the largest of all ranks, and what the
    type allows: FACTOR times the error of the unsplit model in the parallel one's type."""

    name: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'FAULT'} {self.error:9.2e} of {self.allowed:9.2e} allowed  {self.name}"


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

    Args:
        model: this rank's, with gradients of None or zero, which are those of this step afterwards.
        reference: the unsplit model with the same weights, on every rank; it is left as it was.
        batch: what the models are called with: a tensor, a tuple of arguments or a dict of named ones; whole, and the
            same on every rank.
        step: runs forward and backward and returns the whole output, the same on every rank: for a model whose input is
            sharded or whose loss is its own, say. It is called with the model and the batch, and with the reference.
            By default the batch goes in as it is and the loss is a weighted sum of the output.
        probes: changes that a mask must hide (`causal_probe`).

    Raises:
        ValueError: the models' parameters do not have the same names; of a model in stages, those of all ranks.
    """
    step = step or _plain_step
    exact_model = copy.deepcopy(reference).double()
    plain_model = copy.deepcopy(reference)
    exact = step(exact_model, _as_double(batch))
    plain = step(plain_model, batch)
    output = step(model, batch)
    found = [_difference("output", output, plain, exact)]
    whole = dict(exact_model.named_parameters())
    in_type = dict(plain_model.named_parameters())
    seen = set()
    for name, parameter in model.named_parameters():
        plain_name = name.removeprefix("module.") if name not in whole else name
        if plain_name not in whole:
            raise ValueError(f"verify: the reference has no parameter {name!r}; it has {', '.join(whole)}")
        gradients = [gradient_of(in_type[plain_name]), gradient_of(whole[plain_name])]
        shard = shard_of(parameter)
        if shard is not None:
            gradients = [g if g is None else shard.take(g) for g in gradients]
        found.append(_difference(f"gradient of {name}", gradient_of(parameter), *gradients))
        seen.add(plain_name)
    leaks = [leak for probe in probes if (leak := _leak(model, batch, step, probe, output))]
    return _over_ranks(found, leaks, set(whole) - seen)


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


def _as_double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _as_double(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(_as_double, batch))
    return batch.double() if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


def _difference(name: str, result, plain, exact) -> Difference:
    if result is None or exact is None:
        return Difference(name, 0.0 if result is exact else float("inf"), 0.0)
    if result.shape != exact.shape:
        return Difference(f"{name}: shape {tuple(result.shape)} instead of {tuple(exact.shape)}", float("inf"), 0.0)
    scale = exact.norm().item() or 1.0
    own = (plain.double() - exact).norm().item() / scale
    error = (result.double() - exact).norm().item() / scale
    allowed = FACTOR * max(own, torch.finfo(result.dtype).eps)
    return Difference(name, error if error == error else float("inf"), allowed)


def _leak(model, batch, step, probe: Probe, output: torch.Tensor) -> str | None:
    kept = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    before, after = (probe.unaffected(out) for out in (output, step(model, probe.change(batch)).detach()))
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
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
