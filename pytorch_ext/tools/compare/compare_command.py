"""`weft compare`: run a program as one process and on ranks, record both, and say where they part first."""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.tools.compare.comparison import compare_recordings
from weft.tools.compare.report import ComparedRuns, Mismatch
from weft.tools.compare.seen import load
from weft.tools.numbers import numbers_of


def run(options: argparse.Namespace) -> int:
    try:
        rename = dict(pair.split("=", 1) for pair in options.rename)
    except ValueError:
        print("weft compare: --rename must be like attn.qkv=attention.qkv", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="weft-compare-") as temporary:
        folder = Path(options.keep or temporary)
        try:
            steps = numbers_of(options.steps or "0,1")
            commands = {"reference": options.reference, "reordered": options.reference, "run": options.run}
            for name, command in commands.items():
                status = _record(command, folder / name, steps, reordered=name == "reordered")
                if status:
                    raise ValueError(f"{command!r} ended with status {status}")
                if not any((folder / name).glob("rank*.pt")):
                    raise ValueError(f"{command!r} called no torch.nn.Module, or was ended by a signal")
            if options.steps is not None:
                _check_steps(folder / "reference", steps)
            found = compare(folder / "reference", folder / "run", reordered=folder / "reordered", rename=rename)
        except (OSError, ValueError) as error:
            print(f"weft compare: {error}", file=sys.stderr)
            return 2
        except Exception as error:  # of any kind: a program of others records what no test has
            kept = f"the recordings are in {folder}" if options.keep else "--keep FOLDER keeps the recordings"
            print(f"weft compare: the comparison failed: {type(error).__name__}: {error}; {kept}", file=sys.stderr)
            return 2
    print(found)
    for finding in found.findings[1:] if options.all else ():
        print(f"  {finding}")
    return 0 if found.ok else 1


def _check_steps(folder: Path, steps: Sequence[int]) -> None:
    made = load(folder)[0].steps
    if missing := [step for step in steps if step >= max(made, 1)]:
        raise ValueError(f"--steps: the reference makes {made} steps, counted from 0: there is no step {missing[0]}")


def _record(command: str, folder: Path, steps: Sequence[int], reordered: bool) -> int:
    for old in folder.glob("rank*.pt"):
        old.unlink()
    environment = {**os.environ, "WEFT_RECORD": str(folder), "WEFT_RECORD_STEPS": ",".join(map(str, steps))}
    environment["WEFT_RECORD_REORDERED"] = str(int(reordered))
    return subprocess.run(shlex.split(command), env=environment, check=False).returncode


def compare(
    reference: str | Path,
    run: str | Path,
    *,
    reordered: str | Path,
    rename: Mapping[str, str] | None = None,
) -> ComparedRuns:
    """Compare two recorded runs: where does the parallel one part from the plain one first, and how does it look?

    Losses, norms and optimizers' settings are compared, and each module's inputs, outputs and gradients, each buffer,
    parameter, its gradient and its optimizer state, by the plain model's names. Which part of a tensor a rank has is
    found by the values, or from a DTensor's placement and weft's shards. A difference counts if it is ten times that of
    two runs of the reference that sum in different orders (a hundred times from the first update on).

    Args:
        reference: folder of `weft.record` of the plain program, one process.
        run: folder of the parallel one.
        reordered: folder of the plain program recorded with `reordered=True`.
        rename: parts of module names in the run to those in the reference. "1:layers.0" and "2-3:layers.0" are those
            of some ranks.

    Raises:
        FileNotFoundError: a folder has no recording, or not of all ranks.
        ValueError: the reference is of several processes or does not repeat itself, a rank made fewer steps, or no
            module of the run has a name of the reference's.

    Examples:
        >>> own = f"{path}/{dist.get_rank()}"
        >>> for folder in (f"{own}/plain", f"{own}/reordered", f"{path}/run"):
        ...     _ = torch.manual_seed(0)
        ...     model = nn.Linear(4, 2)
        ...     with weft.record(folder, reordered="reordered" in folder):
        ...         model(torch.ones(3, 4)).sum().backward()
        >>> weft.barrier()
        >>> weft.compare(f"{own}/plain", f"{path}/run", reordered=f"{own}/reordered").ok
        True
    """
    plain, *others = load(Path(reference))
    if others:
        raise ValueError(
            f"the reference in {reference} is of {len(others) + 1} processes: run the plain program in one"
        )
    ranks = load(Path(run))
    if missing := sorted({*range(ranks[0].world_size)} - {rank.rank for rank in ranks}):
        numbers = ", ".join(map(str, missing))
        raise FileNotFoundError(f"rank {numbers} left no recording: it called no torch.nn.Module, or was killed")
    steps = {each.key.step for each in plain.seen}
    if not steps:
        raise ValueError(f"the reference makes {plain.steps} steps, and none of those that are recorded")
    for rank in ranks:
        if missing := sorted(steps - {each.key.step for each in rank.seen}):
            raise ValueError(f"rank {rank.rank} makes {rank.steps} steps: the reference's step {missing[0]} is missing")
    (other, *_), *_ = load(Path(reordered))
    found = compare_recordings(plain.seen, plain.edges, other, [rank.seen for rank in ranks], rename or {})
    not_recorded = dict.fromkeys(text for each in (plain, *ranks) for text in each.not_recorded)
    if not plain.steps:
        not_recorded["an optimizer: none of torch.optim's made a step"] = None
    findings = found.findings
    least, most = (pick(ranks, key=lambda rank: rank.steps) for pick in (min, max))
    if findings and least.steps < most.steps:
        text = f"it makes {least.steps}, rank {most.rank} {most.steps}"
        skips = Mismatch("the optimizers' steps", "optimizer", min(steps), least.rank, 1.0, 0.0, text)
        findings = (skips, *findings)
    return replace(found, findings=findings, not_recorded=tuple(not_recorded))
