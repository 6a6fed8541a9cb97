"""Builds the stub driver, and reads what it recorded."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")


def include_folder() -> Path | None:
    """Where cuda.h is: triton's wheel has it, or a toolkit."""
    triton = importlib.util.find_spec("triton")
    beside = [Path(triton.origin).parent / "backends" / "nvidia" / "include"] if triton and triton.origin else []
    folders = [*beside, Path("/usr/local/cuda/include")]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


def build(folder: Path, *flags: str) -> Path:
    """Compiles it as FOLDER/libcuda.so.1."""
    library = folder / "libcuda.so.1"
    options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    command = [COMPILER, *options, f"-isystem{include_folder()}", "-Wl,-soname,libcuda.so.1", *flags]
    subprocess.run([*command, HERE / "driver.c", "-o", library], check=True)
    return library


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("words", ctypes.c_uint32 * 3))


class Call(ctypes.Structure):
    _fields_ = (
        ("name_bytes", ctypes.c_char * 40),
        ("numbers", ctypes.c_int64 * 32),
        ("attribute_count", ctypes.c_uint32),
        ("all_attributes", Attribute * 8),
        ("parameter_count", ctypes.c_uint32),
        ("sizes", ctypes.c_uint32 * 256),
        ("bytes", ctypes.c_uint8 * 4096),
    )

    @property
    def name(self) -> str:
        return self.name_bytes.decode()

    @property
    def attributes(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.id, tuple(one.words)) for one in self.all_attributes[: self.attribute_count]]

    @property
    def parameters(self) -> list[bytes]:
        found, at = [], 0
        for size in self.sizes[: self.parameter_count]:
            found.append(bytes(self.bytes[at : at + size]))
            at += size
        return found


class Stub:
    """The library in this process: its switches, and its record."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.stub_create_context.restype = ctypes.c_uint64
        self.library.stub_current.restype = ctypes.c_uint64
        self.library.stub_set_current.argtypes = [ctypes.c_uint64]
        self._calls = (Call * 2048).in_dll(self.library, "stub_calls")

    def reset(self) -> None:
        """Nothing recorded, no context, not initialised."""
        self.library.stub_reset()

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"stub_{name}").value = value

    def fail(self, name: str, result: int, nth: int = 1) -> None:
        self.library.stub_fail(name.encode(), nth, result)

    def context(self, place: int = 0, device: int = 0) -> int:
        """A new context at that place, made current here."""
        self.library.stub_initialise()
        context = self.library.stub_create_context(place, device)
        self.library.stub_set_current(context)
        return context

    def calls(self, *names: str) -> list[Call]:
        count = ctypes.c_int.in_dll(self.library, "stub_count").value
        assert count <= len(self._calls), "the record is full"
        return [call for call in self._calls[:count] if not names or call.name in names]

    def launches(self) -> list[Call]:
        return self.calls("cuLaunchKernelEx")


def image(name: str, sizes: list[int], static_shared: int = 0) -> bytes:
    """What stands in for machine code: the sizes of the parameters, the two hidden ones not counted."""
    return " ".join(["stub", name, str(static_shared), *map(str, [*sizes, 8, 8])]).encode()
