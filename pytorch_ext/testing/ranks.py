"""Runs a function as W ranks, each a process of its own, and brings back what they returned or raised."""

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
    """What became of one rank: a value, or an error with its traceback, or a death."""

    rank: int
    value: object = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not return in time; the text has each one's traceback."""


def run_ranks(function: Callable, world: int, *args, backend: str = "weft", timeout_s: float = 60, **options) -> list:
    """function(rank, *args) on `world` ranks, with a process group of `backend` up; returns the values in rank order.

    Raises:
        RanksFailedError: any rank raised, died, or was not done within timeout_s.
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
    """Like run_ranks, for ranks that are meant to fail: an Outcome of each, nothing raised.

    Args:
        backend: None leaves torch.distributed uninitialised in the ranks.
        group_timeout_s: the process group's own timeout.
        before: before(rank) runs in each rank before it joins the process group.
        environment: variables that are set in each rank.
        start: "spawn" where this process has used CUDA, which cannot be forked. Arguments and results can be pickled
            then, and the function is one of a module that can be imported, or `from_file(function)`.
    """
    context: Any = multiprocessing.get_context(start)
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
    deadline = time.monotonic() + timeout_s + 2  # the ranks print their stacks first
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


SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # "1" in the environment of ranks that share one GPU


def from_file(function: Callable) -> Callable:
    """The function for start="spawn", where its module can be imported by its path alone, as pytest imports tests."""
    return functools.partial(_call_from_file, inspect.getfile(function), function.__name__)


def _call_from_file(path: str, name: str, *args):
    return runpy.run_path(path)[name](*args)


def on_machines(names: str) -> Callable[[int], None]:
    """For `before`: ranks go by machines of these one-letter names, so that a group spans them ("aab": three ranks on
    two machines), and reach each other over loopback."""

    def go_by(rank: int) -> None:
        os.environ["WEFT_HOST"] = names[rank]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    return go_by


def _rank_main(function, args, place, options, sender):
    (rank, world, store_path, timeout_s, group_timeout_s), (backend, before, environment) = place, options
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    torch.set_num_threads(1)  # one rank a core; and the parent's OpenMP pool did not survive the fork
    gc.freeze()  # else a collection visits all that the parent had, a third of a second, and copies its pages
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
    os._exit(0 if error is None else 1)  # no exit handlers of the parent's
