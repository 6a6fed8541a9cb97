"""`weft.verify`: one step of a parallel model against the unsplit one, and probes for leaks past a mask.

Run it first on a small version of your own model, before you train the large one. It works for every kind of
parallelism that keeps the parameters' names.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft.comm.purpose import calls_for
from weft.context_parallel.region import sharing_in
from weft.data_parallel.data_parallel import DataParallel
from weft.data_parallel.grad_norm import gradient_of
from weft.data_parallel.sharded_optimizer import Piece, piece_of
from weft.invariant.unit_outputs import same_bits
from weft.sharding.shard import shard_of
from weft.sharding.sharded_grad import local
from weft.tools.compare.comparison import compare_recordings
from weft.tools.compare.recorder import RunRecorder
from weft.tools.compare.reordering import nudge
from weft.tools.compare.seen import Edge, Seen
from weft.tools.first_difference import first_difference, from_all_ranks, recording

FACTOR = 4.0  # times the unsplit model's own rounding error; a split sum is rounded once more per rank
_MOST_BYTES = 1 << 30  # of all ranks' recordings
ZERO = 1e-12  # a smaller share of the whole gradient's norm is 0, up to fp64 rounding


@dataclass(frozen=True)
class Difference:
    """Error of one result, the largest of all ranks, against the unsplit model in fp64.

    The error is relative: over all elements (Frobenius norm), or of the largest element if that error stands out. The
    allowed error is FACTOR times the error of the unsplit model in the parallel model's type, the larger of two runs.
    A gradient that is zero in exact arithmetic (for example of a bias before a batch norm) has no scale of its own. Its
    elements are compared with the root mean square of the whole model's gradient.

    Attributes:
        error: the relative error.
        allowed: the largest error that passes.
        note: the reference of the error, if it is not the result's own norm.
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
    """Differences of the output, then of each parameter's gradient, and the leaks that the probes found.

    Attributes:
        first: with bitwise=True, the first output of a module, or its gradient, that has other bits.
        where: if a result differs, where the runs part first, on which rank, and what that looks like, as
            `weft.compare` finds it; None also if recordings of the step take more than 1 GiB.
    """

    differences: tuple[Difference, ...]
    leaks: tuple[str, ...]
    first: str | None = None
    where: str | None = None

    @property
    def ok(self) -> bool:
        return not self.leaks and self.first is None and all(difference.ok for difference in self.differences)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.differences), *self._faults()])

    def _faults(self) -> list[str]:
        first = [] if self.first is None else [f"FAULT first other bits: {self.first}"]
        where = [] if self.where is None else [f"FAULT {self.where}"]
        return [*(f"FAULT leak: {leak}" for leak in self.leaks), *first, *where]

    def raise_faults(self) -> None:
        """Raise AssertionError with the faults, if there are any."""
        if not self.ok:
            faults = [str(difference) for difference in self.differences if not difference.ok]
            raise AssertionError("\n".join(["the parallel model is not the unsplit one:", *faults, *self._faults()]))


@dataclass(frozen=True)
class Probe:
    """Change of the batch that must leave a part of the output as it was.

    Attributes:
        change: change(batch) -> the changed batch.
        unaffected: unaffected(output) -> the part of the output that must stay the same.
    """

    name: str
    change: Callable[[Any], Any]
    unaffected: Callable[[torch.Tensor], torch.Tensor]


def causal_probe(position: int, *, dim: int = 1, vocabulary: int | None = None) -> Probe:
    """Return a probe that changes the tokens from a position on. No output before the position may change.

    The batch must be a tensor, or a tuple that begins with one.

    Args:
        position: the first token to change.
        dim: the sequence dimension of the tensor and of the output.
        vocabulary: number of different integer tokens; by default the largest token in the batch + 1.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
        >>> batch = torch.tensor([[1, 2, 3, 4]])
        >>> weft.verify(model, copy.deepcopy(model), batch, probes=[weft.causal_probe(2)]).ok
        True
    """

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


