"""Launcher of a function as W ranks in processes of their own, which returns their values or errors."""

import contextlib
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import runpy
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Outcome:
    """Outcome of one rank: a value, an error with its traceback, or the exit code of a dead process."""

    rank: int
    value: object = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class RanksFailedError(AssertionError):
    """Failure of at least one rank: it raised, died or timed out. The text has the traceback of each."""


def run_ranks(function: Callable, world: int, *args, backend: str = "weft", timeout_s: float = 60, **options) -> list:
    """Run function(rank, *args) on `world` ranks in a process group; return the values in rank order.

    Args:
        backend: Backend of the process group.
        timeout_s: Time for all ranks together, in seconds.
        options: Further arguments of `try_ranks`.

    Raises:
        RanksFailedError: A rank raised, died, or was not done within timeout_s.
    """
    outcomes = try_ranks(function, world, *args, backend=backend, timeout_s=timeout_s, **options)
    bad = [outcome for outcome in outcomes if outcome.exit_code != 0 or outcome.error is not None]
    if bad:
        raise RanksFailedError(
            "\n".join(
                f"rank {outcome.rank} of {world}: exit code {outcome.exit_code}, {outcome.error!r}\n{outcome.traceback}"
                for outcome in bad
            )
        )
    return [outcome.value for outcome in outcomes]


def try_ranks(
    function: Callable,
    world: int,
    *args,
    backend: str | None = "weft",
    timeout_s: float = 60,
    group_timeout_s: float = 30,
    before: Callable[[int], object] | None = None,
    environment: Mapping[str, str] | None = None,
    start: str = "fork",
) -> list[Outcome]:
    """Run ranks that may fail, as `run_ranks` does; return an Outcome for each and raise nothing.

    Args:
        backend: None leaves torch.distributed uninitialised in the ranks.
        group_timeout_s: Timeout of the process group, in seconds.
        before: before(rank) runs in each rank before it joins the process group.
        environment: Variables to set in each rank.
        start: "spawn" if this process has used CUDA, which cannot be forked. Then arguments and results must be
            picklable, and the function must come from an importable module or be `from_file(function)`.
    """
    context: Any = multiprocessing.get_context(start)
    faulthandler.cancel_dump_traceback_later()  # pytest's, whose thread a forked rank lacks and would wait for
    store_folder = tempfile.mkdtemp(prefix="weft-ranks-")
    store_path = os.path.join(store_folder, "store")
    processes, receivers = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        place = (rank, world, store_path, timeout_s, group_timeout_s)
        options = (backend, before, environment)
        process = context.Process(target=_rank_main, args=(function, args, place, options, sender))
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)

    outcomes = [Outcome(rank) for rank in range(world)]
    deadline = time.monotonic() + timeout_s + 2  # ranks first print their stacks
    for outcome, process, receiver in zip(outcomes, processes, receivers, strict=True):
        if receiver.poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError):
                outcome.value, outcome.error, outcome.traceback, outcome.seconds = pickle.loads(receiver.recv_bytes())
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            outcome.traceback += f"\nkilled: not done within {timeout_s} s"
        outcome.exit_code = process.exitcode
        receiver.close()
    with contextlib.suppress(OSError):
        os.unlink(store_path)
    os.rmdir(store_folder)
    return outcomes


SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # "1" in the environment of ranks on one GPU


def from_file(function: Callable) -> Callable:
    """Return `function` for start="spawn" if its module is importable only by path, such as a pytest module."""
    return functools.partial(_call_from_file, inspect.getfile(function), function.__name__)


def _call_from_file(path: str, name: str, *args):
    return runpy.run_path(path)[name](*args)


def on_machines(names: str) -> Callable[[int], None]:
    """Return a `before` function that spreads ranks over pretended machines, joined over loopback.

    Args:
        names: One-letter name of each rank's machine; "aab" is three ranks on two machines.
    """

    def set_machine(rank: int) -> None:
        os.environ["WEFT_HOST"] = names[rank]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    return set_machine


def _rank_main(function, args, place, options, sender):
    (rank, world, store_path, timeout_s, group_timeout_s), (backend, before, environment) = place, options
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    torch.set_num_threads(1)  # one rank a core; the parent's OpenMP pool does not survive the fork
    gc.freeze()  # else a collection visits the parent's objects (a third of a second) and copies their pages
    start = time.monotonic()
    value, error, text = None, None, ""
    os.environ.update(environment or {})
    try:
        if before is not None:
            before(rank)
        if backend is not None:
            store = dist.FileStore(store_path, world)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout_s)
            )
            if "gloo" in backend:  # a rank that ends before another has connected to it is an error there
                dist.barrier()
        start = time.monotonic()
        value = function(rank, *args)
    except BaseException as raised:
        error, text = raised, traceback.format_exc()
    seconds = time.monotonic() - start
    try:
        message = pickle.dumps((value, error, text, seconds))
    except Exception:
        message = pickle.dumps((None, RuntimeError(repr(error or value)), text, seconds))
    sender.send_bytes(message)
    sender.close()
    if error is None and backend is not None and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0 if error is None else 1)  # skip the parent's exit handlers
