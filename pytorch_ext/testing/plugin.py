"""A pytest plugin: tests whose bodies run on several ranks, and suites of others whose ranks are forked.

    @pytest.mark.ranks(4)
    def test_sum(rank):
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        assert (x == 6).all()

Ranks are forked from pytest's process, which has imported everything, so they stand in a fraction of a second. What a
test leaves behind, such as a process group, a patched module, a thread that hangs, ends with its ranks.

`--fork-ranks` does the same for tests that start processes by torch's MultiProcessTestCase (and DTensorTestBase, which
is one) or by torch.multiprocessing.spawn: they fork them.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("weft").addoption(
        "--fork-ranks",
        action="store_true",
        help="fork the ranks of torch's MultiProcessTestCase and of torch.multiprocessing.spawn from this process",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(world, backend='weft', timeout_s=60): run the test's body on `world` ranks in a process group; "
        "backend=None makes none",
    )
    if config.getoption("--fork-ranks"):
        _fork_the_ranks_of_others()


@pytest.fixture
def rank() -> int:
    """Return this rank's number in a test marked ranks."""
    return -1  # pytest's own process is none of them


@pytest.fixture
def compare_ranks() -> Callable:
    """Return `weft.testing.compare_ranks`, made to fail the test with its report where the runs part."""
    from weft import testing

    def compared(*args, **kwargs):
        found = testing.compare_ranks(*args, **kwargs)
        if not found.ok:
            pytest.fail(str(found), pytrace=False)
        return found

    return compared


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    import torch

    from weft.testing.ranks import try_ranks

    if torch.cuda.is_initialized():
        pytest.fail("ranks are forked, and CUDA has been used in pytest's process: use it in the ranks alone", False)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def body(rank: int) -> str | None:
        random.seed(0)
        torch.manual_seed(0)
        try:
            pyfuncitem.obj(**arguments | ({"rank": rank} if "rank" in arguments else {}))
        except pytest.skip.Exception as skipped:  # which cannot be pickled
            return str(skipped)
        return None

    _raise_what_ranks_raised(try_ranks(body, *marker.args, **marker.kwargs))
    return True


def _raise_what_ranks_raised(outcomes: list) -> None:
    """Skip if every rank did; fail with the text of each rank that failed, once for ranks with the same text."""
    if all(outcome.value is not None for outcome in outcomes):
        pytest.skip(outcomes[0].value)
    texts: dict[str, list[int]] = {}
    for outcome in outcomes:
        code, text = outcome.exit_code, outcome.traceback.strip()
        if code is not None and code < 0:
            text = f"{text}\nended by {signal.Signals(-code).name}".strip()
        elif code != 0 and not text:
            text = f"ended with exit code {code}"
        if text:
            texts.setdefault(text, []).append(outcome.rank)
    if texts:
        parts = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {text}" for text, of in texts.items()]
        pytest.fail("\n\n".join(parts), pytrace=False)


def _fork_the_ranks_of_others() -> None:
    import torch
    import torch.multiprocessing

    def spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
        return torch.multiprocessing.start_processes(fn, args, nprocs, join, daemon, start_method="fork")

    def fork_processes(self) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    torch.multiprocessing.spawn = spawn
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # an OpenMP pool does not survive a fork
    with contextlib.suppress(ImportError):  # it needs expecttest; without that no test has it either
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        MultiProcessTestCase._spawn_processes = fork_processes  # type: ignore[method-assign]
