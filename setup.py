"""Build of weft._C with ninja, and the mapping of the repository's folders to the package `weft`.

The extension uses raw pointers only, so its build needs neither torch nor torch's headers. CUDA sources are compiled if
nvcc is on the PATH or in CUDA_HOME. `WEFT_CUDA=0` leaves them out; `WEFT_CUDA=1` fails without nvcc.

`WEFT_GLIBC=2.28` builds an extension that runs with that version of the C library and any later one, independent of
this machine's version. Wheels for other machines are built with it.

Triton kernels are not compiled here. `python -m weft.kernels.aot` writes them to archives in kernels/compiled. The
build includes an archive if the sources of its kernels are unchanged.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
FOLDERS = {"weft": "pytorch_ext", "weft.kernels": "kernels", "weft.bench": "bench"}
CXX = os.environ.get("CXX", "g++")
GLIBC = os.environ.get("WEFT_GLIBC")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# Each code also runs on later devices of its major version: sm_100 on sm_103. That of sm_100a would not. The PTX serves
# every later device, multimem included.
# WEFT_CUDA_CODES names others, for one device.
CUDA_CODES = os.environ.get("WEFT_CUDA_CODES", "sm_80 sm_90 sm_100 compute_90").split()
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
INSTRUCTION_SETS = {
    "reduce_avx2": "-mavx2",
    "reduce_avx512": AVX512,
    "product_avx2": "-mavx2 -mfma",
    "product_avx512": f"{AVX512} -mfma",
    "product_avx512_bf16": f"{AVX512} -mfma -mavx512bf16",
}
# pybind11's headers and inline functions take five seconds in each translation unit. So the sources that include it are
# compiled in two, as long as each other, and what CUDA changes is in one.
TOGETHER = {
    "python_of_ranks": ("csrc/shm/methods.cpp", "csrc/shm/module.cpp"),
    "python": (
        "csrc/bindings.cpp",
        "csrc/build.cpp",
        "csrc/cuda/copies.cpp",
        "csrc/cuda/module.cpp",
        "csrc/matmul/module.cpp",
        *sorted(f"csrc/launch/{path.name}" for path in (ROOT / "csrc" / "launch").glob("*.cpp")),
    ),
}
# Libraries in which glibc had these functions before 2.34, which moved them into libc.
FORMER_LIBRARIES = {
    "libpthread.so.0": ("libc.so.6", ("pthread_", "sem_")),
    "libdl.so.2": ("libc.so.6", ("dl",)),
    "librt.so.1": ("libc.so.6", ("shm_",)),
    "libm.so.6": ("libm.so.6", ("",)),
}


def packages():
    found = []
    for package, folder in FOLDERS.items():
        links = [path.name for path in (ROOT / folder).iterdir() if path.is_symlink()]  # for static tools
        inside = find_packages(ROOT / folder, exclude=[pattern for name in links for pattern in (name, f"{name}.*")])
        found += [package, *(f"{package}.{name}" for name in inside)]
    return found


def compiled_kernels():
    """Return the names of the archives to include, and a report about them."""
    spec = importlib.util.spec_from_file_location("archive", ROOT / "kernels" / "archive.py")
    archive = sys.modules["archive"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up there
    spec.loader.exec_module(archive)
    included, report = [], []
    for path in sorted(archive.COMPILED.glob("*.weft")):
        try:
            stored = archive.Archive(path)
            fault = next(filter(None, map(stored.drift, stored.sources)), None)
        except archive.ArchiveError as error:
            fault = error
        if fault:
            report.append(f"weft: left out the compiled kernels of {path.stem}: {fault}")
        else:
            included.append(path)
    if included:
        report.append(f"weft: with the compiled kernels of {', '.join(path.stem for path in included)}")
    else:
        report.append(f"weft: no compiled kernels are included; {archive.HOW_TO_BUILD}")
    return [path.name for path in included], "\n".join(report)


def output(command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_nvcc():
    wanted, home = os.environ.get("WEFT_CUDA", "auto"), os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if wanted == "0":
        return None
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if wanted == "1" and nvcc is None:
        raise SystemExit(f"WEFT_CUDA=1, but nvcc is neither on the PATH nor in {home}/bin: install it or set CUDA_HOME")
    return nvcc


def cuda_release(nvcc):
    return re.search(r"release (\d+\.\d+)", output([nvcc, "--version"])).group(1)


def cuda_home(nvcc):
    """Return the toolkit that nvcc itself names; the nvcc on the PATH may be a script outside the toolkit."""
    dry = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True)
    return Path(re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE).group(1).strip())


def version_of(text):
    return tuple(map(int, text.split(".")))


def older_names(library, prefixes, glibc):
    """Return functions of this machine's `library` with a version newer than `glibc` and an older one for old programs.

    They are grouped by the newest version that `glibc` has: {"GLIBC_2.2.5": ["pthread_create", ...], ...}.
    """
    path = output([*CXX.split(), f"-print-file-name={library}"]).strip()
    listed = output(["nm", "-D", path])
    versions = {}
    for name, version in re.findall(r" [TWi] (\w+)@@?GLIBC_([\d.]+)$", listed, re.MULTILINE):
        versions.setdefault(name, set()).add(version_of(version))
    names = {}
    for name, found in sorted(versions.items()):
        older = [version for version in found if version <= glibc]
        if name.startswith(prefixes) and older and max(found) > glibc:
            names.setdefault("GLIBC_" + ".".join(map(str, max(older))), []).append(name)
    return names


def libraries_of(glibc, folder):
    """Write empty libraries that make the linker use older versions of functions, and return their paths.

    They are linked before the real libraries. A function without an older version is not in them: the linker then uses
    the current version, and auditwheel refuses the wheel. Such a function belongs in csrc/glibc.cpp.
    """
    folder.mkdir(exist_ok=True)  # not in the folder where nvcc runs, because nvcc would load them
    paths = []
    for soname, (library, prefixes) in FORMER_LIBRARIES.items():
        names = older_names(library, prefixes, version_of(glibc))
        if not names:  # this machine's C library is older still
            continue
        source, script, path = (folder / f"{soname}{ending}" for ending in (".s", ".map", ""))
        every = [name for group in names.values() for name in group]
        source.write_text("".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in every))
        script.write_text("".join(f"{version} {{ {'; '.join(group)}; }};\n" for version, group in names.items()))
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}"]
        subprocess.run([*CXX.split(), *link, source, "-o", path], check=True)
        paths.append(path)
    return paths


class PythonBuild(build_py):
    """Build step that reports the included compiled kernels and removes those of an earlier build."""

    def run(self):
        print(COMPILED_KERNELS[1])
        shutil.rmtree(Path(self.build_lib) / "weft" / "kernels" / "compiled", ignore_errors=True)
        super().run()


class NinjaBuild(build_ext):
    """Build step that compiles the changed sources of weft._C in parallel, in one ninja run."""

    def finalize_options(self):
        super().finalize_options()
        if GLIBC and not re.fullmatch(r"2\.\d+", GLIBC):
            raise SystemExit(f"WEFT_GLIBC={GLIBC} is no version of the C library: write it like 2.28, or unset it")
        # Also for an editable install, which would otherwise build in a temporary folder, and everything each time.
        apart = f"-glibc-{GLIBC}" if GLIBC else ""
        if "WEFT_CUDA_CODES" in os.environ:
            apart += "-" + "-".join(CUDA_CODES)
        self.build_temp = str(
            ROOT / "build" / f"objects-{sysconfig.get_platform()}-{sysconfig.get_config_var('SOABI')}{apart}"
        )

    def run(self):
        self.in_source = self.inplace  # setuptools clears `inplace` while it builds
        super().run()

    def build_extension(self, extension):
        import pybind11

        wanted = Path(self.get_ext_fullpath(extension.name)).resolve()
        objects = Path(self.build_temp).resolve()
        objects.mkdir(parents=True, exist_ok=True)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        # Linked into the folder from which an editable install imports it, so that ninja alone can update it.
        target, rules = (
            (ROOT / FOLDERS["weft"] / wanted.name, "build.ninja") if self.in_source else (wanted, "wheel.ninja")
        )
        nvcc = find_nvcc()
        (objects / rules).write_text(self.rules(extension.sources, target, objects, nvcc, pybind11.get_include()))
        verbose = "-v" if self.verbose > 1 else "--quiet"
        subprocess.run([ninja_program(), "-C", objects, "-f", rules, verbose], check=True)
        if self.in_source:
            shutil.copy2(target, wanted)  # setuptools copies it back only if it is newer; copy2 keeps the time
        print(f"weft: built _C {'with CUDA ' + cuda_release(nvcc) if nvcc else 'without CUDA (no nvcc)'}")

    def rules(self, sources, target, objects, nvcc, pybind11_include):
        include = [sysconfig.get_paths()["include"], pybind11_include]
        # -fwrapv: integer sums wrap as in torch. -ffp-contract=off: every instruction set gives the same bits.
        flags = (
            "-std=c++17 -O3 -fwrapv -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra "
            f"-DWEFT_VERSION={VERSION} " + " ".join(f"-isystem {quoted(path)}" for path in include)
        )
        if os.uname().machine == "x86_64":
            flags += " -mtls-dialect=gnu2"  # thread-locals without __tls_get_addr of the dynamic loader
        link = "-shared -Wl,--as-needed -Wl,--strip-debug"
        if nvcc:
            home = cuda_home(nvcc)
            codes = ",".join(CUDA_CODES)
            with_cuda = f"-DWEFT_CUDA_VERSION={cuda_release(nvcc)} -DWEFT_CUDA_ARCHITECTURES={' '.join(CUDA_CODES)!r}"
            with_cuda += f" -isystem {quoted(home / 'include')}"
            libraries = next(path for path in (home / "lib64", home / "lib") if (path / "libcudart_static.a").exists())
            link += f" -Wl,--exclude-libs,ALL -L{quoted(libraries)} -lcudart_static"
        else:
            codes = with_cuda = ""
        standard = "-ldl -lpthread -lrt -lstdc++"
        if GLIBC:
            # Link libstdc++ statically and do not export it: an older system's libstdc++ may lack functions.
            exports = objects / "exports.map"
            exports.write_text("{ global: PyInit__C; local: *; };\n")
            flags += " -DWEFT_GLIBC"
            link += f" -Wl,--version-script,{quoted(exports)}"
            older = " ".join(map(quoted, libraries_of(GLIBC, objects / "older")))
            standard = f"-l:libstdc++.a {older} -ldl -lpthread -lrt"
        if nvcc or GLIBC:
            # The static runtimes of CUDA and C++ call __tls_get_addr, a symbol of the dynamic loader. Naming the C
            # libraries one by one leaves the loader out; every process has it anyway.
            link += f" -nodefaultlibs {standard} -lm -lgcc_s -lgcc -l:libc.so.6 -l:libc_nonshared.a"
        cuda_flags = "-std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden --threads 2 " + " ".join(
            f"-gencode arch={code.replace('sm_', 'compute_')},code={code}" for code in codes.split(",") if code
        )
        compile = "-MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
        lines = [
            f"cxx = {CXX}",
            f"flags = {flags}",
            f"rule cxx\n  command = $cxx $flags $further {compile}",
            f"rule nvcc\n  command = {quoted(nvcc)} {cuda_flags} {compile}",
            f"rule link\n  command = $cxx $in -o $out {link}",
        ]
        built = []
        for name, source in {**write_together(objects), **sources_alone(sources)}.items():
            if source.suffix == ".cu" and not nvcc:
                continue
            path = objects / f"{name}.o"
            isa = INSTRUCTION_SETS.get(source.stem, "")
            if isa and os.uname().machine != "x86_64":
                continue
            further = with_cuda if name == "python" else isa
            rule = "nvcc" if source.suffix == ".cu" else "cxx"
            lines.append(f"build {ninja_path(path)}: {rule} {ninja_path(source)}\n  further = {further}")
            built.append(ninja_path(path))
        lines.append(f"build {ninja_path(target)}: link {' '.join(built)}")
        return "\n".join(lines) + "\n"


def write_together(folder):
    """Write the source of each translation unit of TOGETHER, and return their paths by name."""
    paths = {name: folder / f"{name}.cpp" for name in TOGETHER}
    for name, path in paths.items():
        text = "".join(f'#include "{ROOT / source}"\n' for source in TOGETHER[name])
        if not path.exists() or path.read_text() != text:  # else ninja would compile it again
            path.write_text(text)
    return paths


def sources_alone(sources):
    """Return the paths of the sources that are translation units by themselves, by name."""
    alone = sorted(set(sources) - {source for together in TOGETHER.values() for source in together})
    return {"_".join(Path(source).with_suffix("").parts): ROOT / source for source in alone}


def ninja_path(path):
    """Return the path escaped for a build statement of ninja."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def quoted(path):
    """Return the path quoted for a command of ninja."""
    return shlex.quote(str(path)).replace("$", "$$")


def ninja_program():
    """Return the ninja of the build environment (a module in an isolated build), or the one on the PATH."""
    try:
        import ninja
    except ImportError:
        return "ninja"
    return str(Path(ninja.BIN_DIR) / "ninja")


def sources():
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu"))


COMPILED_KERNELS = compiled_kernels()

setup(
    packages=packages(),
    package_dir=FOLDERS,
    package_data={
        "weft": ["py.typed", "*.pyi"],
        "weft.tools.planner": ["data/*.json", "data/*.csv"],
        "weft.kernels": ["configs/*/*.json"],
        "weft.comm": ["crossovers/*.json"],
        "weft.kernels.compiled": COMPILED_KERNELS[0],
    },
    ext_modules=[Extension("weft._C", sources())],
    cmdclass={"build_py": PythonBuild, "build_ext": NinjaBuild},
)
