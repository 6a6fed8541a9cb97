"""Archives of compiled kernels: one file for each architecture. aot.py writes it and a kernel launch reads it.

    the line "weft compiled kernels 4"
    8 bytes: the length of the manifest (little-endian)
    the manifest, JSON, deflated: architecture, versions of triton and ptxas, a hash of each kernel's source, variants
    the variants' machine code, each packed by itself, so that a launch unpacks only one (LZMA with its parameters set
    for instructions of 16 bytes: three quarters of the deflated size)

Equal contents give equal bytes. This file imports the standard library only: setup.py loads it by its path.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
COMPILED = SOURCES / "compiled"  # the folder of an installation's archives
# csrc/launch passes the same arguments as this Triton's launcher (hidden parameters, tensor maps).
TRITON = "3.7"
HOW_TO_BUILD = "`python -m weft.kernels.aot` compiles them, and `make wheel` puts them into a wheel"

_MAGIC = b"weft compiled kernels 4\n"
_LENGTH_BYTES = 8


class ArchiveError(RuntimeError):
    """Error of an archive that cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class Machine:
    """One variant's machine code and launch parameters.

    Attributes:
        entry: the function's name in the machine code.
        arguments: the C type of each parameter that is no constant: "ptr", "i32", "fp32" and the like. For a tensor
            descriptor it is "tensordesc:" and the parameters of its tensor map, as JSON.
    """

    entry: str
    arguments: tuple[str, ...]
    shared_bytes: int
    warps: int
    registers: int
    cubin: bytes


@dataclass(frozen=True)
class Variant:
    """One entry of a manifest."""

    kernel: str  # "weft.kernels.signal._meet_kernel"
    key: str  # of the launches that it serves, as hex
    name: str  # a short description
    machine: dict[str, Any]  # the fields of Machine but the cubin
    sha256: str  # of the cubin
    offset: int  # of its packed bytes, from the manifest's end
    size: int


class Archive:
    """One architecture's compiled kernels, read from a file.

    Raises:
        ArchiveError: the file is no archive, is cut short, or this weft cannot launch its kernels.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            head = file.read(len(_MAGIC) + _LENGTH_BYTES)
            if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _LENGTH_BYTES:
                raise ArchiveError(f"{path} is no archive of compiled kernels that this weft reads; {HOW_TO_BUILD}")
            length = int.from_bytes(head[len(_MAGIC) :], "little")
            self._begin = len(head) + length
            try:
                self._manifest = json.loads(zlib.decompress(file.read(length)))
            except (zlib.error, ValueError) as error:
                raise ArchiveError(f"{path} is damaged ({error}); {HOW_TO_BUILD}") from None
        self.architecture: str = self._manifest["architecture"]
        self.triton: str = self._manifest["triton"]
        self.assembler: str = self._manifest["assembler"]
        self.sources: dict[str, str] = self._manifest["sources"]
        if not launches_as(self.triton):
            raise ArchiveError(
                f"{path} was compiled by triton {self.triton}; this weft launches what triton {TRITON} compiles"
            )

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(Variant(**entry) for entry in self._manifest["variants"])

    def of_kernel(self, kernel: str) -> dict[bytes, Variant]:
        """Return the kernel's variants by their keys."""
        return {bytes.fromhex(variant.key): variant for variant in self.variants if variant.kernel == kernel}

    def drift(self, kernel: str) -> str | None:
        """Return the reason if the kernel was compiled from other sources than the present ones, else None.

        Such a kernel must not be launched.
        """
        if kernel not in self.sources:
            return f"{self.path.name} holds no {kernel}"
        if self.sources[kernel] == source_hash(kernel.rpartition(".")[0]):
            return None
        return f"{self.path.name} holds {kernel} as compiled from other sources than these"

    def machine(self, variant: Variant) -> Machine:
        """Read the variant's machine code.

        Raises:
            ArchiveError: the bytes are not those that were written.
        """
        with self.path.open("rb") as file:
            file.seek(self._begin + variant.offset)
            packed = file.read(variant.size)
        cubin = _unpack(packed)
        if hashlib.sha256(cubin).hexdigest() != variant.sha256:
            raise ArchiveError(f"{self.path} is damaged where {variant.kernel} ({variant.name}) is; {HOW_TO_BUILD}")
        return unpacked(variant.machine, cubin)


