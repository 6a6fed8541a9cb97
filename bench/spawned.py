"""Runs a function as W ranks in new processes: what has used CUDA cannot be forked."""

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

_LEAVING_S = 10.0  # what a rank that is done has for ending its process group


class NotRunError(RuntimeError):
    """A rank raised, died or was not done in time; the text says which and why."""


def run_spawned(
    function: Callable,
    world: int,
    *args,
    backend: str,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> list:
    """function(rank, *args) on each rank, a process group of `backend` being up; the values in rank order.

    The function is one of a module's, and what goes in and out can be pickled. `environment` is set in the ranks.

    Raises:
        NotRunError: see there.
    """
    context = multiprocessing.get_context("spawn")
    processes, receivers = [], []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                place = rank, world, os.path.join(folder, "store"), timeout_s
                process = context.Process(
                    target=_main, args=(function, args, place, backend, dict(environment or {}), sender)
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            values = _values(processes, receivers, time.monotonic() + timeout_s, timeout_s)
            for process in processes:
                process.join(_LEAVING_S)
            return values
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def _values(processes, receivers, deadline: float, timeout_s: float) -> list:
    """What the ranks send, whichever is first; one that fails is told at once, since the others may wait for it."""
    told: dict[int, object] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NotRunError(f"ranks {sorted(waiting.values())} of {len(processes)} were not done in {timeout_s:g} s")
        for receiver in [receiver for receiver in waiting if receiver in ready]:
            rank = waiting.pop(receiver)
            try:
                value, error = receiver.recv()
            except EOFError:
                processes[rank].join(5)
                raise NotRunError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if error:
                raise NotRunError(f"rank {rank}: {error}")
            told[rank] = value
    return [told[rank] for rank in range(len(processes))]


def _main(function, args, place, backend, environment, sender) -> None:
    rank, world, store, timeout_s = place
    os.environ.update(environment)
    try:
        import weft  # noqa: F401 -- registers its backend

        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        sender.send((function(rank, *args), ""))
        dist.barrier()  # a rank that left would be one that was lost
        dist.destroy_process_group()
    except BaseException as error:
        sender.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
