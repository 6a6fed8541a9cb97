"""Safetensors files. A write is on the disk when it returns; a read takes one slice at a time.

A `Source` describes stored tensors by name, each made of boxes in files. It stands for a checkpoint of weft, for one
plain file, and for a folder of several files with an index (Hugging Face's).
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.checkpoint.boxes import Extent, TensorPart, overlap, seen_from
from weft.checkpoint.on_all_ranks import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = "weft checkpoint 1"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_MOST_MAPPED_BYTES = 32 << 20

# Names of types in the format.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return the format's name of a type; raise TypeError if it has none."""
    if dtype not in _CODES:
        raise TypeError(f"safetensors has no {dtype}; it has {', '.join(map(str, _CODES))}")
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    if code not in _DTYPES:
        raise CheckpointError(f"the type {code} is unknown; the known types are {', '.join(_DTYPES)}")
    return _DTYPES[code]


@dataclass(frozen=True)
class Box:
    """Stored elements of a tensor: all of `key` in `file`, and the CRC-32 of its bytes if that was stored."""

    file: str
    key: str
    offset: Extent
    shape: Extent
    checksum: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor: the format's name of its type, its whole shape and its boxes."""

    code: str
    shape: Extent
    boxes: tuple[Box, ...]

    def as_json(self) -> dict:
        boxes = [[box.file, box.key, box.offset, box.shape, box.checksum] for box in self.boxes]
        return {"dtype": self.code, "shape": self.shape, "boxes": boxes}

    @classmethod
    def from_json(cls, entry: dict) -> "StoredTensor":
        boxes = (Box(file, key, tuple(at), tuple(size), crc) for file, key, at, size, crc in entry["boxes"])
        return cls(entry["dtype"], tuple(entry["shape"]), tuple(boxes))


@dataclass(frozen=True)
class Source:
    """Description of the tensors that are stored under a path.

    Attributes:
        folder: folder of the files.
        model: the model's tensors by name.
        training: further tensors for training, by name.
        files: bytes of each file when it was written; empty for plain safetensors.
        about: step, extras, optimizers and the number of ranks; empty for plain safetensors.
        identity: different for every save.
        metadata: texts in the heads of plain files, by name; torchao describes its tensors there.
    """

    folder: Path
    model: Mapping[str, StoredTensor]
    training: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def optimizers(self) -> list[dict]:
        return self.about.get("optimizers", [])


# Writing.


