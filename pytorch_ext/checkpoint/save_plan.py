"""Plan of a save: one rank writes each box, and ranks that hold the same box compare their values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from zlib import crc32

from weft.checkpoint import safetensors_io
from weft.checkpoint.boxes import Extent, TensorPart
from weft.checkpoint.contents import HeldTensor
from weft.checkpoint.on_all_ranks import CheckpointError
from weft.checkpoint.safetensors_io import Box, StoredTensor
from weft.data_parallel.consensus import ranks_text

SECTIONS = ("model", "training")
_NAMED = 5  # names in an error message


@dataclass(frozen=True)
class Place:
    """A box of a tensor of a section."""

    section: str
    name: str
    offset: Extent
    shape: Extent


@dataclass(frozen=True)
class Outline:
    """Properties of a tensor that must be the same on all ranks."""

    names: tuple[str, ...]
    shape: Extent
    code: str


Sections = Mapping[str, Mapping[str, HeldTensor]]
Outlines = dict[tuple[str, str], Outline]  # by section and name


def places_in(sections: Sections) -> Iterator[tuple[Place, HeldTensor, TensorPart]]:
    """Yield (place, tensor, part) for each part that has elements."""
    for section in SECTIONS:
        for name, held in sections[section].items():
            for part in held.parts:
                if part.tensor.numel():
                    yield Place(section, name, part.offset, part.shape), held, part


def described(sections: Sections) -> tuple[Outlines, dict[Place, bool]]:
    """Return what the other ranks must know of this rank's tensors, for `owners`.

    Returns:
        The outlines, and this rank's places, with True if ranks may have different values there.
    """
    outlines = {
        (section, name): Outline(held.names, held.shape, safetensors_io.code_of(held.dtype))
        for section in SECTIONS
        for name, held in sections[section].items()
    }
    return outlines, {place: held.own for place, held, _ in places_in(sections)}


def owners(
    ranks_described: Sequence[tuple[Outlines, Mapping[Place, bool]]], numbers: Sequence[int]
) -> tuple[Outlines, dict[Place, int]]:
    """Return the outlines of all tensors, and the rank that writes each place. Bytes are spread evenly over the ranks.

    The first rank writes a place where ranks may have different values.

    Args:
        ranks_described: result of `described` on each rank.
        numbers: each rank's number in the program.

    Raises:
        CheckpointError: two ranks' outlines differ, or the places of all ranks do not cover each tensor exactly once.
            Every rank raises the same error.
    """
    outlines: Outlines = {}
    holders: dict[Place, list[int]] = {}
    for rank, (of_rank, places) in enumerate(ranks_described):
        for key, outline in of_rank.items():
            if outlines.setdefault(key, outline) != outline:
                raise CheckpointError(
                    f"{key[1]} is {outlines[key]} on an earlier rank, and {outline} on rank {numbers[rank]}"
                )
        for place in places:
            holders.setdefault(place, []).append(rank)
    load_bytes = [0] * len(ranks_described)
    owner: dict[Place, int] = {}
    elements = dict.fromkeys(outlines, 0)
    for place, ranks in holders.items():
        first = ranks_described[ranks[0]][1][place]
        owner[place] = ranks[0] if first else min(ranks, key=lambda rank: load_bytes[rank])
        key = place.section, place.name
        elements[key] += prod(place.shape)
        load_bytes[owner[place]] += prod(place.shape) * safetensors_io.dtype_of(outlines[key].code).itemsize
    wrong = [
        f"{name} ({count} of {prod(outlines[section, name].shape)})"
        for (section, name), count in elements.items()
        if count != prod(outlines[section, name].shape)
    ]
    if wrong:
        raise CheckpointError(
            f"the ranks together do not have every element of these tensors once: {_first(wrong)} elements. All ranks "
            "that share a model must save it together, and ranks of different models must not: pass their group"
        )
    return outlines, owner


@dataclass
class Written:
    """Result of one rank's write.

    Attributes:
        bytes: size in bytes by file.
        boxes: box of each place that this rank wrote.
        replicas: CRC-32 of this rank's values at places that another rank writes.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    boxes: dict[Place, Box] = field(default_factory=dict)
    replicas: dict[Place, int] = field(default_factory=dict)


