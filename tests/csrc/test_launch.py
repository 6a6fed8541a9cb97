"""The launcher of compiled kernels: what a driver gets from it, bit for bit (tests/stub_driver)."""

import ast
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
import triton.language as tl
from hypothesis import strategies as some
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import _C
from weft.kernels import launch, signature

FOLDER = Path(__file__).parents[1] / "stub_driver"
_spec = importlib.util.spec_from_file_location("stub_driver", FOLDER / "stub.py")
stub_driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub_driver)

Dispatcher, Kernel = _C.launch.Dispatcher, _C.launch.Kernel
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700
SHARED_LIMIT = 232448
DYNAMIC_SHARED = 8  # CUfunction_attribute of cuda.h
RELAXED = 2
SMALL_MAP_BIT = 1 << 21

pytestmark = pytest.mark.skipif(
    stub_driver.COMPILER is None or stub_driver.include_folder() is None, reason="no gcc, or no cuda.h, to build a stub"
)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return stub_driver.build(tmp_path_factory.mktemp("stub"))


@contextlib.contextmanager
def driver_at(path):
    """Launches use the driver at that path, and then the machine's again."""
    before = os.environ.get("WEFT_CUDA_DRIVER")
    os.environ["WEFT_CUDA_DRIVER"] = str(path)
    try:
        yield _C.launch.driver()
    finally:
        os.environ.pop("WEFT_CUDA_DRIVER")
        if before is not None:
            os.environ["WEFT_CUDA_DRIVER"] = before
        _C.launch.driver()


@pytest.fixture
def stub(library):
    """The stub driver, with a context that is current here."""
    stub = stub_driver.Stub(library)
    stub.reset()
    with driver_at(library):
        stub.context()
        yield stub


@dataclass
class Memory:
    """A tensor at a chosen address."""

    address: int = 0x7F0000000000
    dtype: torch.dtype = torch.float32

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Descriptor:
    base: Any
    shape: Any
    strides: Any
    block_shape: Any


def layout(**changes) -> str:
    """A tensor map's type, for float32 [64, 32] blocks."""
    return "tensordesc:" + json.dumps(
        {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [64, 32], "fp4_padded": False} | changes
    )


SIZES = {"ptr": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
SIZES |= {"fp32": 4, "fp64": 8}


def sizes_of(types) -> list[int]:
    """The bytes of each parameter; a descriptor becomes its map, its sizes and its strides."""
    found = []
    for kind in types:
        if kind.startswith("tensordesc:"):
            rank = len(json.loads(kind.removeprefix("tensordesc:"))["block_size"])
            found += [128, *[4] * rank, *[8] * rank]
        else:
            found.append(SIZES[kind])
    return found


def kernel_of(*types, name="kernel", static_shared=0, **changes) -> Kernel:
    options = {
        "name": name,
        "cubin": stub_driver.image(name, sizes_of(types), static_shared),
        "arguments": list(types),
        "shared_bytes": 0,
        "warps": 4,
        "registers": 40,
    }
    return Kernel(**options | changes)


def dispatcher_of(count: int, *unspecialised: str) -> Dispatcher:
    return Dispatcher("kernel", [f"x{place}" for place in range(count)], list(unspecialised))


def launcher(arguments=(), types=(), unspecialised=(), **changes):
    """A function that launches a kernel of those types with those arguments."""
    dispatcher = dispatcher_of(len(arguments), *unspecialised)
    dispatcher.add(dispatcher.key(arguments, ()), kernel_of(*types, **changes))
    return lambda grid=(1,), stream=0: dispatcher.launch(grid, arguments, (), stream)


def launched(stub, *arguments_and_options, **options):
    """The one call that the launch made."""
    grid, stream = options.pop("grid", (1,)), options.pop("stream", 0)
    assert launcher(*arguments_and_options, **options)(grid, stream)
    (call,) = stub.launches()
    return call


def names(calls) -> list[str]:
    return [call.name for call in calls]


# --- finding the driver


def test_the_driver_is_found_and_its_version_reported(library):
    with driver_at(library) as state:
        assert state == {"found": True, "error": None, "version": 13010}


def test_looking_for_the_driver_does_not_initialise_it(library):
    stub = stub_driver.Stub(library)
    stub.reset()
    with driver_at(library):
        assert names(stub.calls()) in (["cuDriverGetVersion"], [])


def test_no_driver_is_a_state_and_a_launch_says_so():
    with driver_at("/nowhere/libcuda.so.1") as state:
        assert not state["found"] and state["version"] is None and "/nowhere/libcuda.so.1" in state["error"]
        with pytest.raises(RuntimeError, match=r"kernel kernel .*no CUDA driver: /nowhere/libcuda.so.1"):
            launcher()()


def test_a_driver_that_comes_later_is_found(library, tmp_path):
    with driver_at(tmp_path / "libcuda.so.1") as state:
        assert not state["found"]
        (tmp_path / "libcuda.so.1").write_bytes(library.read_bytes())
        assert _C.launch.driver()["found"]


def test_a_driver_that_cannot_launch_is_named(tmp_path):
    old = stub_driver.build(tmp_path, "-DWITHOUT_LAUNCH")
    with driver_at(old) as state:
        assert not state["found"] and f"{old} has no cuLaunchKernelEx; version 12" in state["error"]


def test_an_older_driver_launches_what_it_can(tmp_path):
    old = stub_driver.build(tmp_path, "-DWITHOUT_NEWER")
    stub = stub_driver.Stub(old)
    with driver_at(old):
        stub.context()
        assert launched(stub, (5,), ("i32",)).parameters[0] == struct.pack("<i", 5)
        descriptor = Descriptor(Memory(), [128, 64], [64, 1], [64, 32])
        with pytest.raises(RuntimeError, match="no cuTensorMapEncodeTiled; version 12 or later"):
            launcher((descriptor,), (layout(),))()


def test_the_stub_of_the_extension_names_what_is_there():
    tree = ast.parse((Path(__file__).parents[2] / "pytorch_ext" / "_C.pyi").read_text())
    (stub_class,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "_Launch"]
    assert {node.name for node in stub_class.body} == {name for name in dir(_C.launch) if not name.startswith("_")}
    for node in stub_class.body:
        if isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__init__"}
            assert members == {name for name in vars(getattr(_C.launch, node.name)) if not name.startswith("_")}


# --- what the kernel gets


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [
        ("ptr", Memory(0xFEDCBA9876543210), "<Q"),
        ("ptr", Memory(0x7F0000000008), "<Q"),
        ("u1", True, "<B"),
        ("u1", False, "<B"),
        ("i1", True, "<B"),
        *[("i8", value, "<b") for value in (-128, 127, 0)],
        *[("i16", value, "<h") for value in (-(2**15), 2**15 - 1)],
        *[("i32", value, "<i") for value in (-(2**31), 2**31 - 1, 0, 16, -1)],
        *[("i64", value, "<q") for value in (-(2**63), 2**63 - 1, 2**31, -(2**31) - 1)],
        *[("u8", value, "<B") for value in (0, 255)],
        *[("u16", value, "<H") for value in (0, 2**16 - 1)],
        *[("u32", value, "<I") for value in (0, 2**32 - 1)],
        *[("u64", value, "<Q") for value in (2**63, 2**64 - 1)],
        *[("fp32", value, "<f") for value in (0.0, -0.0, 0.1, float("inf"), 1e-45, -3.5)],
        *[("fp64", value, "<d") for value in (0.1, -0.0, float("-inf"), 5e-324)],
    ],
)
def test_every_type_of_argument_is_passed_bit_for_bit(stub, kind, value, bits):
    call = launched(stub, (value,), (kind,))
    number = value.address if isinstance(value, Memory) else value
    assert call.parameters == [struct.pack(bits, number), bytes(8), bytes(8)]


