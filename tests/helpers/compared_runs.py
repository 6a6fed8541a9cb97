"""A program of another library on ranks beside the same program on one, by weft compare: a row of docs/compared.md."""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import families
import torch
from safetensors.torch import load_file

from weft.testing.ranks import try_ranks
from weft.tools.compare.alignment import error_of
from weft.tools.compare.comparison import FACTOR, LATER, OF_STEP, compare_recordings
from weft.tools.compare.recorder import RunRecorder

BATCH, RATE, NORM = 4, 1e-3, 1.0
EPS = 1e-6  # of AdamW: a gradient that is nothing but rounding then makes no whole step


@dataclass
class Program:
    """A model that trains, by the calls of one library.

    Attributes:
        step: train on a whole batch or this rank's rows of it, and return the norm of the gradients.
        evaluate: the loss of a batch, or NaN where the rank has none.
        save: write the whole model to a folder, on all ranks.
        rename: names of this rank's modules to those in one process.
    """

    step: Callable[[dict], Any]
    evaluate: Callable[[dict], float]
    save: Callable[[Path], Any]
    rename: dict[str, str] = field(default_factory=dict)


class Task(NamedTuple):
    """What is trained: the folder of a small model, a call for each step, and what else its library asks for."""

    folder: Path
    calls: list[dict[str, Any]]
    model: Any


class Trained(NamedTuple):
    """What a run leaves: its recording, the norm of each step and the loss of an evaluation."""

    seen: list
    edges: list
    norms: list[float]
    evaluation: float
    rename: dict[str, str]


class Way(NamedTuple):
    """A way to train on ranks.

    Attributes:
        families: those to run; None: all that have the plans.
        plans: the plans of transformers that it needs.
        splits: whether ranks have different rows of the batch.
    """

    name: str
    make: Callable[[Task], Program]
    families: Sequence[str] | None
    world: int = 2
    plans: Sequence[str] = ()
    splits: bool = True
    environment: tuple[tuple[str, str], ...] = ()


def rows_of(task: Task, plain: Way, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Return a row of each way: what it left beside what one process did.

    Raises:
        Exception: whatever the plain program raises.
    """
    expected, again = (_run(plain, task, name, name == "reordered")[0] for name in ("plain", "reordered"))
    return [_row(way, task, expected, again) for way in ways]


def _row(way: Way, task: Task, expected: Trained, again: Trained) -> dict[str, Any]:
    row: dict[str, Any] = {"way": way.name}
    try:
        ranks = _run(way, task, way.name)
    except Exception as error:  # whatever the library raises
        return row | {"raises": families.line(error)}
    rename = {f"{rank}:{name}": other for rank, of_rank in enumerate(ranks) for name, other in of_rank.rename.items()}
    found = compare_recordings(expected.seen, expected.edges, again.seen, [rank.seen for rank in ranks], rename)
    row |= {"compared": found.compared, "unknown": list(found.unknown)[:8]}
    row["findings"] = [[finding.module, str(finding)] for finding in found.findings]
    row |= _numbers(expected, again, ranks)
    names = ("start", "plain", "reordered", way.name)
    return row | {"file": _file(*(tensors_of(task.folder.parent / name) for name in names))}


def _run(way: Way, task: Task, name: str, reordered: bool = False) -> list[Trained]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(way.world), "LOCAL_WORLD_SIZE": str(way.world)}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **dict(way.environment)}
    options: dict[str, Any] = {"backend": None, "environment": variables, "timeout_s": 120}
    outcomes = try_ranks(_on_rank, way.world, way, task, task.folder.parent / name, reordered, **options)
    failed = [outcome for outcome in outcomes if outcome.error is not None or outcome.exit_code != 0]
    if failed:
        first = min(failed, key=lambda outcome: outcome.error is None)
        raise first.error or RuntimeError(f"exit code {first.exit_code}")
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


def _on_rank(rank: int, way: Way, task: Task, folder: Path, reordered: bool) -> Trained:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(0)
    program = way.make(task)
    recorder = RunRecorder(reordered=reordered)
    recorder.start()
    try:
        norms = [program.step(call) for call in task.calls]
    finally:
        recorder.stop()
    with torch.no_grad():
        evaluation = program.evaluate(task.calls[0])
    folder.mkdir(parents=True, exist_ok=True)
    program.save(folder)
    numbers = [float("nan" if norm is None else norm) for norm in norms]  # DeepSpeed without ZeRO says none
    return Trained(recorder.seen(), recorder.edges(), numbers, float(evaluation), program.rename)


def _numbers(expected: Trained, again: Trained, ranks: Sequence[Trained]) -> dict[str, str]:
    """Return how the norms and the evaluation loss differ, the loss as the mean of the ranks'; "" if by rounding."""
    evaluations = [rank.evaluation for rank in ranks if not math.isnan(rank.evaluation)]
    triples = [
        *zip(expected.norms, again.norms, ranks[0].norms, strict=True),
        (expected.evaluation, again.evaluation, sum(evaluations) / len(evaluations)),
    ]
    texts = [
        ""
        if math.isnan(found) or abs(found - wanted) <= max(FACTOR * LATER * abs(other - wanted), 1e-5 * abs(wanted))
        else f"{found:.6g}, not {wanted:.6g}"
        for wanted, other, found in triples
    ]
    return {"norm": next(filter(None, texts[:-1]), ""), "evaluation": texts[-1]}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= load_file(file)
    for file in sorted(folder.rglob("*.pt")) + sorted(folder.rglob("*.bin")):
        found |= torch.load(file)
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def _file(start: dict, expected: dict, again: dict, found: dict) -> str:
    """Return the first saved tensor that differs, and how; "" if none does."""
    if not found:
        return "nothing is saved"
    for name, tensor in found.items():
        if (wanted := expected.get(name)) is None or wanted.shape != tensor.shape:
            return f"{name}: {tuple(tensor.shape)}, not {'there' if wanted is None else tuple(wanted.shape)}"
        allowed = FACTOR * LATER * max(error_of(again[name], wanted, True), torch.finfo(torch.float32).eps)
        allowed = max(allowed, OF_STEP * error_of(start[name], wanted) if name in start else 0.0)
        if (error := error_of(tensor, wanted, True)) > allowed:
            return f"{name} differs by {error:.1e}"
    return ""


def verdict(row: dict[str, Any]) -> str:
    """Return "agrees", or what is wrong, in words."""
    for name in ("not compared", "raises", "failed"):
        if name in row:
            return f"{name}: {row[name]}"
    wrong = [text for _, text in row["findings"][:1]]
    wrong += [f"{name} {row[name]}" for name in ("norm", "evaluation", "file") if row[name]]
    return "; ".join(wrong) or "agrees"
