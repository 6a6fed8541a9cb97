"""Whether a program's model on its mesh is the unsplit model: two steps, outputs and every gradient."""

import linecache
import math
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo  # as operations on meta tensors do: once, and not in every rank
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

import weft
import weft.parallelization
from random_programs.models import Program, batch_of, model_of
from weft.tensor_parallel.auto import automatic_plan
from weft.testing.ranks import try_ranks

AT_ONCE = 10  # programs of one group of ranks
STEP_SIZE = 0.05
REFUSALS = (ValueError, TypeError, NotImplementedError)
OUT_OF_STEP = "the ranks are out of step"
PACKAGE = str(Path(weft.__path__[0]))


class _WrongError(Exception):
    """A number that is not the unsplit model's."""


def judged(rank: int, these: list[Program]) -> list[tuple[str, str]]:
    """A verdict of each: ("right" | "refused" | "fault" | "unfit", why). It ends early after a fault."""
    warnings.simplefilter("ignore")
    meshes: dict = {}
    verdicts = []
    for program in these:
        own = _verdict(program, meshes)
        if own[0] == "fault" or (own[0] == "refused" and program.mesh[0] > 1):
            # Others, of other stages say, may wait for this rank: they notice that it has gone.
            return [*verdicts, own]
        answers: list = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, own)
        except Exception as error:
            return [*verdicts, ("fault", f"{OUT_OF_STEP}: {own} {error}")]
        kinds = {kind for kind, _ in answers}
        if kinds == {"right"} or kinds == {"refused"} or kinds == {"unfit"}:
            verdicts.append(answers[0])
            continue
        return [*verdicts, ("fault", f"the ranks differ: {answers}")]
    return verdicts


def _verdict(program: Program, meshes: dict) -> tuple[str, str]:
    try:
        exact, plain = _unsplit(program, torch.float64), None
        if program.dtype != "float64":
            plain = _unsplit(program, getattr(torch, program.dtype))
        for results in filter(None, (exact, plain)):
            if not all(x.isfinite().all() for step in results for group in step for x in group.values()):
                return "unfit", "not finite"
    except Exception as error:
        return "unfit", f"{type(error).__name__}: {error}"
    try:
        _compare(program, exact, plain or exact, meshes)
    except _WrongError as wrong:
        return "fault", str(wrong)
    except Exception as error:
        kind = "refused" if _is_refusal(error) else "fault"
        where = traceback.format_exc() if kind == "fault" else ""
        return kind, f"{type(error).__name__}: {error}\n{where}".rstrip()
    return "right", ""


def _is_refusal(error: BaseException) -> bool:
    """Whether weft itself raised it, on purpose."""
    if not isinstance(error, REFUSALS):
        return False
    while error.__cause__ is not None:
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and "raise" in linecache.getline(last.filename, last.lineno or 0)


def _unsplit(program: Program, dtype: torch.dtype) -> list[tuple[dict, dict, dict]]:
    """Of two steps: outputs and gradients of the inputs, of each replica, and gradients of the parameters."""
    model = model_of(program).to(getattr(torch, program.dtype)).to(dtype)
    replicas, steps = program.mesh[1], []
    for step in range(2):
        outputs, inputs = {}, {}
        for replica in range(replicas):
            out, given = _stepped(model, program, replica, step, dtype, 1 / replicas)
            outputs |= {f"{replica} {name}": x for name, x in out.items()}
            inputs |= {f"{replica} {name}": x * replicas for name, x in given.items()}
        gradients = {name: _gradient(p).clone() for name, p in model.named_parameters()}
        steps.append((outputs, inputs, gradients))
        torch.optim.SGD(model.parameters(), STEP_SIZE).step()
        if program.seed % 4 != 2:
            model.zero_grad()
    return steps


def _stepped(model, program: Program, replica: int, step: int, dtype: torch.dtype, factor: float = 1.0):
    """(outputs, gradients of the inputs), after a backward."""
    args, kwargs = tree_map(
        lambda x: x.to(dtype).requires_grad_() if x.is_floating_point() else x, batch_of(program, replica, step)
    )
    if program.seed % 4 == 1:
        with torch.no_grad():
            model(*args, **kwargs)
    results = [x for x in tree_leaves(model(*args, **kwargs)) if x.is_floating_point()]
    generator = torch.Generator().manual_seed(step)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in results)
    (loss * factor / 10).backward()
    given = [x for x in tree_leaves((args, kwargs)) if x.requires_grad]
    return (
        {f"output {i}": x.detach().double() for i, x in enumerate(results)},
        {f"input {i}": _gradient(x).double() for i, x in enumerate(given)},
    )


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.detach()