def test_a_double_is_rounded_to_the_nearest_float(stub):
    call = launched(stub, (1 / 3, float("nan"), 1e300), ("fp32",) * 3)
    third, nan, large = (struct.unpack("<f", part)[0] for part in call.parameters[:3])
    assert third == torch.tensor(1 / 3, dtype=torch.float32).item() and nan != nan and large == float("inf")


def test_constants_are_left_out_and_the_scratch_addresses_are_null_and_last(stub):
    arguments = (Memory(16), None, 1, 7, None, 0.5, Memory(9, torch.bfloat16))
    call = launched(stub, arguments, ("ptr", "i32", "fp32", "ptr"))
    expected = [struct.pack("<Q", 16), struct.pack("<i", 7), struct.pack("<f", 0.5), struct.pack("<Q", 9)]
    assert call.parameters == [*expected, bytes(8), bytes(8)]


def test_a_kernel_without_arguments_gets_the_scratch_addresses(stub):
    assert launched(stub).parameters == [bytes(8), bytes(8)]


def test_one_is_passed_where_the_parameter_is_not_specialised(stub):
    assert launched(stub, (1, 1), ("i32",), ("x1",)).parameters[0] == struct.pack("<i", 1)


@pytest.mark.parametrize(
    ("kind", "value"), [("i8", 128), ("i16", -(2**15) - 1), ("i32", 2**31), ("u8", -1), ("u32", -5)]
)
def test_an_integer_that_its_type_does_not_hold_is_refused(stub, kind, value):
    with pytest.raises(OverflowError, match=f"kernel kernel: argument x0 is {value}, which {kind} does not hold"):
        launcher((value,), (kind,))()
    assert stub.launches() == []


def test_tensors_of_torch_are_read(stub):
    tensor, parameter = torch.empty(64), torch.nn.Parameter(torch.empty(4, dtype=torch.bfloat16))
    call = launched(stub, (tensor[1:], parameter, tensor), ("ptr",) * 3)
    addresses = (tensor.data_ptr() + 4, parameter.data_ptr(), tensor.data_ptr())
    assert call.parameters[:3] == [struct.pack("<Q", address) for address in addresses]


def test_a_tensor_type_may_have_a_data_ptr_of_its_own(stub):
    class Elsewhere(torch.Tensor):
        def data_ptr(self):
            return 48

    call = launched(stub, (torch.empty(2).as_subclass(Elsewhere),), ("ptr",))
    assert call.parameters[0] == struct.pack("<Q", 48)


