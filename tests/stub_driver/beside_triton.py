"""Gives the same launches to Triton's own launcher and to weft's, on the stub driver, and compares what it was called
with: the configuration and every byte of every parameter.

Run with the stub's path, which must also be what the dynamic linker finds as libcuda.so.1.
"""

import re
import sys
from pathlib import Path

import triton
from stub import Stub, image
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import _C
from weft.kernels import machine_code, signature, variants

PARAMETER = re.compile(r"\.param(?: \.align \d+)? \.[a-z]*(\d+)[^\[\n,]*(?:\[(\d+)\])?,?\n")


class Memory:
    """A tensor that is nowhere."""

    addresses = iter(range(0x7F0000000000, 0x7FFFFFFFFFFF, 0x10000))

    def __init__(self, tensor) -> None:
        self.dtype = tensor.dtype
        self.address = next(self.addresses)

    def data_ptr(self) -> int:
        return self.address


def elsewhere(argument):
    """The argument, with an address of its own instead of the recorded one, which is 0."""
    if isinstance(argument, TensorDescriptor):
        moved = Memory(argument.base)
        return TensorDescriptor(moved, argument.shape, argument.strides, argument.block_shape, argument.padding)
    return Memory(argument) if hasattr(argument, "data_ptr") else argument


def parameter_bytes(ptx: str) -> list[int]:
    """The size of every parameter, as the machine code declares them."""
    entry = ptx.split(".visible .entry")[1].split("{")[0]
    return [int(array or int(bits) // 8) for bits, array in PARAMETER.findall(entry)]


def launch_both(stub, recorded, architecture) -> None:
    types, constants, attributes = signature.specialise(recorded)
    source = ASTSource(recorded.kernel, types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32), recorded.options)
    metadata = built.metadata
    sizes = parameter_bytes(built.asm["ptx"])
    assert sizes[-2:] == [8, 8], sizes  # the two addresses that a launcher adds
    cubin = image(metadata.name, sizes[:-2])
    grid = (*recorded.grid, 1, 1)[:3]
    arguments = tuple(map(elsewhere, recorded.arguments))
    stub.reset()
    stub.context()

    _, function, *_ = driver.CudaUtils().load_binary(metadata.name, cubin, metadata.shared, 0)
    everything = (*arguments, *recorded.constants.values())
    packed = (metadata.num_warps, metadata.num_ctas, metadata.shared)
    driver.CudaLauncher(source, metadata)(*grid, 7, function, packed, None, None, None, *everything)

    named = (*recorded.constants.items(), ("warps", recorded.warps), ("stages", recorded.stages))
    unspecialised = [parameter.name for parameter in recorded.kernel.params if parameter.do_not_specialize]
    dispatcher = _C.launch.Dispatcher(metadata.name, recorded.kernel.arg_names, unspecialised)
    kernel = _C.launch.Kernel(
        name=metadata.name,
        cubin=cubin,
        arguments=list(machine_code.compile_launch(recorded, architecture).machine.arguments),
        shared_bytes=metadata.shared,
        warps=metadata.num_warps,
        registers=0,
    )
    # The key of the recorded launch, whose tensors are at 0, is that of the tensors elsewhere too.
    dispatcher.add(dispatcher.key(recorded.arguments, named), kernel)
    assert dispatcher.launch(recorded.grid, arguments, named, 7)

    theirs, ours = stub.launches()
    assert list(ours.numbers) == list(theirs.numbers), (list(ours.numbers), list(theirs.numbers))
    assert ours.attributes == theirs.attributes, (ours.attributes, theirs.attributes)
    assert len(ours.parameters) == len(sizes)
    for place, (our, their) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        assert our == their, (place, our.hex(), their.hex())
    maps = stub.calls("cuTensorMapEncodeTiled")
    for our, their in zip(maps[len(maps) // 2 :], maps[: len(maps) // 2], strict=True):
        assert list(our.numbers) == list(their.numbers), (list(our.numbers), list(their.numbers))
    kinds = sorted({type(argument).__name__ for argument in recorded.arguments})
    print(f"{metadata.name} {architecture} {','.join(kinds)} {len(sizes)} parameters")


def first(op: str, architecture: str, wanted=lambda recorded: True):
    return next(recorded for recorded in variants.record(op, architecture) if wanted(recorded))


def has_descriptors(recorded) -> bool:
    return any(isinstance(argument, TensorDescriptor) for argument in recorded.arguments)


def main() -> None:
    stub = Stub(Path(sys.argv[1]))
    triton.runtime.driver.set_active(driver.CudaDriver())
    launch_both(stub, first("matmul", "sm_90", has_descriptors), "sm_90")
    launch_both(stub, first("signal", "sm_80"), "sm_80")
    launch_both(stub, first("bucket", "sm_80"), "sm_80")
    for recorded in {recorded.kernel: recorded for recorded in variants.record("cross_entropy", "sm_90")}.values():
        launch_both(stub, recorded, "sm_90")


if __name__ == "__main__":
    main()