def _compare(program: Program, exact: list, plain: list, meshes: dict) -> None:
    dtype = getattr(torch, program.dtype)
    pp, dp, cp, tp = program.mesh
    if program.mesh not in meshes:
        meshes[program.mesh] = weft.init_mesh(pp=pp, dp=dp, cp=cp, tp=tp, device_type="cpu")
    mesh = meshes[program.mesh]
    chosen = dict(program.options)
    context = {name: chosen.pop(name) for name in ("layout", "method") if name in chosen}
    whole, plan = model_of(program).to(dtype), "auto"
    if program.seed % 2 and (len(program.shape) == 2 or program.extra == "keyword"):
        given, named = batch_of(program)
        plan = automatic_plan(whole, tp, example=named | dict(zip(["x"], given, strict=False)))
    model = weft.parallelize(whole, mesh, plan=plan, **chosen, **({"context": context} if context else {}))
    replica = mesh.get_local_rank("dp")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, STEP_SIZE) if trained else None  # a stage may have none
    for step in range(2):
        out, given = _stepped(model, program, replica, step, dtype)
        expected, own = exact[step], plain[step]
        of_replica = lambda results: {  # noqa: E731
            name.partition(" ")[2]: x for name, x in results.items() if name.startswith(f"{replica} ")
        }
        _check(step, program.dtype, out, of_replica(expected[0]), of_replica(own[0]))
        gradients, taken, taken_own = {}, {}, {}
        for name, parameter in model.named_parameters():
            key = name.removeprefix("module.")
            shard = weft.shard_of(parameter)
            gradients[key] = _gradient(parameter).double()
            taken[key], taken_own[key] = (
                results[2][key] if shard is None else shard.take(results[2][key]) for results in (expected, own)
            )
        _check(step, program.dtype, given, of_replica(expected[1]), of_replica(own[1]), expected[2])
        _check(step, program.dtype, gradients, taken, taken_own, expected[2])
        if optimizer is not None:
            optimizer.step()
        if program.seed % 4 != 2:
            model.zero_grad()


TOLERANCE = {"float64": (1e5, 1e4), "float32": (100.0, 20.0), "bfloat16": (32.0, 24.0)}


def _check(step: int, dtype: str, results: dict, exact: dict, plain: dict, beside: dict | None = None) -> None:
    """Differences are multiples of the unsplit model's own, or of the rounding of the largest result."""
    eps, (of_eps, of_own) = torch.finfo(getattr(torch, dtype)).eps, TOLERANCE[dtype]
    if set(results) != set(exact):
        raise _WrongError(f"step {step}: {sorted(set(results) ^ set(exact))} are not in both")
    largest = max((x.double().norm().item() for x in [*exact.values(), *(beside or {}).values()]), default=0.0)
    worst = max(((plain[name].double() - exact[name]).norm().item() for name in exact), default=0.0)
    for name, result in results.items():
        expected = exact[name]
        if result.shape != expected.shape:
            raise _WrongError(f"step {step}: {name} is {tuple(result.shape)}, not {tuple(expected.shape)}")
        error = (result - expected).norm().item()
        allowed = of_eps * eps * (expected.norm().item() + 0.1 * largest) + of_own * worst + 1e-30
        if not error <= allowed:
            raise _WrongError(
                f"step {step}: {name} differs by {error:.2e} of {expected.norm().item():.2e}, allowed {allowed:.2e}"
            )


def verdicts_of(these: list[Program]) -> list[tuple[str, str]]:
    """In the order of the programs; those of one world run in the same ranks."""
    found: dict[int, tuple[str, str]] = {}
    by_world: dict[int, list[int]] = {}
    for number, program in enumerate(these):
        by_world.setdefault(math.prod(program.mesh), []).append(number)
    for world, numbers in by_world.items():
        while numbers:
            batch = numbers[:AT_ONCE]
            outcomes = try_ranks(judged, world, [these[n] for n in batch], timeout_s=200, group_timeout_s=60)
            values = [outcome.value for outcome in outcomes]
            if all(isinstance(value, list) and value for value in values):
                shortest = min(map(len, values))  # type: ignore[arg-type]
                for place in range(shortest):
                    of_ranks = [value[place] for value in values]  # type: ignore[index]
                    found[batch[place]] = min(of_ranks, key=_from_the_cause)
                numbers = numbers[shortest:]
            elif len(batch) > 1:
                for n in batch:
                    found[n] = verdicts_of([these[n]])[0]
                numbers = numbers[len(batch) :]
            else:
                why = "\n".join(f"{one.error!r} {one.exit_code} {one.traceback}" for one in outcomes)
                found[batch[0]] = ("fault", f"the ranks failed: {why}")
                numbers = numbers[1:]
    return [found[n] for n in range(len(these))]


def _from_the_cause(verdict: tuple[str, str]) -> int:
    """Faults first, but for those of ranks that missed another; these follow from what it met."""
    kind, why = verdict
    missed = why.startswith(OUT_OF_STEP) or "RankLostError" in why
    return ["fault", "refused", "missed", "unfit", "right"].index("missed" if missed else kind)