def write_tensors(
    path: Path, kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]], read: Callable[[str], torch.Tensor]
) -> dict[str, int]:
    """Write tensors to a safetensors file, one at a time. The file is on the disk when this returns.

    Args:
        path: the file, which must not exist.
        kinds: type and shape of each tensor by key.
        read: returns the tensor of a key. It is called once for each key.

    Returns:
        CRC-32 of each tensor's bytes, by key.
    """
    # Large types first, so that every tensor is aligned to its type.
    keys = sorted(kinds, key=lambda key: (-kinds[key][0].itemsize, key))
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in keys:
        dtype, shape = kinds[key]
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[key] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            data = bytes_of(read(key))
            file.write(data)
            checksums[key] = zlib.crc32(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order, on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def rename(temporary: Path, path: Path) -> None:
    """Rename a file and replace the one of that name. The change is on the disk when this returns."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, content: dict) -> None:
    """Replace the manifest in one step. From then on the files that it names are the checkpoint."""
    text = json.dumps({"format": _FORMAT, **content}, default=StoredTensor.as_json)
    temporary = folder / f"{MANIFEST}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(_with_checksum(text.encode()))
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, folder / MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)


def is_manifest_of(folder: Path, identity: str) -> bool:
    """Return True if there is a manifest and it names the data of the save `identity`."""
    path = folder / MANIFEST
    return path.exists() and identity in path.read_text(errors="replace")


def _with_checksum(text: bytes) -> bytes:
    """Return the text and its checksum on two lines. A reader compares all bytes of them."""
    return b"%b\n%d\n" % (text, zlib.crc32(text))


# Reading.


def source_at(path: Path) -> Source:
    """Return the source at a path: a safetensors file, or a folder with a manifest, an index or model.safetensors."""
    if path.is_file():
        return _plain(path.parent, [path.name], None)
    if (path / MANIFEST).exists():
        return _ours(path)
    if (path / _INDEX).exists():
        try:
            files = json.loads((path / _INDEX).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path / _INDEX} is not an index of safetensors files: {error!r}") from error
        return _plain(path, sorted(set(files.values())), files)
    if (path / _SINGLE).exists():
        return _plain(path, [_SINGLE], None)
    there = "there is no such file or folder" if not path.exists() else "the folder has none of these"
    raise CheckpointError(
        f"no checkpoint at {path}: {there}. It is a safetensors file, or a folder with {MANIFEST} (written when "
        f"weft.save_checkpoint has finished), {_INDEX} or {_SINGLE}"
    )


def _ours(folder: Path) -> Source:
    path = folder / MANIFEST
    data = path.read_bytes()
    text = data.partition(b"\n")[0]
    if data != _with_checksum(text):
        raise CheckpointError(f"{path} is torn or was altered: its text and its checksum differ")
    manifest = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path} is of the format {manifest['format']!r}; this version reads {_FORMAT!r}")
    model, training = (
        {name: StoredTensor.from_json(entry) for name, entry in manifest[key].items()} for key in ("model", "training")
    )
    return Source(folder, model, training, manifest["files"], manifest["about"], f"{manifest['id']} {zlib.crc32(text)}")


def _plain(folder: Path, files: list[str], file_of: Mapping[str, str] | None) -> Source:
    model, metadata = {}, dict[str, str]()
    with Files(folder) as opened:
        for file in files:
            handle = opened[file]
            metadata.update(handle.metadata() or {})
            keys = handle.keys()
            for key in keys:
                if file_of is not None and file_of.get(key) != file:
                    continue
                tensor = handle.get_slice(key)
                shape = tuple(tensor.get_shape())
                box = Box(file, key, (0,) * len(shape), shape)
                model[key] = StoredTensor(tensor.get_dtype(), shape, (box,))
    lacking = sorted(set(file_of or {}) - set(model))
    if lacking:
        raise CheckpointError(f"{folder / _INDEX} names tensors that its files do not have: {', '.join(lacking)}")
    return Source(folder, model, metadata=metadata)


class Files:
    """Open safetensors files of a folder. A fault of a file raises a CheckpointError that names it.

    Files are mapped, and pages that were read count as this process's memory. So a file is closed again after
    _MOST_MAPPED_BYTES.
    """

    def __init__(self, folder: Path, bytes_written: Mapping[str, int] | None = None):
        self._folder, self._bytes = folder, bytes_written or {}
        self._open: dict[str, Any] = {}
        self._read_bytes = 0

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_) -> None:
        self._open.clear()  # a file is unmapped with the last reference to it

    def __getitem__(self, file: str):
        if file not in self._open:
            path = self._folder / file
            with self._naming(file):
                size = path.stat().st_size
                if size != self._bytes.get(file, size):
                    raise CheckpointError(f"{path} is torn: it has {size} bytes, and {self._bytes[file]} were written")
                self._open[file] = safe_open(path, "pt")
        return self._open[file]

    @contextmanager
    def _naming(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointError(f"{self._folder / file} is missing") from None
        except (SafetensorError, OSError) as error:
            with open(self._folder / file, "rb") as opened:
                if opened.read(4)[:2] in (b"PK", b"\x80\x02"):
                    raise CheckpointError(
                        f"{self._folder / file} is no safetensors file, but one of torch.save: torch.load it, then "
                        "load_state_dict"
                    ) from None
            raise CheckpointError(f"{self._folder / file} is torn or was altered: {error}") from error

    def read(self, box: Box, inside: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return the box's elements, or those of a slice of it."""
        if self._read_bytes > _MOST_MAPPED_BYTES:
            self._open.clear()
            self._read_bytes = 0
        handle = self[box.file]
        with self._naming(box.file):
            self._read_bytes += prod(box.shape) * dtype_of(handle.get_slice(box.key).get_dtype()).itemsize
            if inside is None or all(part == slice(0, size) for part, size in zip(inside, box.shape, strict=True)):
                return handle.get_tensor(box.key)
            return handle.get_slice(box.key)[inside]

    def check(self, box: Box, code: str) -> None:
        """Raise CheckpointError if the box's type, shape or checksum differs from the manifest."""
        tensor = self.read(box)
        kind = _CODES.get(tensor.dtype), tuple(tensor.shape)
        if kind != (code, box.shape) or zlib.crc32(bytes_of(tensor)) != box.checksum:
            raise CheckpointError(
                f"{self._folder / box.file} was altered: {box.key} is not what was written (its CRC-32, type or shape "
                "differs)"
            )

    def fill(self, part: TensorPart, entry: StoredTensor) -> None:
        """Copy the part's elements from the stored tensor; raise CheckpointError if its boxes lack some of them."""
        covered = 0
        for box in entry.boxes:
            shared = overlap(part.offset, part.shape, box.offset, box.shape)
            if shared is not None:
                target = part.tensor[seen_from(part.offset, shared)]
                target.copy_(self.read(box, seen_from(box.offset, shared)))
                covered += target.numel()
        if covered != part.tensor.numel():
            raise CheckpointError(
                f"the stored boxes of {entry.boxes[0].key} have {covered} of the {part.tensor.numel()} elements at "
                f"{part.offset}"
            )