@calls_for("weft.verify, which every rank calls")
def verify(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    *,
    step: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    probes: Sequence[Probe] = (),
    bitwise: bool = False,
) -> Report:
    """Run a step of both models, compare outputs and gradients, then run the probes. A collective call.

    A model that shares its sequence runs a second step, since it learns from the first call of a kind. The larger error
    of the two is reported.

    Both models keep the gradients and buffers that they had before.

    Args:
        model: this rank's parallel model.
        reference: the unsplit model with the same weights, on every rank.
        batch: the whole input of both models, the same on every rank: a tensor, a tuple of arguments or a dict of named
            arguments.
        step: step(model, batch) runs forward and backward and returns the whole output, the same on every rank. Pass it
            for example if the input is sharded or the model has its own loss. It is also called with copies of the
            reference in fp64 and in the reference's type (an fp64 reference runs in fp32, and its rounding is scaled).
            By default the batch is passed as it is and the loss is a weighted sum of the output.
        probes: changes that a mask must hide (`causal_probe`).
        bitwise: compare bits with a reference that has the same `invariant`, on each rank alone (docs/invariance.md).
            The report then names the first module, direction and unit of the batch with other bits. For a Pipeline
            pass `step`. A DataParallel takes its part of the batch by default.

    Raises:
        ValueError: the parameter names of the models differ. For a model in stages the names of all ranks count. Or
            probes with bitwise.

    Examples:
        >>> reference = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> model = weft.parallelize(copy.deepcopy(reference), weft.init_mesh(tp=2))
        >>> weft.verify(model, reference, torch.randn(4, 16)).ok
        True
    """
    if bitwise:
        if probes:
            raise ValueError("verify: bitwise=True compares one step; give the probes to a call without it")
        return _compare_bits(model, reference, batch, step or _step_in_units)
    step = step or _plain_step
    exact_model = copy.deepcopy(reference).double()
    plain_model = copy.deepcopy(reference)
    plain_type = None
    if any(tensor.dtype == torch.float64 for tensor in reference.parameters()):
        plain_model, plain_type = plain_model.float(), torch.float32  # no finer type exists to compare fp64 with
    exact = step(exact_model, _as_type(batch, torch.float64))
    whole = {name: _gradient(parameter) for name, parameter in exact_model.named_parameters()}
    outputs, gradients = [], []
    for nudged in (False, True):
        if nudged:  # another sample of the rounding error, because one run may have a small one by luck
            nudge(plain_model)
            _zero_gradients(plain_model, list(plain_model.parameters()))
        outputs.append(step(plain_model, batch if plain_type is None else _as_type(batch, plain_type)))
        gradients.append({name: _gradient(parameter).clone() for name, parameter in plain_model.named_parameters()})
    scale = _RoundingScale.of(whole, gradients)
    pieces = _pieces(model)

    def compared(output: torch.Tensor) -> tuple[list[Difference], set[str]]:
        found, seen = [_difference("output", output, outputs, exact)], set()
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
            result = torch.zeros_like(in_type[0]) if result is None else result.view(exactly.shape)
            found.append(_difference(f"gradient of {name}", result, in_type, exactly, scale))
            seen.add(plain_name)
        return found, seen

    kept = [piece for piece, _ in pieces.values()]
    with _left_as_it_was(model, kept):
        output = step(model, batch)
        found, seen = compared(output)
        leaks = [leak for probe in probes if (leak := _leak(model, batch, step, probe, output))]
    if sharing_in(model):  # such a model learns from its first call what the next ones can leave out
        with _left_as_it_was(model, kept):
            found += compared(step(model, batch))[0]
    report = _over_ranks(found, leaks, set(whole) - seen)
    if all(difference.ok for difference in report.differences):
        return report
    with _left_as_it_was(model, kept):
        return replace(report, where=_where_they_part(model, reference, batch, step))


def _where_they_part(model: nn.Module, reference: nn.Module, batch: Any, step: Callable) -> str | None:
    """Return where a step of the model parts from the reference's first. A collective call."""

    def recorded(model: nn.Module, reordered: bool = False) -> tuple[list[Seen], list[Edge]]:
        recorder = RunRecorder((0,), reordered)
        recorder.start()
        try:
            step(model, batch)
        finally:
            recorder.stop()
        return recorder.seen(model), recorder.edges()

    (expected, edges), (other, _) = (recorded(copy.deepcopy(reference), reordered) for reordered in (False, True))
    own, _ = recorded(model)
    if sum(from_all_ranks(sum(seen.tensor.nbytes for seen in own))) > _MOST_BYTES:
        return None
    try:
        found = compare_recordings(expected, edges, other, from_all_ranks(own), {})
    except ValueError:  # the reference's names are not the model's
        return None
    first = next(iter(found.findings), None)
    return None if first is None else f"the runs part in {first.module or 'the model'}: {first}"


