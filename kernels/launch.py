"""Launches of all kernels, with checks of their arguments and devices.

A kernel runs on a CUDA device, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1, set before this package
is imported). Inside a `recording` nothing runs: launchers take meta tensors, and their launches are recorded instead.
So ahead-of-time compilation and the check of the machine code see exactly the launches of a call.

On a CUDA device a launch takes the variant that was compiled ahead of time for its arguments. If there is none, Triton
compiles it, with one warning for each kernel. WEFT_NO_JIT=1 makes that an error.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from weft.kernels import dispatch, language
from weft.kernels.dispatch import use as use
from weft.kernels.language import tl, triton
from weft.kernels.signature import Launch

INTERPRETED = language.INTERPRETED
# The interpreter holds bf16 as integers (numpy has no bf16): its dot of them is silently wrong, and its cast truncates
# instead of rounding. `dot` and `rounded` are right in the interpreter and on the device.
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(LOG2E x), and exp2 is one instruction

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Bytes of shared memory that one program may have, from the CUDA programming guide's table of compute capabilities.
SHARED_LIMIT_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
ARCHITECTURES = tuple(SHARED_LIMIT_BYTES)
# sm_120 has a tensor copy engine too, but multiplies from registers as sm_80 does, and takes that one's kernels.
WITHOUT_COPY_ENGINE = "sm_80", "sm_120"


@dataclass(frozen=True)
class Origin:
    """Source of a launch's machine code, and the reason why no faster source serves."""

    how: Literal["ahead-of-time", "jit", "interpreter", "nowhere"]
    why: str

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


@dataclass
class _Recording:
    architecture: str
    launches: list[Launch] = field(default_factory=list)


@dataclass
class Observed:
    """The launches and allocations of a call that runs."""

    launches: list[Launch] = field(default_factory=list)
    allocated: list[torch.Tensor] = field(default_factory=list)


_recording: ContextVar[_Recording | None] = ContextVar("weft_recording", default=None)
_observed: ContextVar[Observed | None] = ContextVar("weft_observed", default=None)


@contextlib.contextmanager
def recording(architecture: str) -> Iterator[list[Launch]]:
    """Collect the launches inside in a list, as for a device of that architecture, without running them.

    The architecture "interpreter" has the interpreter's tiles.
    """
    if architecture not in (*ARCHITECTURES, "interpreter"):
        raise ValueError(f"architecture={architecture!r} is not one of {', '.join(map(repr, ARCHITECTURES))}")
    current = _Recording(architecture)
    token = _recording.set(current)
    try:
        yield current.launches
    finally:
        _recording.reset(token)


@contextlib.contextmanager
def observing() -> Iterator[Observed]:
    """Collect the launches and the allocations inside, which run."""
    observed, around = Observed(), _observed.get()
    token = _observed.set(observed)
    try:
        yield observed
    finally:
        _observed.reset(token)
        if around is not None:
            around.launches += observed.launches
            around.allocated += observed.allocated


def is_recording() -> bool:
    return _recording.get() is not None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new tensor, not initialised, that `observing` sees."""
    return allocated(torch.empty(shape, dtype=dtype, device=device))


def empty_in_order(like: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor with the shape of `like` but its last size, and the other dimensions in the same order.

    So attention of views of [batch, sequence, heads, head_dim] gives such views, and a model flattens their heads
    without a copy.
    """
    strides = like.stride()[:-1]
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim] or -sys.maxsize)  # an expanded one first
    shape, order = (*like.shape[:-1], width), [*order, len(strides)]
    return allocated(torch.empty_permuted(shape, order, dtype=dtype, device=like.device))


