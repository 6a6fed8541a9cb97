"""Kernels compiled ahead of time: their archives, which launch takes which variant, and what is refused."""

import ast
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import _C
from weft.kernels import archive, dispatch, language, launch, signature, without_triton
from weft.kernels.archive import Archive, ArchiveError, Machine
from weft.kernels.attention import attention_forward
from weft.kernels.attention_rules import Rules

HERE = Path(__file__).parent
STUB = HERE.parent / "stub_driver"
OPS = ("signal", "bucket")  # small ones


def compiling(*command, **environment):
    """Runs Python where kernels are not interpreted."""
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "WEFT_NO_JIT")}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=HERE, env={**clean, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(out, cache, *options, **environment):
    if not archive.launches_as(triton.__version__):
        pytest.skip(f"compiling ahead of time wants triton {archive.TRITON}, and here is {triton.__version__}")
    return compiling("-m", "weft.kernels.aot", "--out", out, "--cache", cache, *options, **environment)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def built(tmp_path_factory, cache):
    """A folder with an archive of the small ops for sm_90."""
    folder = tmp_path_factory.mktemp("compiled")
    build(folder, cache, "--op", *OPS, "--architecture", "sm_90")
    return folder


# What is built


@pytest.mark.slow("kernels")
def test_the_same_sources_give_the_same_bytes(tmp_path):
    for number in ("1", "2"):
        build(tmp_path / number, tmp_path / f"cache{number}", "--op", "signal", PYTHONHASHSEED=number)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(f"{architecture}.weft" for architecture in launch.ARCHITECTURES)
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


ADDRESSES = """
import subprocess
from weft.kernels import machine_code
maps = lambda: subprocess.run(["cat", "/proc/self/maps"], check=True, capture_output=True).stdout
assert maps() != maps()
print(machine_code.fix_addresses() and maps() == maps())
"""


@pytest.mark.slow("kernels")
def test_the_assembler_finds_the_same_addresses_every_time():
    """It decides by them which registers it names."""
    assert compiling("-c", ADDRESSES) == "True\n"


PRODUCT = """
import hashlib, sys
from pathlib import Path
from weft.kernels import aot, variants
products = variants.record("matmul", "sm_100")
number = next(i for i, one in enumerate(products) if one.constants.get("STORE_DESCRIPTOR"))
digests = {hashlib.sha256(aot._compile(Path(sys.argv[1]) / str(i), "matmul", "sm_100", number)[0].cubin).digest() for i in range(5)}
print(len(digests))
"""


@pytest.mark.slow("kernels")
def test_a_product_is_the_same_bytes_every_time(tmp_path):
    """For sm_100, where the assembler wavers most."""
    assert compiling("-c", PRODUCT, tmp_path) == "1\n"


@pytest.mark.slow("kernels")
def test_what_has_not_changed_is_not_compiled_again(tmp_path, cache, built):
    stored = Archive(built / "sm_90.weft")
    count = len(stored.variants)
    said = build(tmp_path, cache, "--op", *OPS, "--architecture", "sm_90", PYTHONHASHSEED="7")
    assert f"{count} variants of {len(stored.sources)} kernels, 0 compiled and {count} unchanged" in said
    assert (tmp_path / "sm_90.weft").read_bytes() == (built / "sm_90.weft").read_bytes()
    (machine, *_) = cache.glob("*.cubin")
    machine.unlink()
    said = build(tmp_path, cache, "--op", *OPS, "--architecture", "sm_90")
    assert f"1 compiled and {count - 1} unchanged" in said


CHANGES = """
from weft.kernels import machine_code, signal, variants
first, second = (variants.record("signal", "sm_90")[0] for _ in range(2))
before = machine_code._cache_key(first, "sm_90")
assert machine_code._cache_key(second, "sm_90") == before
assert machine_code._cache_key(first, "sm_100") != before
first.kernel._unsafe_update_src(first.kernel.src + "\\n    pass")
assert machine_code._cache_key(first, "sm_90") != before
print("done")
"""


MOVES = """
import sys
from weft.kernels import machine_code, signal, variants
signal._meet_kernel.starting_line_number += int(sys.argv[1])
print(machine_code._cache_key(variants.record("signal", "sm_90")[0], "sm_90"))
"""


@pytest.mark.slow("kernels")
def test_a_kernel_that_moved_in_its_file_has_not_changed():
    assert compiling("-c", MOVES, 0) == compiling("-c", MOVES, 7)


@pytest.mark.slow("kernels")
def test_what_has_changed_is_looked_for_anew():
    assert compiling("-c", CHANGES) == "done\n"


def test_a_manifest_names_the_sources_that_are_here(built):
    stored = Archive(built / "sm_90.weft")
    assert "weft.kernels.bucket._reduce_kernel" in stored.sources
    for kernel, recorded in stored.sources.items():
        archive.source_hash.cache_clear()
        assert archive.source_hash(kernel.rpartition(".")[0]) == recorded
        assert stored.drift(kernel) is None
    assert stored.drift("a_script.its_kernel") == "sm_90.weft holds no a_script.its_kernel"


def imports_by_parsing(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("weft.kernels."))
        elif isinstance(node, ast.ImportFrom) and node.module == "weft.kernels":
            yield from (f"weft.kernels.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("weft.kernels."):
            yield node.module


@pytest.mark.parametrize("path", sorted(archive.SOURCES.glob("*.py")), ids=lambda path: path.stem)
def test_imports_are_found_as_a_parser_finds_them(path):
    assert archive.imports(path.read_text()) == set(imports_by_parsing(path))


def test_imports_of_every_form_are_found():
    text = "from weft.kernels import (  # both\n    a,\n    b as c,\n)\nfrom weft.kernels.d import e\nimport weft.kernels.f\n"
    text += "def g():\n    from weft.kernels import h, i  # late\n"
    assert archive.imports(text) == {f"weft.kernels.{name}" for name in "abdfhi"}


def test_the_hash_of_a_source_is_of_all_that_it_imports_and_of_nothing_else(tmp_path):
    for path in archive.SOURCES.glob("*.py"):
        shutil.copy(path, tmp_path)
    hashes = [archive.source_hash("weft.kernels.attention", tmp_path)]
    assert hashes[0] == archive.source_hash("weft.kernels.attention")
    for name in ("attention", "attention_scores", "launch"):
        (tmp_path / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text() + "\n")
        archive.source_hash.cache_clear()
        hashes.append(archive.source_hash("weft.kernels.attention", tmp_path))
    assert len(set(hashes)) == 4
    (tmp_path / "bucket.py").write_text("")
    archive.source_hash.cache_clear()
    assert archive.source_hash("weft.kernels.attention", tmp_path) == hashes[-1]


# The parameters of the machine code, as the machine code itself lists them, beside those that a launch passes.
PARAMETERS = """
import json, re, sys
from pathlib import Path
from weft.kernels import archive, machine_code, variants
SIZES = {"ptr": 8, "i32": 4, "i64": 8, "fp32": 4}

def passed(arguments):
    for one in arguments:
        rank = len(json.loads(one.partition(":")[2])["block_size"]) if ":" in one else 0
        yield from [128, *[4] * rank, *[8] * rank] if rank else [SIZES[one]]
    yield from (8, 8)  # hidden memory

def taken(cubin):
    text = machine_code.disassembled(cubin, "cuobjdump", "-elf")
    pairs = re.findall(r"Ordinal\\s*:\\s*0x(\\w+)\\s+Offset\\s*:\\s*0x\\w+\\s+Size\\s*:\\s*0x(\\w+)", text)
    return [int(size, 16) for _, size in sorted({(int(place, 16), size) for place, size in pairs})]

stored = archive.Archive(Path(sys.argv[1]))
machines = {variant.kernel: stored.machine(variant) for variant in stored.variants}
products = variants.record("matmul", "sm_90")
number = next(i for i, one in enumerate(products) if one.constants.get("DESCRIPTORS"))
machines["a product with descriptors"] = machine_code.compile_launch(products[number], "sm_90").machine
assert any(one.startswith("tensordesc:") for one in machines["a product with descriptors"].arguments)
for name, machine in machines.items():
    assert taken(machine.cubin) == list(passed(machine.arguments)), name
    assert str(archive.SOURCES).encode() not in machine.cubin and b".py" not in machine.cubin, name
    assert 0 < machine.registers <= 255 and machine.warps in (1, 2, 4, 8, 16), name
print(len(machines))
"""


def test_a_launch_passes_the_parameters_that_the_machine_code_takes(built):
    kernels = len(Archive(built / "sm_90.weft").sources)
    assert compiling("-c", PARAMETERS, built / "sm_90.weft") == f"{kernels + 1}\n"


@pytest.mark.slow("kernels")
def test_nothing_is_compiled_for_the_interpreter():
    command = [sys.executable, "-m", "weft.kernels.aot"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 2 and "unset it" in done.stderr


UNSERVED = """
from weft.kernels import machine_code, variants
assemble = machine_code.assemble
(recorded, *_) = variants.record("signal", "sm_80")
built, _ = assemble(recorded, "sm_80")
for name, value in dict(num_ctas=2, launch_cooperative_grid=True, launch_pdl=True, global_scratch_size=128).items():
    built.metadata, plain = built.metadata._replace(**{name: value}), built.metadata
    machine_code.assemble = lambda *_: (built, [])
    try:
        machine_code.compile_launch(recorded, "sm_80")
    except RuntimeError as error:
        print(error)
    built.metadata = plain
"""


def test_a_variant_that_needs_what_no_launch_gives_is_refused_by_name():
    said = compiling("-c", UNSERVED).splitlines()
    needs = ("'num_ctas': 2", "'launch_cooperative_grid': True", "'launch_pdl': True", "'global_scratch_size': 128")
    assert said == [
        f"kernel _meet_kernel was compiled with {{{need}}}, which weft's launcher does not serve" for need in needs
    ]


# Triton's rules

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
KERNEL = SimpleNamespace(
    arg_names=["x", "y"],
    params=[
        SimpleNamespace(name="x", do_not_specialize=False),
        SimpleNamespace(name="y", do_not_specialize=True),
    ],
)


def check_specialised_as_triton_does(value):
    recorded = launch.Launch(KERNEL, (1,), (value, value), {}, 4, 1)
    types, constants, attributes = signature.specialise(recorded)
    for place, (name, special) in enumerate((("x", True), ("y", False))):
        kind, known = native_specialize_impl(BACKEND, value, False, special, True)
        assert types[name].replace(",", ", ") == kind
        assert (name in constants) == (kind == "constexpr")
        assert ((place,) in attributes) == (known == "D")


@settings(deadline=None)  # the first example waits for Triton
@given(st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-40, 40), st.booleans(), st.floats(width=32)))
def test_numbers_are_specialised_as_triton_does(value):
    check_specialised_as_triton_does(value)


@pytest.mark.parametrize("dtype", signature._ELEMENT_TYPES, ids=str)
def test_memory_is_specialised_as_triton_does(dtype):
    tensor = torch.zeros(64, 64, dtype=dtype)
    check_specialised_as_triton_does(tensor)
    check_specialised_as_triton_does(tensor[0, 1:])
    check_specialised_as_triton_does(TensorDescriptor.from_tensor(tensor, [16, 32]))
    check_specialised_as_triton_does(None)


# Which launch takes what


class Launcher:
    """In the place of weft._C.launch: its keys, and a record of what was loaded and launched."""

    def __init__(self):
        self.loaded, self.launched = [], []

    def Kernel(self, *description):  # noqa: N802, as the extension has it
        self.loaded.append(description)
        return description

    def Dispatcher(self, name, parameters, unspecialised):  # noqa: N802
        real, variants = _C.launch.Dispatcher(name, parameters, unspecialised), {}

        def launched(grid, arguments, constants, stream):
            found = variants.get(real.key(arguments, constants))
            if found is not None:
                self.launched.append((found[0], grid, arguments, dict(constants), stream))
            return found is not None

        return SimpleNamespace(key=real.key, add=variants.__setitem__, launch=launched)


class Function(without_triton.Function):
    """A jit function that says what Triton was to run."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.run.append((grid, arguments, options))


def scale(x, n, rank, BLOCK):  # noqa: N803
    pass


MACHINE = Machine("scale", ("ptr", "i32", "i32"), 0, 4, 32, b"machine code" * 100)
STREAM = 77


@pytest.fixture
def kernel():
    function = Function(scale, ["rank"])
    function.__module__ = "weft.kernels.signal"
    function.run = []
    return function


@pytest.fixture
def x():
    return torch.zeros(32, dtype=torch.bfloat16)


@pytest.fixture
def launcher():
    yield Launcher()
    dispatch.use(_C.launch)


@pytest.fixture
def folder(kernel, x, launcher, tmp_path):
    """With an archive of one variant: of a BLOCK of 16, for an n that 16 divides."""
    dispatch.use(launcher, tmp_path)
    key = dispatch.dispatcher(kernel).key((x, 32, 0), (("BLOCK", 16), ("warps", 4), ("stages", 1)))
    archive.write(
        tmp_path / "sm_90.weft", "sm_90", "3.7.1", "13.1", [(dispatch.full_name(kernel), key, "bf16 16 4w 1s", MACHINE)]
    )
    return tmp_path


@pytest.fixture(autouse=True)
def hopper(request, monkeypatch):
    """CPU tensors pass for tensors on a device of compute capability 9.0."""
    if "folder" not in request.fixturenames:
        return
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_device_index", lambda arguments: 0)
    monkeypatch.setattr(launch, "_code_architecture", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.delenv("WEFT_NO_JIT", raising=False)


def test_a_launch_takes_the_compiled_variant(kernel, x, launcher, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (32, 64):
            launch.launch(kernel, [3, 2], x, n, 1, BLOCK=16)
    constants = {"BLOCK": 16, "warps": 4, "stages": 1}
    assert launcher.launched == [("scale", (3, 2), (x, n, 1), constants, STREAM) for n in (32, 64)]
    assert not kernel.run
    (loaded,) = launcher.loaded  # at the first launch, and not again
    assert loaded == ("scale", MACHINE.cubin, ["ptr", "i32", "i32"], 0, 4, 32)
    assert launch.origin(launch.Launch(kernel, (1,), (x, 32, 0), {"BLOCK": 16}, 4, 1), "sm_90").how == "ahead-of-time"


def test_an_empty_grid_and_a_recording_launch_nothing(kernel, x, launcher, folder):
    launch.launch(kernel, (0,), x, 32, 0, BLOCK=16)
    with launch.recording("sm_90") as launches:
        launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    assert len(launches) == 1 and not launcher.launched and not kernel.run


def test_in_the_interpreter_no_compiled_kernel_is_looked_for(kernel, x, launcher, folder, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    assert len(kernel.run) == 1 and not launcher.launched
    assert launch.origin(launch.Launch(kernel, (1,), (x, 32, 0), {"BLOCK": 16}, 4, 1), "sm_90").how == "interpreter"


@pytest.mark.parametrize(
    ("n", "options"),
    [(33, {}), (1, {}), (2**31, {}), (32, {"BLOCK": 32}), (32, {"warps": 8}), (32, {"stages": 2})],
)
def test_another_variant_is_compiled_by_triton_which_is_said_once(kernel, x, launcher, folder, n, options):
    options = {"BLOCK": 16, **options}
    with pytest.warns(UserWarning, match=r"weft\.kernels\.signal\.scale \(bf16 .*sm_90\.weft has 1 variants") as said:
        launch.launch(kernel, (1,), x, n, 0, **options)
        launch.launch(kernel, (1,), x, n, 0, **options)
    assert len(said) == 1 and not launcher.launched
    grid, arguments, given_options = kernel.run[1]
    assert (grid, arguments) == ((1,), (x, n, 0))
    assert given_options == {
        "BLOCK": options["BLOCK"],
        "num_warps": options.get("warps", 4),
        "num_stages": options.get("stages", 1),
        "enable_fp_fusion": True,
    }
    recorded = launch.Launch(kernel, (1,), (x, n, 0), {"BLOCK": 16}, 4, 7)
    assert launch.origin(recorded, "sm_90") == launch.Origin("jit", dispatch.find(kernel, "sm_90").lacks())


def test_nothing_is_compiled_where_that_is_forbidden(kernel, x, launcher, folder, monkeypatch):
    with pytest.warns(UserWarning):
        launch.launch(kernel, (1,), x, 33, 0, BLOCK=16)
    monkeypatch.setenv("WEFT_NO_JIT", "1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"signal\.scale \(bf16 16 4w 1s\) cannot be launched.*WEFT_NO_JIT=1"):
            launch.launch(kernel, (1,), x, 33, 0, BLOCK=16)
    assert len(kernel.run) == 1
    origin = launch.origin(launch.Launch(kernel, (1,), (x, 33, 0), {"BLOCK": 16}, 4, 1), "sm_90")
    assert origin.how == "nowhere" and "WEFT_NO_JIT=1" in origin.why
    launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    assert len(launcher.launched) == 1


def test_without_triton_what_is_not_compiled_is_an_error(kernel, x, launcher, folder, monkeypatch):
    monkeypatch.setattr(language, "VERSION", None)
    launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"signal\.scale \(.*triton, which would compile it, is not installed"):
            launch.launch(kernel, (1,), x, 33, 0, BLOCK=16)
    assert len(launcher.launched) == 1 and not kernel.run


# What is refused


def rewritten(path, **changes):
    """The archive with another manifest."""
    head = len(archive._MAGIC) + archive._LENGTH_BYTES
    content = path.read_bytes()
    length = int.from_bytes(content[len(archive._MAGIC) : head], "little")
    manifest = json.loads(archive.zlib.decompress(content[head : head + length]))
    packed = archive.zlib.compress(json.dumps({**manifest, **changes}).encode())
    length_bytes = len(packed).to_bytes(archive._LENGTH_BYTES, "little")
    path.write_bytes(archive._MAGIC + length_bytes + packed + content[head + length :])


def refused(kernel, x, launcher, why):
    with pytest.warns(UserWarning, match=why):
        launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    assert not launcher.launched and len(kernel.run) == 1


def test_a_kernel_of_other_sources_is_refused_by_name(kernel, x, launcher, folder):
    rewritten(folder / "sm_90.weft", sources={dispatch.full_name(kernel): "0" * 64})
    refused(kernel, x, launcher, r"sm_90\.weft holds weft\.kernels\.signal\.scale as compiled from other sources")


def test_a_kernel_that_another_triton_compiled_is_refused_by_name(kernel, x, launcher, folder):
    rewritten(folder / "sm_90.weft", triton="3.9.0")
    refused(kernel, x, launcher, r"sm_90\.weft was compiled by triton 3\.9\.0; this weft launches what triton 3\.7")


def test_a_kernel_that_is_not_in_the_archive_is_named(kernel, x, launcher, folder):
    rewritten(folder / "sm_90.weft", sources={})
    refused(kernel, x, launcher, r"sm_90\.weft holds no weft\.kernels\.signal\.scale")


def test_where_there_is_no_archive_it_says_how_to_build_one(kernel, x, launcher, folder):
    (folder / "sm_90.weft").unlink()
    refused(kernel, x, launcher, "no compiled kernels for sm_90.*python -m weft.kernels.aot")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: b"", "is no archive of compiled kernels"),
        (lambda content: b"some other file" * 10, "is no archive of compiled kernels"),
        (lambda content: content[:60], r"sm_90\.weft is damaged"),
    ],
)
def test_a_file_that_is_no_archive_is_refused_by_name(kernel, x, launcher, folder, damage, why):
    path = folder / "sm_90.weft"
    path.write_bytes(damage(path.read_bytes()))
    refused(kernel, x, launcher, why)


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-5] + bytes(5)])
def test_damaged_machine_code_is_never_launched(kernel, x, launcher, folder, damage):
    path = folder / "sm_90.weft"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArchiveError, match=r"damaged where weft\.kernels\.signal\.scale \(bf16 16 4w 1s\) is"):
        launch.launch(kernel, (1,), x, 32, 0, BLOCK=16)
    assert not launcher.loaded and not kernel.run


def test_the_same_machine_code_is_stored_once_and_read_back_whole(tmp_path):
    other = replace(MACHINE, cubin=b"other", arguments=('tensordesc:{"swizzle": 3}',))
    variants = [("weft.kernels.signal.f", bytes([i]), f"f{i}", other if i == 2 else MACHINE) for i in range(4)]
    archive.write(tmp_path / "a.weft", "sm_90", "3.7.1", "13.1", variants)
    archive.write(tmp_path / "b.weft", "sm_90", "3.7.1", "13.1", reversed(variants))
    assert (tmp_path / "a.weft").read_bytes() == (tmp_path / "b.weft").read_bytes()
    stored = Archive(tmp_path / "a.weft")
    found = stored.of_kernel("weft.kernels.signal.f")
    assert {key: stored.machine(one) for key, one in found.items()} == {key: one for _, key, _, one in variants}
    assert len({variant.offset for variant in stored.variants}) == 2


@pytest.mark.parametrize(
    ("capability", "code", "tiles"),
    [
        ((8, 0), "sm_80", "sm_80"),
        ((8, 6), "sm_80", "sm_80"),
        ((8, 7), "sm_87", "sm_80"),
        ((8, 9), "sm_80", "sm_80"),
        ((9, 0), "sm_90", "sm_90"),
        ((10, 0), "sm_100", "sm_100"),
        ((10, 3), "sm_103", "sm_100"),
        ((11, 0), "sm_110", "sm_100"),
        ((12, 0), "sm_120", "sm_120"),
        ((12, 1), "sm_120", "sm_120"),
    ],
)
def test_a_device_takes_the_code_and_the_tiles_that_it_can_run(monkeypatch, capability, code, tiles):
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(launch, "_properties", lambda index: properties)
    for cached in (launch._code_architecture, launch._family):
        cached.cache_clear()
    assert launch.code_architecture(torch.device("cuda:0")) == code
    assert launch.architecture_of(torch.device("cuda:0")) == tiles
    for cached in (launch._code_architecture, launch._family):
        cached.cache_clear()


@pytest.mark.parametrize(("allowed_bytes", "is_large"), [(163 * 1024, True), (99 * 1024, False)])
def test_a_device_with_little_shared_memory_takes_a_smaller_tile_of_wide_heads(monkeypatch, allowed_bytes, is_large):
    properties = SimpleNamespace(major=8, minor=0, shared_memory_per_block_optin=allowed_bytes)
    monkeypatch.setattr(launch, "_properties", lambda index: properties)
    launch._family.cache_clear()
    assert launch.has_large_shared_memory(torch.device("cuda:0")) == is_large
    launch._family.cache_clear()
    monkeypatch.setattr(launch, "has_large_shared_memory", lambda device: is_large)
    wide, narrow = (torch.empty(1, 2, 512, size, dtype=torch.bfloat16, device="meta") for size in (256, 128))
    with launch.recording("sm_80") as launches:
        attention_forward(wide, wide, wide, Rules())
        attention_forward(wide, wide, narrow, Rules())
    tiles = [recorded.constants["BLOCK_N"] for recorded in launches]
    assert tiles == [64 if is_large else 32, 64]


# All of it together

WITHOUT_TRITON = """
import importlib, pkgutil, sys
from pathlib import Path
sys.modules["triton"] = None
import weft.kernels
for module in pkgutil.iter_modules(weft.kernels.__path__):
    if module.name not in ("aot", "machine_code"):  # they are what compiles
        importlib.import_module(f"weft.kernels.{module.name}")
from weft import _C
from weft.kernels import launch, variants
launch.use(_C.launch, Path(sys.argv[1]))
for op in variants.OPS:
    for recorded in variants.record(op, "sm_90"):
        origin = launch.origin(recorded, "sm_90")
        module = recorded.kernel.__module__.rpartition(".")[2]
        assert origin.how == ("ahead-of-time" if module in sys.argv[2:] else "nowhere"), (module, origin)
        assert origin.how == "ahead-of-time" or "triton, which would compile it, is not installed" in origin.why
    for architecture in ("sm_80", "sm_100"):
        assert {launch.origin(one, architecture).how for one in variants.record(op, architecture)} == {"nowhere"}
print(sum(len(variants.record(op, architecture)) for op in variants.OPS for architecture in launch.ARCHITECTURES))
"""


def test_without_triton_launches_are_prepared_alike_and_find_their_variants(built):
    """The keys were made with Triton's own objects."""
    with_triton = (
        "from weft.kernels import launch, variants\nprint(len(variants.places(variants.OPS, launch.ARCHITECTURES)))"
    )
    assert compiling("-c", WITHOUT_TRITON, built, *OPS) == compiling("-c", with_triton)


LAUNCHES = """
import struct, sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[2])
sys.modules["triton"] = None
import torch, stub
from weft import _C
from weft.kernels import bucket, launch
driver = stub.Stub(Path(sys.argv[3]))
driver.context()
SIZES = {"ptr": 8, "i32": 4, "fp32": 4}

def loadable(name, cubin, arguments, *rest):  # the stub loads no machine code
    assert cubin.startswith(b"\\x7fELF")
    return _C.launch.Kernel(name, stub.image(name, [SIZES[one] for one in arguments]), arguments, *rest)

launch.use(types.SimpleNamespace(Dispatcher=_C.launch.Dispatcher, Kernel=loadable), Path(sys.argv[1]))
# CPU tensors pass for a device's.
launch._device_index = lambda arguments: 0
launch._code_architecture = lambda index: "sm_90"
launch.check_memory = lambda op, **tensors: next(iter(tensors.values())).device
torch.cuda.current_device = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda index: 4242
buffers = [torch.zeros(8192, dtype=torch.bfloat16) for _ in range(2)]
out = torch.zeros(8192, dtype=torch.bfloat16)
for _ in range(2):
    bucket.reduce(buffers, out, scale=0.5)
for call in driver.launches():
    pointer, size, count, scale = call.parameters[1:5]
    assert pointer == out.data_ptr().to_bytes(8, "little") and size == (8192).to_bytes(4, "little")
    assert count == (2).to_bytes(4, "little") and scale == struct.pack("<f", 0.5)
print(len(driver.launches()), len(driver.calls("cuModuleLoadData")))
"""


COMMUNICATING = """
import sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[2])
sys.modules["triton"] = None
import torch, stub
from weft import _C
from weft.kernels import archive, dispatch, launch, signature, variants
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.all_reduce import matmul_all_reduce
from weft.kernels.chunks import Rows
from weft.kernels.matmul_reduce_scatter import Inbox, matmul_reduce_scatter
from weft.ops.overlap.peer_copies import start_gathering, window_bytes
from weft.ops.overlap.workspace import peers_of
driver = stub.Stub(Path(sys.argv[3]))
driver.context()

def compiled(recorded):  # what the stub takes for machine code
    arguments, constants, _ = signature.specialise(recorded)
    arguments = ["ptr" if arguments[name][0] == "*" else arguments[name] for name in arguments if name not in constants]
    name = recorded.kernel.__name__
    image = stub.image(name, [{"ptr": 8, "i64": 8, "i32": 4}[one] for one in arguments])
    key = dispatch.dispatcher(recorded.kernel).key(recorded.arguments, recorded.key_constants)
    machine = archive.Machine(name, tuple(arguments), 0, recorded.warps, 0, image)
    return dispatch.full_name(recorded.kernel), key, str(recorded), machine

entries = {entry[:2]: entry for entry in map(compiled, variants.communicating("sm_80"))}
archive.write(Path(sys.argv[1]) / "sm_80.weft", "sm_80", archive.TRITON, "", entries.values())
launch.use(_C.launch, Path(sys.argv[1]))
# CPU tensors pass for a device's.
launch._device_index = lambda arguments: 0
launch._code_architecture = launch._family = lambda index: "sm_80"
launch.architecture_of = lambda device: "sm_80"
launch.check_memory = lambda op, **tensors: next(iter(tensors.values())).device
torch.cuda.current_device = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda index: 4242
if sys.argv[4] == "late":
    launch.load = lambda *_: None

m, n, k = 4096, 2048, 1024
x, w = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
rows = Rows.of((m, n), 0, (m // 2, m // 2))
windows = [torch.zeros(Inbox(rows, n, x.dtype).window_bytes(sums=True), dtype=torch.uint8) for _ in range(2)]
window = types.SimpleNamespace(rank=0, mine=windows[0], addresses=tuple(one.data_ptr() for one in windows))
peers = peers_of(window, types.SimpleNamespace(memory=torch.zeros(16, dtype=torch.int64), timeout_s=1.0))
gathering = start_gathering(peers, x[: m // 2], 0, (m // 2, m // 2))
all_gather_matmul(gathering.whole, w.t(), gathering.arrivals)
gathering.finish()
matmul_reduce_scatter(x, w.t(), peers, rows)
matmul_all_reduce(x, w.t(), peers, rows)
names = [call.name for call in driver.calls("cuModuleLoadData", "cuLaunchKernelEx")]
print(names.count("cuLaunchKernelEx"), "cuModuleLoadData" in names[names.index("cuLaunchKernelEx"):])
"""


@pytest.fixture
def stub_library(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the stub driver with")
    code = "import sys, pathlib, stub; print(stub.build(pathlib.Path(sys.argv[1])))"
    return compiling("-c", code, tmp_path, PYTHONPATH=str(STUB)).strip()


@pytest.mark.parametrize("loaded", [pytest.param("ahead", marks=pytest.mark.slow("kernels")), "late"])
def test_no_kernel_is_loaded_once_one_waits_for_other_ranks(stub_library, tmp_path, loaded):
    """A load may wait for a kernel that runs; where nothing was loaded ahead, the test sees it."""
    arguments = ("-c", COMMUNICATING, tmp_path, STUB, stub_library, loaded)
    assert compiling(*arguments, WEFT_CUDA_DRIVER=stub_library) == f"12 {loaded == 'late'}\n"


def test_a_kernel_is_launched_without_triton(built, stub_library):
    """From the public launcher to the driver, which here is a stub that records."""
    assert compiling("-c", LAUNCHES, built, STUB, stub_library, WEFT_CUDA_DRIVER=stub_library) == "2 1\n"


@pytest.mark.gpu
def test_a_compiled_kernel_gives_the_bits_that_triton_gives(tmp_path):
    """The first run compiles through Triton, the second may not."""
    code = """
import sys
from pathlib import Path
import torch
from weft import _C
from weft.kernels import bucket, launch
launch.use(_C.launch, Path(sys.argv[1]))
torch.manual_seed(0)
buffers = [torch.randn(8192, device="cuda").bfloat16() for _ in range(2)]
out = torch.empty_like(buffers[0])
bucket.reduce(buffers, out, scale=0.5)
print(out.view(torch.int16).tolist(), launch.code_architecture(out.device))
"""
    script = tmp_path / "reduce.py"
    script.write_text(code)
    by_triton, _, architecture = compiling("-W", "ignore", script, tmp_path).strip().rpartition(" ")
    if architecture not in launch.ARCHITECTURES:
        pytest.skip(f"nothing is compiled ahead of time for {architecture}")
    build(tmp_path, tmp_path / "cache", "--op", "bucket", "--architecture", architecture)
    ahead = compiling("-W", "error", script, tmp_path, WEFT_NO_JIT="1").strip()
    assert ahead == f"{by_triton} {architecture}"
