"""What a recording keeps: tensors with their names, and a part's place in the whole tensor."""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from weft.data_parallel.sharded_optimizer import piece_of
from weft.sharding.shard import shard_of

_STAGE = re.compile(r"submod_pp_\d+")  # of torch.distributed.pipelining.pipeline()
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # parts of names
Place = dict[int | str, list[tuple[int, int]]]  # dimension, or "flat", to the stretches of the whole that a rank has


class Key(NamedTuple):
    """The name of a tensor of a run.

    Attributes:
        step: number of the optimizer's steps before.
        kind: what it is: "input", "output", "gradient of input", "parameter", "loss" and so on.
        module: name of the module, or of the parameter.
        root: number of the call of the outermost module in the step; of a batch in units, the unit.
        call: number of the module's call within that call.
        item: number of the tensor among the arguments or results; the name of an optimizer's state or setting.
    """

    step: int
    kind: str
    module: str
    root: int
    call: int
    item: int | str


class Seen(NamedTuple):
    """One tensor of a run on one rank.

    Attributes:
        tensor: this rank's part.
        partial: the parts of ranks are to be added up (DTensor's Partial).
        place: the part's place in the whole tensor, where it is known.
        outermost: name of the outermost module that is called, if a module's call made the tensor.
    """

    key: Key
    tensor: torch.Tensor
    partial: bool = False
    place: Place | None = None
    outermost: str = ""


Call = tuple[str, int, int]  # module, call of the whole model, call of the module within
Edge = tuple[Call, Call]


class RecordedRun(NamedTuple):
    """What one process recorded.

    Attributes:
        steps: number of steps that the program made.
        not_recorded: what ran and cannot be compared.
    """

    seen: list[Seen]
    edges: list[Edge]
    rank: int = 0
    world_size: int = 1
    steps: int = 1
    not_recorded: tuple[str, ...] = ()


def save(recording: RecordedRun, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(([(tuple(each.key), *each[1:]) for each in recording.seen], *recording[1:]), file)


def load(folder: Path) -> list[RecordedRun]:
    """Return what each rank recorded, in rank order.

    Raises:
        FileNotFoundError: nothing was recorded there.
    """
    files = sorted(folder.glob("rank*.pt"), key=lambda file: int(file.stem.removeprefix("rank")))
    if not files:
        raise FileNotFoundError(f"{folder} has no recording: no torch.nn.Module was called inside of weft.record")
    read = map(torch.load, files)
    return [RecordedRun([Seen(Key(*key), *rest) for key, *rest in seen], *others) for seen, *others in read]


def plain_name(name: str) -> str:
    """Return the name without those of wrappers (torch.compile, FSDP, checkpoints)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS and not _STAGE.fullmatch(part))


def place_of(x: torch.Tensor) -> Place | None:
    """Return the place of a rank's part of a parameter in the whole one; None if nothing is known of it."""
    piece, shard = piece_of(x), shard_of(x)
    if piece is not None:
        return {"flat": [(piece.start, piece.stop)], **(place_of(piece.parameter) or {})}
    if shard is not None:
        return {dim: list(cut.stretches[shard.communicator.rank]) for dim, cut in shard.cuts}
    if isinstance(x, DTensor):
        return {dim: _stretches(x, dim) for dim in range(x.dim())}
    return None


def flat_parts(
    x: torch.Tensor, parameters: Iterable[torch.Tensor]
) -> list[tuple[torch.Tensor, slice | EllipsisType, Place | None]]:
    """Return the parameters in `x`: each with its part of `x`, and the place of that part in the parameter.

    That is `x` itself, but for the flat tensors that DeepSpeed's ZeRO steps instead of the parameters.
    """
    found: list[tuple[torch.Tensor, slice | EllipsisType, Place | None]] = []
    for parameter in parameters:
        piece = getattr(parameter, "_hp_mapping", None)
        if piece is not None and piece.hp_fragment.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            here, there = piece.hp_fragment_address, piece.lp_fragment_address
            place: Place = {"flat": [(there.start, there.start + there.numel)]}
            found.append((parameter, slice(here.start, here.start + here.numel), place))
    return found or [(x, ..., place_of(x))]


def _stretches(x: DTensor, dim: int) -> list[tuple[int, int]]:
    """Return the stretches of a dimension that this rank has.

    The placements cut the numbers of the elements as they cut the tensor: a strided one leaves several stretches, of
    the projections that are fused in one weight, say.
    """
    numbers = torch.arange(x.size(dim)).view([-1 if d == dim else 1 for d in range(x.dim())])
    for of_mesh, place in enumerate(x.placements):
        if getattr(place, "dim", None) == dim:
            parts, _ = place._split_tensor(numbers, x.device_mesh.size(of_mesh), with_padding=False)  # type: ignore
            numbers = parts[x.device_mesh.get_local_rank(of_mesh)]
    found: list[int] = numbers.flatten().tolist()
    bounds = [0, *(at for at in range(1, len(found)) if found[at] != found[at - 1] + 1), len(found)]
    return [(found[a], found[b - 1] + 1) for a, b in pairwise(bounds) if a < b]