def allocated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, which an op has allocated, and show it to `observing`."""
    observed = _observed.get()
    if observed is not None:
        observed.allocated.append(tensor)
    return tensor


def ticket(device: torch.device) -> torch.Tensor:
    """Return the stream's int32 counter, 0 between launches; a kernel counts its programs with it and resets it."""
    if device.type != "cuda":
        return _ticket(device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.int32, device=device)  # set to zero in each replay
    return _ticket(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # of any number of streams: a running kernel may still count with a ticket that is not in use here
def _ticket(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)


def launch(kernel, grid: Sequence[int], *arguments, warps: int = 4, stages: int = 1, **constants) -> None:
    """Run kernel[grid](*arguments, **constants) on the arguments' device and its current stream.

    An empty grid launches nothing.
    """
    if 0 in grid:
        return
    made = Launch(kernel, tuple(grid), arguments, constants, warps, stages)
    current = _recording.get()
    if current is not None:
        current.launches.append(made)
    else:
        run(made, arguments)


def run(made: Launch, arguments: tuple) -> None:
    """Run a launch on these arguments, whatever its own are."""
    observed = _observed.get()
    if observed is not None:
        observed.launches.append(replace(made, arguments=arguments))
    index = _device_index(arguments)
    if INTERPRETED or index < 0:
        _compile_and_run(made, arguments)
    elif index == torch.cuda.current_device():
        _run_on(index, made, arguments)
    else:
        with torch.cuda.device(index):
            _run_on(index, made, arguments)


def load(memory: torch.Tensor, record: Callable[[str], Iterable[Launch]]) -> None:
    """Load the compiled variants of the launches that `record` returns for an architecture, onto the memory's device.

    Otherwise a first launch would load its kernel, and that may wait for kernels that run and that themselves wait for
    another rank. A variant that no archive has is still compiled and loaded at its first launch.
    """
    index = _device_index((memory,))
    if INTERPRETED or index < 0:
        return
    with contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index):
        for recorded in record(_family(index)):
            found = dispatch.find(recorded.kernel, _code_architecture(index))
            if not isinstance(found, str):
                found.launch((0,), recorded.arguments, recorded.key_constants, 0)


def origin(recorded: Launch, architecture: str) -> Origin:
    """Return the source of the launch's machine code, on a device with that `code_architecture`."""
    if INTERPRETED:
        return Origin("interpreter", "TRITON_INTERPRET=1 is set")
    found = dispatch.find(recorded.kernel, architecture)
    if isinstance(found, str):
        why = found
    elif found.serves(recorded.arguments, recorded.key_constants):
        return Origin("ahead-of-time", "")
    else:
        why = found.lacks()
    refusal = _why_not_compile()
    return Origin("nowhere", f"{why}; {refusal}") if refusal else Origin("jit", why)


def code_architecture(device: torch.device) -> str:
    """Return the architecture ("sm_90", say) of the compiled kernels that the device runs.

    A device that runs none of weft's compiled kernels gives its own architecture. Code for 8.0 runs on every 8.x but
    8.7, which is Tegra's, and code for 12.0 on every 12.x. Weft's code for sm_90 and sm_100 has instructions of just
    that architecture (CUDA programming guide, on binary compatibility and architecture-specific features).
    """
    current = _recording.get()
    return current.architecture if current is not None else _code_architecture(device.index or 0)


def architecture_of(device: torch.device) -> str:
    """Return the family ("sm_90", say) of the device's variants and tables; "interpreter" in the interpreter."""
    current = _recording.get()
    if current is not None:
        return current.architecture
    return "interpreter" if device.type != "cuda" else _family(device.index or 0)


def why_no_variants(device: torch.device) -> str | None:
    """Return the reason if no variant of any kernel can run on this GPU, else None."""
    return None if _recording.get() is not None else _why_no_family(device.index or 0)


def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors: a persistent grid has that many times a multiprocessor's programs.

    Without a CUDA device it is 132 in a recording and 3 in the interpreter.
    """
    if _recording.get() is not None:
        return 132
    return 3 if device.type != "cuda" else _properties(device.index or 0).multi_processor_count


def has_copy_engine(device: torch.device) -> bool:
    """Return True if kernels load by the tensor copy engine, which tensor descriptors need: on sm_90 and sm_100."""
    return architecture_of(device) not in WITHOUT_COPY_ENGINE


def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a program may have all the shared memory of its architecture; 8.6 and 8.9 give it 99 KiB."""
    if device.type != "cuda":
        return True
    allowed = _properties(device.index or 0).shared_memory_per_block_optin
    return allowed >= SHARED_LIMIT_BYTES[architecture_of(device)]


def check_memory(op: str, **tensors: torch.Tensor | None) -> torch.device:
    """Return the one device that all tensors are on; None is ignored.

    Raises:
        ValueError: the tensors are on several devices, or on one that no kernel runs on.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    devices = {tensor.device for tensor in given.values()}
    if len(devices) != 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"{op}: the tensors must be on one device, got {places}")
    (device,) = devices
    if _recording.get() is None and device.type != ("cpu" if INTERPRETED else "cuda"):
        where = "the CPU, since TRITON_INTERPRET=1 is set" if INTERPRETED else "a CUDA device"
        raise ValueError(
            f"{op}: the kernel runs on {where}; the tensors are on {device}. Move them, or use PyTorch's op"
        )
    return device


def check_dtype(op: str, allowed: Sequence[torch.dtype] = DTYPES, /, **tensors: torch.Tensor | None) -> None:
    """Check the tensors' types; the TypeError names the tensor. None is ignored."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be one of {', '.join(map(str, allowed))}")


