"""Peak memory of this process while a function runs (Linux)."""

import gc
import threading
from collections.abc import Callable

_SAMPLE_EVERY_S = 0.01


def peak_mb(run: Callable[[Callable[[], None]], None]) -> float:
    """Return the peak growth of this process's memory in MB while `run` runs.

    The memory is the proportional set size: each of W ranks counts a W-th of the memory that they share. It is sampled
    every 10 ms, and also whenever `run` calls its argument.
    """
    gc.collect()
    before, peak, done = _proportional_mb(), 0.0, threading.Event()

    def look() -> None:
        nonlocal peak
        peak = max(peak, _proportional_mb())

    def watch() -> None:
        while not done.wait(_SAMPLE_EVERY_S):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(look)
    finally:
        done.set()
        watcher.join()
    return peak - before


def _proportional_mb() -> float:
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