def _compare_bits(model: nn.Module, reference: nn.Module, batch: Any, step: Callable) -> Report:
    with _left_as_it_was(reference, []), recording() as expected:
        whole_output = step(reference, batch)
        whole = {_plain(name): _gradient(parameter).clone() for name, parameter in reference.named_parameters()}
    with _left_as_it_was(model, []), recording() as found:
        differences = [_difference_in_bits("output", step(model, batch), whole_output)]
        own = {_plain(name): parameter for name, parameter in model.named_parameters()}
        for name, parameter in own.items():
            if name not in whole:
                raise ValueError(f"verify: the reference has no parameter {name!r}; it has {', '.join(whole)}")
            shard = shard_of(parameter)
            part = whole[name] if shard is None else shard.take(whole[name])
            differences.append(_difference_in_bits(f"gradient of {name}", _gradient(parameter), part))
    report = _over_ranks(differences, [], set(whole) - set(own))
    return replace(report, first=first_difference(found, expected, model, reference))


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _difference_in_bits(name: str, result: torch.Tensor, expected: torch.Tensor) -> Difference:
    if same_bits(result, expected):
        return Difference(name, 0.0, 0.0)
    alike = result.shape == expected.shape
    error = (result.double() - expected.double()).abs().max().item() if alike else float("inf")
    return Difference(name, error or float("inf"), 0.0, "largest absolute difference")


@dataclass(frozen=True)
class _RoundingScale:
    """Size of the whole model's gradient, the scale for a parameter's gradient that has no scale of its own.

    Attributes:
        norm: norm of all elements.
        elements: number of elements.
        rounding: relative error of all elements in the type of the reference.
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
        """Root mean square of the elements."""
        return self.norm / self.elements**0.5 or 1.0


@contextmanager
def _left_as_it_was(model: nn.Module, pieces: list[nn.Parameter]) -> Iterator[None]:
    """Zero the gradients inside the context; restore them and the buffers afterwards."""
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


def _zero_gradients(model: nn.Module, trained: list[nn.Parameter]) -> None:
    model.zero_grad()
    for parameter in trained:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def _pieces(model: nn.Module) -> dict[int, tuple[nn.Parameter, Piece]]:
    """Return this rank's piece of each parameter that dp shares, or whose optimizer it shares, by its id."""
    wrappers = [module for module in model.modules() if isinstance(module, DataParallel)]
    pieces = [piece for wrapper in wrappers for piece in wrapper.pieces()]
    sharded = [x for x in model.parameters() if isinstance(x, DTensor)]
    found = {id(at.parameter): (piece, at) for piece in pieces if (at := piece_of(piece)) is not None}
    return found | {id(x): (x, at) for x in sharded if (at := piece_of(x)) is not None}


def _in_memory(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient's elements in the memory order of the parameter."""
    if isinstance(parameter, DTensor):
        return gradient.reshape(-1)
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient).as_strided((gradient.numel(),), (1,))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's gradient; zeros if it got none."""
    gradient = gradient_of(parameter)
    return torch.zeros_like(parameter) if gradient is None else gradient


def _plain_step(model: nn.Module, batch: Any) -> torch.Tensor:
    output = _call(model, batch)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    (output * weights).sum().backward()
    return output.detach()


def _step_in_units(model: nn.Module, batch: Any) -> torch.Tensor:
    """Run a step of a DataParallel on this rank's part of the batch, with a loss in units; return the whole output."""
    if not isinstance(model, DataParallel):
        return _plain_step(model, batch)
    ranks, outputs = model.ranks, []
    own = tree_map_only(torch.Tensor, lambda x: x.chunk(ranks.world_size)[ranks.rank], batch)

    def loss(part):
        outputs.append(_call(model, part))
        weights = torch.randn(outputs[-1].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return (outputs[-1] * weights.to(outputs[-1])).sum()

    model.in_units(loss, own).backward()
    output = torch.cat([x.detach() for x in outputs])
    return ranks.all_gather(output, 0, [output.size(0)] * ranks.world_size)


def _call(model: nn.Module, batch: Any) -> torch.Tensor:
    arguments = batch if isinstance(batch, tuple) else (batch,)
    output = model(**batch) if isinstance(batch, dict) else model(*arguments)
    return output if isinstance(output, torch.Tensor) else output[0]  # some models return several values


def _as_type(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def _difference(name: str, result, plain: list, exact, scale: _RoundingScale | None = None) -> Difference:
    """Return the error of all elements or of the largest element, the one nearer to its allowed error."""
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
    """Combine the findings of all ranks.

    Args:
        unseen: the reference's parameters that this rank's model lacks.
    """
    gathered = from_all_ranks((found, leaks, unseen))
    if nowhere := set.intersection(*(of_rank for _, _, of_rank in gathered)):
        raise ValueError(f"verify: the model has no parameter {', '.join(sorted(nowhere))}, and the reference has")
    by_result: dict[str, list[Difference]] = {}  # in a model in stages, a rank has only its own stage's gradients
    for differences, _, _ in gathered:
        for difference in differences:
            by_result.setdefault(difference.name, []).append(difference)
    worst = (max(same, key=lambda d: d.error / d.allowed if d.allowed else d.error) for same in by_result.values())
    return Report(
        tuple(worst), tuple(f"rank {rank}: {leak}" for rank, (_, of_rank, _) in enumerate(gathered) for leak in of_rank)
    )
