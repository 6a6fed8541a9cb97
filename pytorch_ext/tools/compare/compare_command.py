"""`weft compare`: run a program as one process and on ranks, record both, and say where they part first."""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from weft.tools.compare.comparison import ComparedRuns, compare_recordings
from weft.tools.compare.seen import load


def run(options: argparse.Namespace) -> int:
    try:
        rename = dict(pair.split("=", 1) for pair in options.rename)
    except ValueError:
        print("weft compare: --rename must be like attn.qkv=attention.qkv", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="weft-compare-") as temporary:
        folder = Path(options.keep or temporary)
        for name, command in (("reference", options.reference), ("reordered", options.reference), ("run", options.run)):
            status = _record(command, folder / name, options.steps, reordered=name == "reordered")
            if status:
                print(f"weft compare: {command!r} ended with status {status}", file=sys.stderr)
                return 2
        try:
            found = compare(folder / "reference", folder / "run", reordered=folder / "reordered", rename=rename)
        except (FileNotFoundError, ValueError) as error:
            print(f"weft compare: {error}", file=sys.stderr)
            return 2
    print(found)
    for finding in found.findings[1:] if options.all else ():
        print(f"  {finding}")
    return 0 if found.ok else 1


def _record(command: str, folder: Path, steps: str, reordered: bool) -> int:
    for old in folder.glob("rank*.pt"):
        old.unlink()
    environment = {**os.environ, "WEFT_RECORD": str(folder), "WEFT_RECORD_STEPS": steps}
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

    Losses, learning rates and norms are compared, and each module's inputs, outputs and gradients, each parameter, its
    gradient and its optimizer state, by the plain model's names. Which part of a tensor a rank has is found by the
    values, or from a DTensor's placement and weft's shards. A difference counts if it is ten times that of two runs of
    the reference that sum in different orders (a hundred times from the first update on).

    Args:
        reference: folder of `weft.record` of the plain program, one process.
        run: folder of the parallel one.
        reordered: folder of the plain program recorded with `reordered=True`.
        rename: parts of module names in the run to those in the reference.

    Raises:
        FileNotFoundError: a folder has no recording.
        ValueError: the reference is of several processes, or no module of the run has a name of the reference's.

    Examples:
        >>> own = f"{path}/{dist.get_rank()}"
        >>> for name in ("plain", "reordered", "run"):
        ...     _ = torch.manual_seed(0)
        ...     model = nn.Linear(4, 2)
        ...     with weft.record(f"{own}/{name}", reordered=name == "reordered"):
        ...         model(torch.ones(3, 4)).sum().backward()
        >>> weft.compare(f"{own}/plain", f"{own}/run", reordered=f"{own}/reordered").ok
        True
    """
    (expected, edges), *others = load(Path(reference))
    if others:
        raise ValueError(
            f"the reference in {reference} is of {len(others) + 1} processes: run the plain program in one"
        )
    (other, _), *_ = load(Path(reordered))
    return compare_recordings(expected, edges, other, [seen for seen, _ in load(Path(run))], rename or {})