def write_share(
    folder: Path, data: str, rank: int, sections: Sections, owner: Mapping[Place, int], check_replicas: bool
) -> Written:
    """Write this rank's places to files in folder/data. They are on the disk when this returns.

    Args:
        folder: folder of the checkpoint.
        data: name of the folder of this save in it.
        rank: this rank.
        sections: this rank's tensors.
        owner: rank that writes each place.
        check_replicas: compute checksums of places that other ranks write.
    """
    written = Written()
    local: dict[str, dict[str, tuple[Place, TensorPart]]] = {section: {} for section in SECTIONS}
    for place, held, part in places_in(sections):
        if owner[place] == rank:
            whole = place.shape == held.shape
            key = place.name if whole else f"{place.name}@{','.join(map(str, place.offset))}"
            local[place.section][key] = place, part
        elif check_replicas and not held.own:
            written.replicas[place] = crc32(safetensors_io.bytes_of(part.tensor))
    (folder / data).mkdir(parents=True, exist_ok=True)
    for section, by_key in local.items():
        if not by_key:
            continue
        file = f"{data}/{section}-{rank:05d}.safetensors"
        tensors = {key: part.tensor for key, (_, part) in by_key.items()}
        kinds = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        checksums = safetensors_io.write_tensors(folder / file, kinds, tensors.__getitem__)
        written.bytes[file] = (folder / file).stat().st_size
        for key, (place, _) in by_key.items():
            written.boxes[place] = Box(file, key, place.offset, place.shape, checksums[key])
    safetensors_io.sync_folder(folder / data)
    return written


def check_same(written: Sequence[Written], owner: Mapping[Place, int], numbers: Sequence[int]) -> None:
    """Raise CheckpointError, the same on every rank, if replicas differ. `numbers` are the ranks' in the program."""
    wrong: dict[str, list[int]] = {}
    for rank, share in enumerate(written):
        for place, checksum in share.replicas.items():
            if written[owner[place]].boxes[place].checksum != checksum:
                wrong.setdefault(f"{place.name} of rank {numbers[owner[place]]}", []).append(numbers[rank])
    if wrong:
        lines = [f"{replica} on {ranks_text(ranks, len(written))}" for replica, ranks in wrong.items()]
        raise CheckpointError(
            f"replicated tensors differ between ranks: {_first(lines)}. They have drifted apart, or are of different "
            "models; workers that differ on purpose each save their own checkpoint, with `group`"
        )


def check_seen(folder: Path, written: Sequence[Written]) -> dict[str, int]:
    """Return the bytes of all files; raise CheckpointError if this rank misses one or sees another size."""
    sizes = {file: size for share in written for file, size in share.bytes.items()}
    for file, size in sizes.items():
        if not (folder / file).exists() or (folder / file).stat().st_size != size:
            raise CheckpointError(f"this rank does not see {folder / file} as it was written: do the ranks share it?")
    return sizes


def entries(written: Sequence[Written], outlines: Outlines) -> dict[str, dict[str, StoredTensor]]:
    """Return the stored tensors by section and name. A tied tensor is there under each of its names."""
    boxes: dict[tuple[str, str], list[Box]] = {key: [] for key in outlines}
    for share in written:
        for place, box in share.boxes.items():
            boxes[place.section, place.name].append(box)
    found: dict[str, dict[str, StoredTensor]] = {section: {} for section in SECTIONS}
    for (section, name), outline in outlines.items():
        entry = StoredTensor(outline.code, outline.shape, tuple(boxes[section, name]))
        found[section] |= dict.fromkeys(outline.names, entry)
    return found


def _first(items: Sequence[str]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{', '.join(items[:_NAMED])}{more}"