def test_subclasses_of_numbers_are_numbers(stub):
    class Integer(int):
        pass

    class Real(float):
        pass

    call = launched(stub, (Integer(6), Real(0.25)), ("i32", "fp32"))
    assert call.parameters[:2] == [struct.pack("<i", 6), struct.pack("<f", 0.25)]


def test_a_launch_keeps_no_reference(stub):
    arguments = (Memory(), Descriptor(Memory(), [128, 64], [64, 1], [64, 32]), 12345678, 0.5)
    launch_it = launcher(arguments, ("ptr", layout(), "i32", "fp32"))
    objects = [*arguments, arguments[1].base, arguments[1].shape, arguments[0].dtype]
    launch_it()
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(10):
        launch_it()
    assert [sys.getrefcount(one) for one in objects] == before


@pytest.mark.slow("csrc/launch", "kernels")
def test_what_the_driver_gets_is_what_tritons_own_launcher_gives_it(library, tmp_path):
    """For kernels of ours, compiled for sm_80 and sm_90; also the sizes of the parameters in the machine code."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    stub = {
        "WEFT_CUDA_DRIVER": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),  # what Triton links its launcher against
        "TRITON_CACHE_DIR": str(tmp_path),  # that launcher must not be found by others
    }
    done = subprocess.run(
        [sys.executable, FOLDER / "beside_triton.py", library],
        capture_output=True,
        text=True,
        timeout=280,
        env=inherited | stub,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7 and any("TensorDescriptor" in line for line in lines), done.stdout


VALGRIND = shutil.which("valgrind")


@pytest.mark.slow("kernels")
@pytest.mark.skipif(
    VALGRIND is None or not Path("/usr/include/valgrind/callgrind.h").exists(), reason="no valgrind to count with"
)
def test_a_replayed_call_takes_the_host_about_ten_microseconds(library, tmp_path):
    """From op to driver, counted: a core of 3 GHz does some ten instructions a nanosecond."""
    done = subprocess.run(
        [
            *(VALGRIND, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={tmp_path / 'counts'}"),
            *(sys.executable, FOLDER / "host_time.py", library, "--count"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        | {"WEFT_CUDA_DRIVER": str(library)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (total,) = re.findall(r"Collected : (\d+)", done.stderr)
    assert 20_000 < int(total) / 200 < 110_000


# --- the configuration


def test_grid_block_shared_memory_and_stream_are_as_asked(stub):
    call = launched(stub, grid=(5, 3, 2), stream=0x51, warps=8, shared_bytes=1000)
    assert list(call.numbers[:8]) == [5, 3, 2, 256, 1, 1, 1000, 0x51] and call.attributes == []


@pytest.mark.parametrize(
    ("grid", "blocks"), [((7,), [7, 1, 1]), ((7, 2), [7, 2, 1]), ((2**31 - 1, 1, 1), [2**31 - 1, 1, 1])]
)
def test_a_grid_has_one_to_three_dimensions(stub, grid, blocks):
    assert list(launched(stub, grid=grid).numbers[:3]) == blocks


@pytest.mark.parametrize("grid", [(0,), (4, 0), (1, 1, 0)])
def test_an_empty_grid_loads_the_kernel_and_launches_nothing(stub, grid):
    launch_it = launcher()
    assert launch_it(grid)
    assert len(stub.calls("cuModuleLoadData")) == 1 and stub.launches() == []
    assert launch_it() and len(stub.calls("cuModuleLoadData")) == 1


@pytest.mark.parametrize(
    ("grid", "error"),
    [((), ValueError), ((1, 1, 1, 1), ValueError), ((-1,), ValueError), ((2**31,), ValueError), ((1.5,), TypeError)],
)
def test_what_is_no_grid_is_refused(stub, grid, error):
    with pytest.raises(error):
        launcher()(grid)
    assert stub.launches() == []


@pytest.mark.parametrize(
    ("shared", "static", "asked"),
    [
        (48 * 1024, 0, []),
        (48 * 1024 + 1, 0, [48 * 1024 + 1]),
        (47 * 1024, 2048, [47 * 1024]),
        (SHARED_LIMIT, 0, [SHARED_LIMIT]),
    ],
)
def test_shared_memory_beyond_48_kib_is_asked_for(stub, shared, static, asked):
    call = launched(stub, shared_bytes=shared, static_shared=static)
    assert call.numbers[6] == shared
    assert [list(call.numbers[:2]) for call in stub.calls("cuFuncSetAttribute")] == [[DYNAMIC_SHARED, n] for n in asked]
    assert len(stub.calls("cuFuncSetCacheConfig")) == len(asked)


def test_more_shared_memory_than_the_device_has_is_refused_with_both_numbers(stub):
    with pytest.raises(RuntimeError, match=f"needs {SHARED_LIMIT + 1} bytes .* the device allows {SHARED_LIMIT}"):
        launcher(shared_bytes=SHARED_LIMIT - 99, static_shared=100)()
    assert stub.launches() == []
    assert len(stub.calls("cuModuleUnload")) == 1  # what is tried again and again must not fill the device


# --- tensor maps


def encoded(stub):
    (call,) = stub.calls("cuTensorMapEncodeTiled")
    kind, rank, address, interleave, swizzle, promotion, fill, *rest = call.numbers
    sizes, strides, box, steps = (rest[start : start + rank] for start in (0, 5, 10, 15))
    return SimpleNamespace(**{key: value for key, value in locals().items() if key not in ("stub", "call", "rest")})


def test_a_descriptor_becomes_its_map_its_sizes_and_its_strides(stub):
    descriptor = Descriptor(Memory(0x7F0000000100), [300, 200, 100], [40000, 128, 1], [1, 64, 32])
    call = launched(stub, (descriptor, 5), (layout(block_size=[1, 64, 32], swizzle=2), "i32"))
    found = encoded(stub)
    assert (found.kind, found.rank, found.address) == (7, 3, 0x7F0000000100)
    assert (found.sizes, found.strides) == ([100, 200, 300], [512, 160000, 0])
    assert (found.box, found.steps) == ([32, 64, 1], [1, 1, 1])
    assert (found.interleave, found.swizzle, found.promotion, found.fill) == (0, 2, 2, 0)
    tensor_map, *rest = call.parameters
    assert struct.unpack_from("<QQQQQ", tensor_map) == (0x7F0000000100, 2**64 - 1, 100, 200, 300)
    assert rest[:3] == [struct.pack("<i", size) for size in (300, 200, 100)]
    assert rest[3:6] == [struct.pack("<q", stride) for stride in (40000, 128, 1)]
    assert rest[6:] == [struct.pack("<i", 5), bytes(8), bytes(8)]


@pytest.mark.parametrize(("in_metadata", "in_driver"), [(0, 0), (6, 6), (7, 7), (8, 10), (9, 8), (10, 9)])
def test_element_types_are_numbered_as_the_driver_does(stub, in_metadata, in_driver):
    launched(stub, (Descriptor(Memory(), [128, 64], [64, 1], [64, 32]),), (layout(elem_type=in_metadata),))
    assert encoded(stub).kind == in_driver


def test_padding_and_rounding_are_those_of_tritons_descriptor(stub):
    plain = torch.empty(128, 64)
    rounds = {"round_f32_to_tf32": True} if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__ else {}
    launched(stub, (TensorDescriptor(plain, plain.shape, plain.stride(), [64, 32], "nan", **rounds),), (layout(),))
    assert (encoded(stub).kind, encoded(stub).fill) == (11 if rounds else 7, 1)  # TFLOAT32, NaN outside
    stub.reset()
    stub.context()
    launched(stub, (TensorDescriptor.from_tensor(plain, [64, 32]),), (layout(),))
    assert (encoded(stub).kind, encoded(stub).fill) == (7, 0)


def test_two_fp4_values_count_as_two_elements(stub):
    descriptor = Descriptor(Memory(dtype=torch.uint8), [128, 64], [64, 1], [64, 32])
    call = launched(stub, (descriptor,), (layout(elem_size=1, fp4_padded=True),))
    assert encoded(stub).sizes == [128, 128]
    assert call.parameters[1:3] == [struct.pack("<i", 128), struct.pack("<i", 64)]


@pytest.mark.parametrize(
    ("version", "rows", "cleared"),
    [(13010, 511, True), (12040, 511, True), (13020, 511, False), (13010, 512, True), (13010, 513, False)],
)
def test_maps_of_small_tensors_are_mended_for_drivers_that_need_it(library, version, rows, cleared):
    """512 rows of 64 floats are 128 KiB: the last byte that an element begins at is within."""
    stub = stub_driver.Stub(library)
    stub.reset()
    fresh = library.with_name(f"of_{version}_{rows}.so")
    fresh.write_bytes(library.read_bytes())  # a driver's version is asked for once
    stub = stub_driver.Stub(fresh)
    stub.set("version", version)
    with driver_at(fresh):
        stub.context()
        call = launched(stub, (Descriptor(Memory(), [rows, 64], [64, 1], [64, 32]),), (layout(),))
    word = struct.unpack_from("<8xQ", call.parameters[0])[0]
    assert word == (2**64 - 1 - SMALL_MAP_BIT if cleared else 2**64 - 1)


def test_the_size_of_a_large_tensor_is_not_cut_to_32_bits(stub):
    rows = (2**32 + 1024) // 256 + 1
    call = launched(stub, (Descriptor(Memory(), [rows, 64], [64, 1], [64, 32]),), (layout(),))
    assert struct.unpack_from("<8xQ", call.parameters[0])[0] == 2**64 - 1


@pytest.mark.parametrize(
    ("descriptor", "complaint"),
    [
        (Descriptor(Memory(), [128, 64], [64, 2], [64, 32]), "last stride is 2; it must be 1"),
        (Descriptor(Memory(), [128, 64, 2], [64, 1], [64, 32]), "shape and strides differ in length"),
        (Descriptor(Memory(), [128, 64, 2], [128, 64, 1], [64, 32]), "has 3 dimensions; the kernel was compiled for 2"),
        (Descriptor(Memory(), [2**31, 64], [64, 1], [64, 32]), "size 2147483648 is beyond 32 bits"),
        (Descriptor(Memory(), [1] * 6, [1] * 6, [64, 32]), "shape has 6 dimensions"),
    ],
)
def test_a_descriptor_that_no_map_can_be_made_of_is_refused(stub, descriptor, complaint):
    with pytest.raises(ValueError, match=f"kernel kernel: .*{complaint}"):
        launcher((descriptor,), (layout(),))()
    assert stub.launches() == []


def test_a_map_that_the_driver_refuses_is_described(stub):
    stub.fail("cuTensorMapEncodeTiled", INVALID_VALUE)
    with pytest.raises(
        RuntimeError,
        match=r"kernel kernel .*cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE \(invalid argument\), for a tensor of "
        r"shape \[128, 64\], strides \[64, 1\] and 4-byte elements at address 64, in boxes of \[64, 32\] with swizzle 3",
    ):
        launcher((Descriptor(Memory(64), [128, 64], [64, 1], [64, 32]),), (layout(),))()


# --- keys

ADDRESSES = torch.empty(256, dtype=torch.float32)  # torch aligns it to 64 bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8)


def memory(dtype, start) -> torch.Tensor:
    return ADDRESSES.view(dtype)[start:]


def described(dtype, block) -> TensorDescriptor:
    base = ADDRESSES.view(dtype)[:128].view(8, 16)
    return TensorDescriptor(base, [8, 16], [16, 1], block)


tensors = some.builds(memory, some.sampled_from(DTYPES), some.integers(0, 17))
descriptors = some.builds(described, some.sampled_from(DTYPES), some.sampled_from([[8, 16], [16, 8], [8, 32]]))
edges = some.sampled_from(
    [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**63, -(2**31), -(2**31) - 1]
)
integers = edges | some.integers(-(2**62), 2**63 + 2**62) | some.integers(-40, 40)
one_argument = some.none() | integers | some.booleans() | some.floats() | tensors | descriptors
constants = some.dictionaries(
    some.sampled_from(["BLOCK", "PRECISION", "DTYPE"]),
    some.none()
    | some.booleans()
    | some.integers(-2, 2)
    | some.sampled_from(["tf32", "ieee", 1.0, tl.float16, tl.float32]),
    max_size=2,
)
flags = some.lists(some.booleans(), min_size=6, max_size=6)


@some.composite
def alike(draw, argument):
    """Mostly the same, else one of a class that is the same or close."""
    kind = draw(some.integers(0, 5))
    if kind > 1:
        return argument
    if type(argument) is int and kind == 0:
        return argument + draw(some.sampled_from([1, -1, 8, 16, 2**31, -(2**31)]))
    return draw(one_argument)


@some.composite
def launches_alike(draw):
    """Two argument lists that differ in few places, so that they are often of one variant."""
    first = draw(some.lists(one_argument, max_size=5))
    second = [draw(alike(argument)) for argument in first]
    constants_of_both = draw(constants)
    return first, second, constants_of_both, draw(constants) if draw(some.booleans()) else constants_of_both


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(launches_alike(), flags)
def test_keys_are_equal_exactly_where_the_compiled_variant_is(pair, unspecialised):
    first, second, first_constants, second_constants = pair
    parameters = [f"x{place}" for place in range(len(first))]
    flagged = [name for name, flag in zip(parameters, unspecialised, strict=False) if flag]
    kernel = SimpleNamespace(
        arg_names=[*parameters, *{**first_constants, **second_constants}],
        params=[SimpleNamespace(name=name, do_not_specialize=name in flagged) for name in parameters],
    )
    dispatcher = Dispatcher("kernel", kernel.arg_names, flagged)

    def variant(arguments, named):
        kernel.arg_names = [*parameters, *named]
        recorded = launch.Launch(kernel, (1,), tuple(arguments), named, 4, 1)
        types, constant, attributes = signature.specialise(recorded)
        # 1, 1.0 and True are equal in Python; as constants of a kernel they are not.
        return repr((types, list(constant.items()), attributes))

    same = variant(first, first_constants) == variant(second, second_constants)
    keys = [
        dispatcher.key(tuple(arguments), tuple(named.items()))
        for arguments, named in ((first, first_constants), (second, second_constants))
    ]
    assert (keys[0] == keys[1]) == same


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(one_argument, one_argument, some.booleans())
def test_classes_are_those_that_triton_specialises_on(first, second, specialised):
    dispatcher = dispatcher_of(1, *([] if specialised else ["x0"]))

    def of_triton(argument):
        return repr(native_specialize_impl(BaseBackend, argument, False, specialised, specialised))

    same = of_triton(first) == of_triton(second)
    assert (dispatcher.key((first,), ()) == dispatcher.key((second,), ())) == same


def test_a_launch_takes_the_variant_of_its_key(stub):
    lists = [
        ((16,), ("i32",)),
        ((17,), ("i32",)),
        ((2**40,), ("i64",)),
        ((0.5,), ("fp32",)),
        ((True,), ("u1",)),
        ((None,), ()),
        ((1,), ()),
        ((memory(torch.float32, 0),), ("ptr",)),
        ((memory(torch.float32, 1),), ("ptr",)),
        ((memory(torch.bfloat16, 0),), ("ptr",)),
        ((described(torch.float32, [8, 16]),), (layout(),)),
        ((described(torch.float32, [16, 8]),), (layout(),)),
    ]
    for named, others in ((), (("A", 1),)), ((("A", 1),), (("A", 2),)):
        for arguments, types in lists:
            dispatcher = dispatcher_of(1)
            dispatcher.add(dispatcher.key(arguments, named), kernel_of(*types))
            found = [given for given, _ in lists if dispatcher.launch((1,), given, named, 0)]
            assert len(found) == 1 and found[0] is arguments
            assert not dispatcher.launch((1,), arguments, others, 0)
    assert len(stub.launches()) == 2 * len(lists)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("A", 1),), (("A", True),)),
        ((("A", 1),), (("A", 1.0),)),
        ((("A", 0),), (("A", None),)),
        ((("A", "1"),), (("A", 1),)),
        ((("A", 1), ("B", 2)), (("B", 2), ("A", 1))),
        ((("A", 1),), (("B", 1),)),
        ((("A", "xB"),), (("A", "x"), ("B", None))),
        ((("A", 0.0),), (("A", -0.0),)),
        ((("A", tl.float16),), (("A", "fp16"),)),
        ((("A", tl.float16),), (("A", tl.bfloat16),)),
        ((("A", "é"),), (("A", "e"),)),
        ((), (("warps", 4),)),
    ],
)
def test_constants_that_differ_give_keys_that_differ(one, other):
    dispatcher = dispatcher_of(0)
    assert dispatcher.key((), one) != dispatcher.key((), other)


def test_a_key_is_the_same_in_another_process():
    """Archives hold keys. So the bytes of this one stay as they are, as long as there are archives."""
    arguments = (None, 1, 5, 16, 2**40, 2**40 + 1, True, 0.5, Memory(16, torch.bfloat16), Memory(1, torch.int64))
    descriptor = Descriptor(Memory(0, torch.float16), [8, 8], [8, 1], [64, 32])
    key = dispatcher_of(11).key((*arguments, descriptor), (("A", "tf32"), ("B", tl.float16), ("warps", 4)))
    assert key.hex() == (
        "0b4e3169494c6c6266500a700864" + "0902" + "4000000020000000"
        "010000004173040000007466333201000000426f040000006670313605000000776172707369" + "0400000000000000"
    )  # fmt: skip


def test_a_constant_is_known_by_its_name(stub):
    class Named:
        def __str__(self):
            return "fp16"

    dispatcher = dispatcher_of(0)
    assert dispatcher.key((), (("A", Named()),)) == dispatcher.key((), (("A", tl.float16),))
    with pytest.raises(TypeError, match="constant A is <object object at 0x"):
        dispatcher.key((), (("A", object()),))


def test_keys_of_any_length_are_computed(stub):
    dispatcher = dispatcher_of(0)
    keys = {dispatcher.key((), (("A", "x" * count), ("B", 1))) for count in (10, 900, 1000, 1010, 1024, 5000)}
    assert len(keys) == 6
    long = (("A", "x" * 5000),)
    dispatcher.add(dispatcher.key((), long), kernel_of())
    assert dispatcher.launch((1,), (), long, 0) and not dispatcher.launch((1,), (), (("A", "x" * 4999),), 0)


@pytest.mark.parametrize(
    ("argument", "error", "complaint"),
    [
        ([1], TypeError, "argument x0 is a list, which no kernel takes"),
        ("text", TypeError, "argument x0 is a str, which no kernel takes"),
        (torch.empty(2, dtype=torch.complex64), TypeError, "argument x0 has elements of type torch.complex64"),
        (2**64, OverflowError, "argument x0 is 18446744073709551616, beyond 64 bits"),
        (-(2**63) - 1, OverflowError, "argument x0 is -9223372036854775809, beyond 64 bits"),
        (Descriptor(Memory(), [8] * 6, [1] * 6, [8] * 6), ValueError, "descriptor of 6 dimensions; 1 to 5"),
        (Descriptor(Memory(), [8], [1], 8), TypeError, "list or a tuple"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(argument, error, complaint):
    with pytest.raises(error, match=complaint):
        dispatcher_of(1).key((argument,), ())


def test_an_error_of_the_tensor_itself_is_passed_on():
    class Broken:
        dtype = torch.float32

        def data_ptr(self):
            raise LookupError("no storage")

    with pytest.raises(LookupError, match="no storage"):
        dispatcher_of(1).key((Broken(),), ())


def test_more_arguments_than_parameters_are_refused():
    with pytest.raises(TypeError, match="kernel kernel was given 2 arguments; it takes at most 1"):
        dispatcher_of(1).key((1, 2), ())


def test_constants_that_are_no_pairs_are_refused():
    for wrong in (("A",), (("A", 1, 2),), ((1, "A"),)):
        with pytest.raises(TypeError, match="a constant must be a pair"):
            dispatcher_of(0).key((), wrong)


def test_a_parameter_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="kernel kernel has no parameter y"):
        dispatcher_of(1, "y")


# --- variants


def test_a_launch_without_a_variant_launches_nothing_and_says_so(stub):
    dispatcher = dispatcher_of(1)
    dispatcher.add(dispatcher.key((16,), ()), kernel_of("i32"))
    assert not dispatcher.launch((1,), (17,), (), 0)
    assert stub.calls() == []


def test_each_launch_gets_its_own_variant(stub):
    dispatcher = dispatcher_of(1)
    for warps, argument in ((1, 16), (2, 17), (3, 2**40), (5, 0.5)):
        kind = {16: "i32", 17: "i32", 2**40: "i64", 0.5: "fp32"}[argument]
        dispatcher.add(dispatcher.key((argument,), ()), kernel_of(kind, warps=warps))
    for argument in (0.25, 2**41, 33, 32):
        assert dispatcher.launch((1,), (argument,), (), 0)
    assert [call.numbers[3] // 32 for call in stub.launches()] == [5, 3, 2, 1]


def test_a_key_has_one_variant():
    dispatcher = dispatcher_of(0)
    dispatcher.add(dispatcher.key((), ()), kernel_of())
    with pytest.raises(ValueError, match="kernel kernel has a variant of this key already"):
        dispatcher.add(dispatcher.key((), ()), kernel_of())


@pytest.mark.parametrize(
    ("argument", "types", "complaint"),
    [
        (5, (), "takes 0 arguments; the key has 1 that are no constants"),
        (None, ("ptr",), "takes 1 arguments; the key has 0"),
        (5, ("ptr",), "takes ptr as argument 0"),
        (5, ("u64",), "takes u64 as argument 0"),
        (5, ("fp32",), "takes fp32 as argument 0"),
        (0.5, ("i32",), "takes i32 as argument 0"),
        (True, ("i32",), "takes i32 as argument 0"),
        (2**63, ("i64",), "takes i64 as argument 0"),
        (Memory(), ("i64",), "takes i64 as argument 0"),
        (Memory(), (layout(),), "takes tensordesc:"),
        (Descriptor(Memory(), [8], [1], [8]), (layout(),), "takes tensordesc:"),
        (Descriptor(Memory(), [8], [1], [8]), ("ptr",), "takes ptr as argument 0"),
    ],
)
def test_a_kernel_of_other_arguments_than_its_key_is_refused(argument, types, complaint):
    dispatcher = dispatcher_of(1)
    with pytest.raises(ValueError, match=f"kernel kernel {complaint}"):
        dispatcher.add(dispatcher.key((argument,), ()), kernel_of(*types))


@pytest.mark.parametrize("key", [b"", b"\x02i", b"\x01?", b"\x01d\x09\x02\x00\x00"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match="no key"):
        dispatcher_of(1).add(key, kernel_of("i32"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"warps": 0}, "has 0 warps; 1 to 32"),
        ({"warps": 33}, "has 33 warps; 1 to 32"),
        ({"arguments": ["i32", "complex"]}, "has an argument of the unknown type complex"),
        ({"arguments": ["i32"] * 255}, "has 257 parameters"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=f"kernel kernel .*{complaint}"):
        kernel_of(**changes)


def test_a_kernel_of_the_most_parameters_is_launched(stub):
    """127 arguments; and descriptors, which become many parameters each."""
    arguments = tuple(range(2, 129))
    assert launched(stub, arguments, ("i32",) * 127).parameters[:127] == [struct.pack("<i", n) for n in arguments]
    stub.reset()
    stub.context()
    sizes = [16, 8, 8, 8, 32]
    descriptor = Descriptor(Memory(), sizes, [16384, 2048, 256, 32, 1], sizes)
    call = launched(stub, (descriptor,) * 12, (layout(block_size=sizes),) * 12)
    assert len(call.parameters) == 12 * 11 + 2 and call.parameters[-3] == struct.pack("<q", 1)


# --- errors


@pytest.mark.parametrize(
    "entry_point",
    [
        "cuCtxGetCurrent",
        "cuCtxGetId",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncGetAttribute",
        "cuCtxGetDevice",
        "cuDeviceGetAttribute",
        "cuFuncSetCacheConfig",
        "cuFuncSetAttribute",
        "cuFuncLoad",
        "cuLaunchKernelEx",
    ],
)
def test_an_error_of_the_driver_names_all_that_the_launch_was(stub, entry_point):
    launch_it = launcher(name="_kernel", warps=8, shared_bytes=100_000, registers=96)
    stub.fail(entry_point, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError) as raised:
        launch_it((3, 2))
    assert str(raised.value) == (
        "kernel _kernel (grid 3x2x1, block 256x1x1, 100000 bytes of shared memory, 96 registers): "
        f"{entry_point}: CUDA_ERROR_OUT_OF_MEMORY (the stub's text)"
    )
    assert launch_it((3, 2)) and stub.launches()[-1].numbers[0] == 3  # nothing is stuck
    assert stub.library.stub_capture_mode() == 0


@pytest.mark.parametrize("entry_point", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_an_error_on_the_way_to_a_context_is_named(stub, entry_point):
    launch_it = launcher()
    stub.reset()
    stub.fail(entry_point, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match=rf"kernel kernel \(grid 1x1x1.*{entry_point}: CUDA_ERROR_OUT_OF_MEMORY"):
        launch_it()
    assert launch_it()


def test_an_error_without_a_name_is_numbered(stub):
    stub.fail("cuLaunchKernelEx", 12345)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: CUDA error 12345$"):
        launcher()()


def test_an_error_that_earlier_work_made_is_said_to_be_so(stub):
    stub.fail("cuLaunchKernelEx", ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS .*; work given to the device before may have"):
        launcher()()


def test_machine_code_of_another_architecture_is_an_error_by_name(stub):
    with pytest.raises(RuntimeError, match="cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launcher(cubin=b"none")()


# --- contexts, threads, processes


def test_a_kernel_is_loaded_once(stub):
    launch_it = launcher()
    assert all(launch_it() for _ in range(3))
    assert len(stub.calls("cuModuleLoadData")) == 1 and len(stub.launches()) == 3


def test_each_context_has_its_own_function(stub):
    launch_it = launcher()
    contexts = [stub.context(place, device=place) for place in range(3)]
    for context in [*contexts, *contexts]:
        stub.library.stub_set_current(context)
        assert launch_it()  # the stub refuses a function of another context
    assert [call.numbers[8] for call in stub.launches()] == [*contexts, *contexts]
    assert len(stub.calls("cuModuleLoadData")) == 3


def test_a_new_context_at_an_old_address_is_not_taken_for_the_old(stub):
    launch_it = launcher()
    old = stub.context(1)
    assert launch_it()
    assert stub.context(1) == old
    assert launch_it()
    assert len(stub.calls("cuModuleLoadData")) == 2


def test_without_a_context_the_primary_one_of_device_0_is_used(stub):
    launch_it = launcher()
    stub.reset()
    assert launch_it() and launch_it()
    found = names(stub.calls("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"))
    assert found == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert stub.calls("cuDevicePrimaryCtxRetain")[0].numbers[0] == 0
    assert stub.library.stub_current() == stub.launches()[0].numbers[8] != 0


def test_without_a_context_a_streams_own_is_used(stub):
    launch_it = launcher()
    context = stub.context(2, device=2)
    stub.library.stub_set_current(0)
    stream = ctypes.c_uint64(context)  # the stub's streams hold their context
    assert launch_it(stream=ctypes.addressof(stream))
    assert stub.launches()[0].numbers[8] == context and stub.calls("cuDevicePrimaryCtxRetain") == []


def test_threads_that_launch_together_load_once_and_others_run_at_the_same_time(stub):
    launch_it = launcher()
    context = stub.library.stub_current()
    stub.set("hold_loads", 1)
    loading, failures = threading.Barrier(9), []

    def launching():
        stub.library.stub_set_current(context)
        loading.wait()
        for _ in range(20):
            try:
                assert launch_it()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=launching) for _ in range(8)]
    for thread in threads:
        thread.start()
    loading.wait()
    while not stub.calls("cuModuleLoadData"):
        time.sleep(0.001)
    assert stub.launches() == [], "the load is under way: this thread goes on all the same"
    stub.set("hold_loads", 0)
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(stub.calls("cuModuleLoadData")) == 1 and len(stub.launches()) == 160


FORKING = """
import os, sys
sys.path.insert(0, sys.argv[2])
os.environ["WEFT_CUDA_DRIVER"] = sys.argv[1]
import stub
from weft import _C
driver = stub.Stub(sys.argv[1])
dispatcher = _C.launch.Dispatcher("kernel", [], [])
image = stub.image("kernel", [])
kernel = _C.launch.Kernel("kernel", image, [], 0, 4, 40)
dispatcher.add(dispatcher.key((), ()), kernel)
launch = lambda: dispatcher.launch((1,), (), (), 0)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print("child:", error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def forked(library, text):
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKING + text, library, FOLDER], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_process_may_fork_before_it_uses_cuda(library):
    """Also where it has looked for the driver: parent and child then each use it."""
    text = 'assert _C.launch.driver()["found"]; assert in_child(launch) == 0; assert launch(); print("both")'
    assert forked(library, text) == "both\n"