def check_shape(op: str, expected: Sequence[int], **tensors: torch.Tensor | None) -> None:
    """Check that the tensors have the expected shape; the ValueError names the tensor. None is ignored."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(expected):
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; it must be {tuple(expected)}")


def check_output(op: str, **tensors: torch.Tensor | None) -> None:
    """Check that elements share no memory (strides of 0); the ValueError names the tensor. None is ignored."""
    for name, tensor in tensors.items():
        if tensor is not None and any(s == 0 < n - 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}: its elements share memory; give it its own")


def describable(matrix: torch.Tensor) -> bool:
    """Return True if the tensor copy engine can read the matrix.

    Rows and base must lie at multiples of 16 bytes and the last dimension must be contiguous (CUDA driver API,
    cuTensorMapEncodeTiled).
    """
    bytes_each = matrix.element_size()
    return (
        matrix.stride(-1) == 1
        and matrix.data_ptr() % 16 == 0
        and all(stride > 0 and stride * bytes_each % 16 == 0 for stride in matrix.stride()[:-1])
        and 0 not in matrix.shape
    )


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a @ b in fp32, in the interpreter as on the device."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def fused_multiply_add(x, y, z):
    """Return x * y + z in fp32, rounded once, in the interpreter as on the device."""
    if _INTERPRETED:
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return fp32 x rounded to the nearest value of DTYPE (ties to even)."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        y = tl.where(x == x, nearest, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of the columns: writing a large tile in parts takes fewer registers."""
    return tile.reshape((ROWS, 2, COLUMNS // 2)).permute((0, 2, 1)).split()


def _device_index(arguments: tuple) -> int:
    """Return the index of the arguments' CUDA device, -1 for the CPU. Every launch calls this, so it must be fast."""
    for argument in arguments:
        if isinstance(argument, language.TensorDescriptor):
            return argument.base.get_device()
        if isinstance(argument, torch.Tensor):
            return argument.get_device()
    raise TypeError("a kernel was given no tensor, so no device to run on")


def _run_on(index: int, made: Launch, arguments: tuple) -> None:
    """Launch on the current device and its current stream."""
    found = dispatch.find(made.kernel, _code_architecture(index))
    if isinstance(found, str):
        why = found
    else:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if found.launch(made.grid, arguments, made.key_constants, stream):
            return
        why = found.lacks()
    if id(made.kernel) not in _compiled_at_run_time or "WEFT_NO_JIT" in os.environ:
        _announce(made, why)
    _compile_and_run(made, arguments)


def _compile_and_run(made: Launch, arguments: tuple) -> None:
    made.kernel[made.grid](*arguments, **made.constants, **made.options)


_compiled_at_run_time: dict[int, Any] = {}  # kernels by identity, after their warning


class NotCompiledError(RuntimeError):
    """A launch whose kernel was not compiled ahead of time, where none may be compiled now."""


def _announce(recorded: Launch, why: str) -> None:
    """Warn that Triton compiles the launch, or raise NotCompiledError if it must not."""
    kernel = recorded.kernel
    variant = f"{dispatch.full_name(kernel)} ({recorded})"
    refusal = _why_not_compile()
    if refusal:
        raise NotCompiledError(f"{variant} cannot be launched: {why}; {refusal}")
    if id(kernel) not in _compiled_at_run_time:
        _compiled_at_run_time[id(kernel)] = kernel
        warnings.warn(f"{variant} is compiled at its first call, by triton: {why}", stacklevel=2)


def _why_not_compile() -> str | None:
    if language.VERSION is None:
        return "triton, which would compile it, is not installed (pip install weft[gpu])"
    if os.environ.get("WEFT_NO_JIT") == "1":
        return "WEFT_NO_JIT=1 forbids to compile it now"
    return None


@lru_cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)


@lru_cache
def _code_architecture(index: int) -> str:
    properties = _properties(index)
    capability = (properties.major, properties.minor)
    if properties.major in (8, 12) and capability != (8, 7):
        return f"sm_{properties.major}0"
    return f"sm_{properties.major}{properties.minor}"


@lru_cache
def _family(index: int) -> str:
    properties = _properties(index)
    capability = properties.major * 10 + properties.minor
    families = [name for name in ARCHITECTURES if int(name.removeprefix("sm_")) <= capability]
    if not families:
        raise ValueError(f"{properties.name}: {_why_no_family(index)}")
    return families[-1]


def _why_no_family(index: int) -> str | None:
    properties = _properties(index)
    if properties.major >= 8:
        return None
    return f"weft's kernels need compute capability 8.0, the device has {properties.major}.{properties.minor}"
