"""Calls ops over the stub driver, on CPU memory, as they are called for a GPU: what the host does from op to launch.

Prints the median microseconds of a replayed call of each op, with the stub driver's own share. With --count it lets
callgrind count the instructions of a hundred replayed calls of each.
"""

import ctypes
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import weft.ops  # noqa: F401 it gives the kernels their launcher
from weft import _C
from weft.kernels import dispatch, launch
from weft.kernels.attention import attention_forward
from weft.kernels.attention_rules import Rules
from weft.kernels.language import TensorDescriptor
from weft.kernels.matmul import matmul

_spec = importlib.util.spec_from_file_location("stub_driver", Path(__file__).parent / "stub.py")
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)

ARCHITECTURE = "sm_90"
CALLS = 100
BYTES = {"ptr": 8, "u1": 1, "i32": 4, "i64": 8, "fp32": 4}


class Variants:
    """A kernel's variants, each made of nothing at its first launch."""

    def __init__(self, kernel) -> None:
        self.dispatcher = dispatch.dispatcher(kernel)
        self.unspecialised = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        self.names = kernel.arg_names

    def launch(self, grid, arguments, constants, stream) -> bool:
        if not self.dispatcher.launch(grid, arguments, constants, stream):
            key = self.dispatcher.key(arguments, constants)
            types, sizes = self.parameters(arguments, dict(constants))
            image = stub_driver.image("kernel", sizes)
            kernel = _C.launch.Kernel("kernel", image, types, 0, 4, 40)
            self.dispatcher.add(key, kernel)
            assert self.dispatcher.launch(grid, arguments, constants, stream)
        return True

    def parameters(self, arguments, constants) -> tuple[list[str], list[int]]:
        types, sizes = [], []
        for name, value in zip([name for name in self.names if name not in constants], arguments, strict=False):
            if value is None or (type(value) is int and value == 1 and name not in self.unspecialised):
                continue
            if isinstance(value, TensorDescriptor):
                block = list(value.block_shape)
                layout = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": block, "fp4_padded": False}
                types.append("tensordesc:" + json.dumps(layout))
                sizes += [128, *[4] * len(block), *[8] * len(block)]
            else:
                kinds = {torch.Tensor: "ptr", bool: "u1", float: "fp32"}
                types.append(kinds.get(type(value)) or ("i32" if -(2**31) <= value < 2**31 else "i64"))
                sizes.append(BYTES[types[-1]])
        return types, sizes


def as_on_a_gpu() -> None:
    """Let CPU memory pass for a GPU's, and each kernel have every variant."""
    variants: dict[int, Variants] = {}

    def find(kernel, _):
        if id(kernel) not in variants:
            variants[id(kernel)] = Variants(kernel)
        return variants[id(kernel)]

    dispatch.find = find
    launch.check_memory = lambda op, **tensors: torch.device("cpu")
    launch.architecture_of = lambda device: ARCHITECTURE
    launch.has_large_shared_memory = lambda device: True
    launch.multiprocessors = lambda device: 132
    launch._device_index = lambda arguments: 0
    launch._code_architecture = lambda index: ARCHITECTURE
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: 0


def calls() -> dict:
    draw = lambda *shape: torch.randn(shape).bfloat16()  # noqa: E731
    x, weight, bias, q = draw(64, 256), draw(128, 256).t(), draw(128), draw(1, 4, 128, 64)
    rules = Rules(right=0)
    return {
        "matmul": lambda: matmul(x, weight, bias=bias, activation="gelu", keep_z=True),
        "attention_forward": lambda: attention_forward(q, q, q, rules),
    }


def median_us(call) -> float:
    times = []
    for _ in range(21):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS)
    return 1e6 * statistics.median(times)


def main(library: str, count: bool) -> None:
    stub = stub_driver.Stub(Path(library))
    _C.launch.driver()
    stub.reset()
    stub.context()
    as_on_a_gpu()
    for name, call in calls().items():
        for _ in range(3):  # the op, the op observed, a replay
            call()
        stub.set("recording", 0)
        if count:
            many = ctypes.CFUNCTYPE(None)(lambda call=call: [call() for _ in range(CALLS)] and None)
            assert stub.library.stub_count_instructions(many)
        else:
            print(name, f"{median_us(call):.2f} us")
        stub.set("recording", 1)


if __name__ == "__main__":
    main(sys.argv[1], "--count" in sys.argv)
