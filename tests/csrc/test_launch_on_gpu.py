"""The launcher on a GPU: the machine code of Triton, launched by Triton and by this launcher."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import _C
from weft.kernels import launch, signature

pytestmark = pytest.mark.gpu


@triton.jit
def _mix_kernel(x, y, out, n, offset, scale, count, BLOCK: tl.constexpr):  # noqa: N803, Triton's habit
    """out = scale * x + y + offset + count"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = scale * tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask).to(tl.float32)
    tl.store(out + at, total + offset.to(tl.float32) + count, mask=mask)


@triton.jit
def _copy_kernel(source, destination, BLOCK: tl.constexpr):  # noqa: N803
    """destination = source, a block for each program, through the tensor copy engine"""
    row = tl.program_id(0) * BLOCK
    column = tl.program_id(1) * BLOCK
    destination.store([row, column], source.load([row, column]))


def kernel_of(name="kernel", arguments=(), cubin=b"", shared_bytes=0, warps=4):
    """Loaded at its first launch."""
    return _C.launch.Kernel(name, cubin, list(arguments), shared_bytes, warps, 32)


def compiled_by_triton(kernel, grid, arguments, constants, warps):
    """The variant that Triton runs, for this launcher."""
    built = kernel[grid](*arguments, **constants, num_warps=warps, num_stages=1)
    recorded = launch.Launch(kernel, grid, arguments, constants, warps, 1)
    specialised, _, _ = signature.specialise(recorded)
    descriptors = iter(getattr(built.metadata, "tensordesc_meta", None) or [])
    types = [
        "ptr" if kind[0] == "*" else "tensordesc:" + json.dumps(next(descriptors)) if kind[:6] == "tensor" else kind
        for kind in specialised.values()
        if kind != "constexpr"
    ]
    options = {"arguments": types, "cubin": built.asm["cubin"], "shared_bytes": built.metadata.shared, "warps": warps}
    dispatcher = _C.launch.Dispatcher(kernel.__name__, kernel.arg_names, [])
    named = tuple(constants.items())
    dispatcher.add(dispatcher.key(arguments, named), kernel_of(name=built.metadata.name, **options))
    return lambda stream=None: dispatcher.launch(
        grid, arguments, named, (stream or torch.cuda.current_stream()).cuda_stream
    )


@dataclass(frozen=True)
class Mixed:
    """A launch of `_mix_kernel`, what Triton's made of it, and where it writes: zeros now."""

    launch_it: Callable[..., bool]
    out: torch.Tensor
    expected: torch.Tensor


@pytest.fixture
def mixed() -> Mixed:
    torch.manual_seed(1)
    n = 10_000
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(n, device="cuda")
    launch_it = compiled_by_triton(_mix_kernel, (40,), (x, y, out, n, 2**40, 0.37, 7), {"BLOCK": 256}, 4)
    expected = out.clone()
    out.zero_()
    torch.cuda.synchronize()
    return Mixed(launch_it, out, expected)


def test_a_launch_gives_the_bits_that_tritons_gives(mixed):
    assert mixed.launch_it()
    assert torch.equal(mixed.out, mixed.expected)


def test_a_launch_goes_to_the_stream_it_is_given(mixed):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        mixed.launch_it()
        copied = mixed.out.clone()
    stream.synchronize()
    assert torch.equal(copied, mixed.expected)


def test_a_first_launch_can_be_captured_in_a_graph(mixed):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed.launch_it()
    mixed.out.zero_()
    graph.replay()
    assert torch.equal(mixed.out, mixed.expected)


def test_a_launch_from_a_new_thread_finds_the_context(mixed):
    stream = torch.cuda.current_stream()
    thread = threading.Thread(target=lambda: mixed.launch_it(stream=stream))
    thread.start()
    thread.join()
    assert torch.equal(mixed.out, mixed.expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(256, 128), (1000, 4096), (33, 48)])
def test_tensor_maps_copy_what_tritons_copy(dtype, shape):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this device has no tensor copy engine")
    source = torch.randint(0, 200, shape, device="cuda").to(dtype)
    destination = torch.empty_like(source)
    block = 64
    grid = (triton.cdiv(shape[0], block), triton.cdiv(shape[1], block))
    arguments = tuple(TensorDescriptor.from_tensor(tensor, [block, block]) for tensor in (source, destination))
    launch_it = compiled_by_triton(_copy_kernel, grid, arguments, {"BLOCK": block}, 4)
    assert torch.equal(destination, source)
    destination.zero_()
    assert launch_it()
    assert torch.equal(destination, source)


def test_what_the_driver_cannot_load_is_an_error_by_name():
    torch.zeros(1, device="cuda")
    dispatcher = _C.launch.Dispatcher("kernel", [], [])
    dispatcher.add(dispatcher.key((), ()), kernel_of(cubin=b"no machine code"))
    with pytest.raises(RuntimeError, match=r"kernel kernel \(grid 1x1x1, .*cuModuleLoadData: CUDA_ERROR_"):
        dispatcher.launch((1,), (), (), 0)
