"""cupy as the independent judge of the launcher: the same machine code, loaded and launched by cupy, gives the same
bits."""

import numpy
import pytest
import torch

from weft import _C
from weft.kernels import archive, bucket, dispatch, launch, signature
from weft.kernels.activation import gated_backward
from weft.kernels.cross_entropy import cross_entropy_statistics
from weft.kernels.matmul import matmul

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]
NUMBERS = {"i32": numpy.int32, "i64": numpy.int64, "u64": numpy.uint64, "fp32": numpy.float32, "u1": numpy.int8}


@pytest.fixture
def stored():
    """The archive of the device here, and what launches from it."""
    architecture = launch.code_architecture(torch.device("cuda"))
    dispatch.use(_C.launch)
    found = dispatch.archive_of(architecture)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def reduced():
    buffers = [random(10_007, dtype=torch.float32) for _ in range(5)]
    out = torch.empty_like(buffers[0])
    return out, lambda: bucket.reduce(buffers, out, 0.2)


def multiplied():
    """Rows at odd places: addresses, no tensor descriptors, which cupy does not have."""
    dy, w, out = random(130, 64), random(64, 65), random(130, 65)
    return out, lambda: matmul(dy, w, out=out)


def differentiated():
    """The result is the launcher's own tensor: both launches write to the same one."""
    dy, z = random(33, 64), random(33, 128)
    return None, lambda: gated_backward(dy, z, "silu")


def summed():
    logits, target = random(40, 8193), torch.randint(0, 8193, (40,), device="cuda")
    return None, lambda: cross_entropy_statistics(logits, target, offset=0, ignore_index=-100, smoothing=True, pieces=1)


@pytest.mark.parametrize("prepare", [reduced, multiplied, differentiated, summed])
def test_cupy_launches_the_same_machine_code_to_the_same_bits(stored, prepare, tmp_path):
    cupy = pytest.importorskip("cupy")
    torch.manual_seed(5)
    out, call = prepare()
    with launch.recording(stored.architecture) as launches:
        result = call()
    out = result if out is None else out
    (recorded,) = launches
    out.fill_(torch.nan)
    constants = recorded.constants
    launch.launch(
        recorded.kernel, recorded.grid, *recorded.arguments, warps=recorded.warps, stages=recorded.stages, **constants
    )
    torch.cuda.synchronize()
    ours = out.clone()

    out.fill_(torch.nan)
    machine = _machine(stored, recorded)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(machine.cubin)
    function = cupy.RawModule(path=str(path)).get_function(machine.entry)
    function.max_dynamic_shared_size_bytes = machine.shared_bytes
    types, _, _ = signature.specialise(recorded)
    given = dict(zip(recorded.kernel.arg_names, recorded.arguments, strict=False))
    passed = [given[name] for name, kind in types.items() if kind != "constexpr"]
    arguments = [
        _shared(cupy, value) if isinstance(value, torch.Tensor) else NUMBERS[kind](value)
        for value, kind in zip(passed, machine.arguments, strict=True)
    ]
    hidden = [numpy.uint64(0), numpy.uint64(0)]  # scratch memory, which these kernels do not use
    grid = (*recorded.grid, 1, 1)[:3]
    function(grid, (32 * machine.warps,), (*arguments, *hidden), shared_mem=machine.shared_bytes)
    cupy.cuda.Device().synchronize()
    assert torch.equal(_bits(out), _bits(ours)) and not ours.isnan().all()


def _machine(stored: archive.Archive, recorded: launch.Launch) -> archive.Machine:
    constants = recorded.key_constants
    key = dispatch.dispatcher(recorded.kernel).key(recorded.arguments, constants)
    found = stored.of_kernel(dispatch.full_name(recorded.kernel)).get(key)
    assert found is not None, f"no compiled variant serves {recorded}"
    return stored.machine(found)


def _shared(cupy, tensor: torch.Tensor):
    """The tensor's memory as cupy's, which has no bf16."""
    view = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return cupy.from_dlpack(view)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