def launches_as(triton: str) -> bool:
    """Return True if this weft can launch the code of that version of Triton."""
    return triton.split("+")[0].split(".")[:2] == TRITON.split(".")


def packed(machine: Machine) -> dict[str, Any]:
    """Return the fields of a Machine that JSON can hold: all but the cubin."""
    fields = asdict(machine)
    del fields["cubin"]
    return fields


def unpacked(fields: Mapping[str, Any], cubin: bytes) -> Machine:
    return Machine(**{**fields, "arguments": tuple(fields["arguments"])}, cubin=cubin)


def write(
    path: Path, architecture: str, triton: str, assembler: str, built: Iterable[tuple[str, bytes, str, Machine]]
) -> None:
    """Write an archive of (kernel, key, name, machine code); equal machine code is stored once."""
    variants, blobs, places, size = [], [], {}, 0
    for kernel, key, name, machine in sorted(built, key=lambda entry: entry[:2]):
        digest = hashlib.sha256(machine.cubin).hexdigest()
        if digest not in places:
            blob = _pack(machine.cubin)
            places[digest] = size, len(blob)
            blobs.append(blob)
            size += len(blob)
        variants.append(asdict(Variant(kernel, key.hex(), name, packed(machine), digest, *places[digest])))
    manifest = {
        "architecture": architecture,
        "triton": triton,
        "assembler": assembler,
        "sources": {entry["kernel"]: source_hash(entry["kernel"].rpartition(".")[0]) for entry in variants},
        "variants": variants,
    }
    head = zlib.compress(json.dumps(manifest, sort_keys=True).encode(), 9)
    write_whole(path, _MAGIC + len(head).to_bytes(_LENGTH_BYTES, "little") + head + b"".join(blobs))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader at the same time sees either the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


@lru_cache
def source_hash(module: str, folder: Path = SOURCES) -> str:
    """Return the hash of a kernel's source texts: the file of its module and those it imports of weft.kernels."""
    texts: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        if name in texts:
            continue
        texts[name] = (folder / f"{name.removeprefix('weft.kernels.')}.py").read_text()
        left += imports(texts[name])
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def imports(text: str) -> set[str]:
    """Return the modules of weft.kernels that a file's text imports.

    It searches the text instead of parsing it. Parsing takes 50 times as long and would delay a process's first launch.
    """
    text = re.sub("#.*", "", text)
    found = set(re.findall(r"^\s*(?:from|import) (weft\.kernels\.\w+)", text, re.MULTILINE))
    for names in re.findall(r"^\s*from weft\.kernels import (\([^)]*\)|.*)", text, re.MULTILINE):
        found |= {f"weft.kernels.{name.split()[0]}" for name in names.strip("()").split(",") if name.strip()}
    return found


def _pack(cubin: bytes) -> bytes:
    lzma, filters = _lzma()
    return lzma.compress(cubin, format=lzma.FORMAT_RAW, filters=filters)


def _unpack(packed: bytes) -> bytes:
    """Return the unpacked bytes, or b"" if `_pack` did not write these bytes."""
    lzma, filters = _lzma()
    try:
        return lzma.decompress(packed, format=lzma.FORMAT_RAW, filters=filters)
    except lzma.LZMAError:
        return b""


def _lzma():
    """Return the lzma module, which some builds of Python lack, and the filters for machine code."""
    try:
        import lzma
    except ImportError:
        raise ArchiveError(
            "this Python was built without lzma, which compiled kernels are packed with; install liblzma and rebuild it"
        ) from None
    return lzma, [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 4, "pb": 4}]
