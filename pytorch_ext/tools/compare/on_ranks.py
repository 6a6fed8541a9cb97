"""A test's training on one process and on ranks, compared as `weft compare` compares programs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.testing.ranks import run_ranks
from weft.tools.compare.compare_command import compare
from weft.tools.compare.recorder import STEPS, record
from weft.tools.compare.report import ComparedRuns


def compare_ranks(
    train: Callable[[int, int], object],
    world_size: int,
    *,
    steps: Sequence[int] = STEPS,
    rename: Mapping[str, str] | None = None,
    backend: str = "weft",
    timeout_s: float = 60,
) -> ComparedRuns:
    """Run `train(rank, world_size)` in one process and on ranks, and say where the runs part first.

    Processes are forked from this one. The plain one has no process group, and runs twice, the second time with
    products in another order of summation.

    Args:
        train: trains a small model: with a world_size of 1 as one process does, else on this rank. It seeds itself.
        steps: numbers of the optimizer's steps to compare, from 0.
        rename: parts of module names on the ranks, or on some ("1:layers.0"), to those in the plain program.
        backend: the ranks' process group.
        timeout_s: seconds for each of the three runs.

    Raises:
        RanksFailedError: a process raised, died or was not done in time.
        ValueError: the runs cannot be compared, as in `weft.compare`.

    Examples:
        >>> def train(rank, world_size):
        ...     torch.manual_seed(0)
        ...     model = nn.Linear(4, 2)
        ...     batch = torch.ones(4, 4).chunk(world_size)[rank]
        ...     model(batch).square().mean().backward()
        >>> str(weft.testing.compare_ranks(train, 2)).splitlines()[0]
        'the runs agree'
    """
    with TemporaryDirectory(prefix="weft-compare-") as folder:
        for name in ("plain", "reordered", "run"):
            world, group = (world_size, backend) if name == "run" else (1, None)
            options = (train, world, f"{folder}/{name}", steps, name == "reordered")
            run_ranks(_recorded, world, *options, backend=group, timeout_s=timeout_s)  # type: ignore[arg-type]
        folders = Path(folder)
        return compare(folders / "plain", folders / "run", reordered=folders / "reordered", rename=rename)


def _recorded(rank: int, train: Callable, world_size: int, folder: str, steps: Sequence[int], reordered: bool) -> None:
    with record(folder, steps=steps, reordered=reordered):
        train(rank, world_size)