def test_a_child_that_does_not_touch_cuda_is_fine(library):
    assert (
        forked(library, 'launch(); assert in_child(lambda: _C.launch.driver()) == 0; launch(); print("fine")')
        == "fine\n"
    )


def test_a_child_of_a_process_that_used_cuda_learns_why_it_cannot(library):
    output = forked(library, "launch(); assert in_child(launch) == 1; launch()")
    assert "child: kernel kernel (grid 1x1x1" in output and "CUDA_ERROR_NOT_INITIALIZED" in output
    assert "this process was forked from one that had used CUDA, and cannot use it: start it by spawn" in output


# --- stream capture


def test_a_launch_makes_only_calls_that_capture_allows(stub):
    launch_it = launcher((Descriptor(Memory(), [128, 64], [64, 1], [64, 32]),), (layout(),))
    launch_it()
    before = len(stub.calls())
    stub.set("capturing", 1)
    assert launch_it()
    assert names(stub.calls()[before:]) == [
        "cuCtxGetCurrent",
        "cuCtxGetId",
        "cuTensorMapEncodeTiled",
        "cuLaunchKernelEx",
    ]


def test_a_first_launch_under_capture_loads_in_the_relaxed_mode(stub):
    stub.set("capturing", 1)  # the stub forbids loading now, unless the thread says that it is safe
    assert launcher(shared_bytes=100_000)()
    modes = stub.calls("cuThreadExchangeStreamCaptureMode")
    assert [call.numbers[0] for call in modes] == [RELAXED, 0]
    assert stub.library.stub_capture_mode() == 0
    order = names(stub.calls())
    assert order.index("cuFuncLoad") < len(order) - 1 == order.index("cuLaunchKernelEx")
