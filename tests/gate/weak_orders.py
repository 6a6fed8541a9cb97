"""The gate, run on flag functions whose memory orders are all relaxed; what test_gate.py is for."""

import sys
from pathlib import Path

import triton
import triton.language as tl

from weft.kernels import signal

sys.path.insert(0, str(Path(__file__).parent))
import gate


@triton.jit
def last(counter, expected):
    tl.debug_barrier()
    came = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1
    if came == expected:
        tl.store(counter, 0)
    return came == expected


signal.last = last
signal._WAIT = tl.constexpr(signal._WAIT.value.replace("acquire", "relaxed"))
signal._PUT = tl.constexpr(signal._PUT.value.replace("release", "relaxed"))
signal._POST = tl.constexpr(signal._POST.value.replace("release", "relaxed"))

if __name__ == "__main__":
    sys.exit(gate.main(["memory_orders", *sys.argv[1:]]))
