"""Sharded optimizer (ZeRO stage 1, Rajbhandari et al. 2020): each rank steps its part of every bucket of parameters.

Parameters are laid out like their gradients. A reduce-scatter leaves rank r its part of a bucket of gradients, and that
part belongs to rank r's part of the parameters. The optimizer is one of torch's own, and its parameters are pieces: the
stretch of this rank's part that belongs to one parameter.

After the optimizer's step the parts are gathered.

Every rank has a piece of every parameter, which may be empty. Optimizers that update each element by itself do not get
the empty pieces. Optimizers that sum norms over the ranks get them, so that all ranks count the same parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.data_parallel.bucket_comm import measure
from weft.data_parallel.buckets import Bucket, Slot, place_in, shared_memory
from weft.metadata import metadata, set_metadata
from weft.sharding.optimizer_check import ELEMENTWISE, check_every_optimizer, is_elementwise
from weft.sharding.sharded_grad import gradient_elsewhere, gradient_like


@dataclass(frozen=True)
class Piece:
    """Origin of a piece: a range of elements of a parameter. An empty piece has start equal to stop.

    Attributes:
        name: name of the parameter in the module.
        parameter: the parameter.
        start: first element of the piece, in the order of memory.
        stop: element after its last.
        ranks: ranks that hold the pieces of the parameter.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    ranks: Communicator


def piece_of(parameter: torch.Tensor) -> Piece | None:
    """Return the origin of an optimizer's parameter that is a piece, or None if it is not a piece."""
    return metadata(parameter, "piece")


class _PartPlace(NamedTuple):
    """Piece of one parameter, with its gradient.

    Attributes:
        piece: the optimizer's parameter.
        gradient: memory of its reduced gradient.
        of_piece: `.grad` of the piece.
        of_parameter: `.grad` of the module's parameter, which refers to the piece.
    """

    piece: nn.Parameter
    gradient: torch.Tensor
    of_piece: torch.Tensor
    of_parameter: torch.Tensor


@dataclass(eq=False)
class _BucketPart:
    """Parameters of a bucket, and this rank's part of them.

    Attributes:
        bucket: bucket of the gradients.
        flat: memory of all parameters of the bucket, in the layout of the gradients.
        local: this rank's part of `flat`.
        stepped: memory that the optimizer steps: `local`, or an fp32 copy of it if gradients are in main_grad.
        gradients: reduced gradients of `stepped`.
        places: pieces of the bucket's parameters.
        known: memory address of each parameter.
    """

    bucket: Bucket
    flat: torch.Tensor
    local: torch.Tensor
    stepped: torch.Tensor
    gradients: torch.Tensor
    places: dict[Slot, _PartPlace] = field(default_factory=dict)
    known: dict[Slot, int] = field(default_factory=dict)

    def add(self, reduced: torch.Tensor) -> bool:
        """Add reduced gradients to those that were not zeroed since the last reduction; return whether there are any.

        Gradients that were zeroed are overwritten.
        """
        zeroed = [at.gradient for at in self.places.values() if at.piece.grad is None or not at.piece.numel()]
        if len(zeroed) == len(self.places):
            self.gradients.copy_(reduced)
            return False
        for gradient in zeroed:
            gradient.zero_()
        self.gradients.add_(reduced)
        return True


class Shards:
    """This rank's pieces of the parameters of all buckets."""

    def __init__(self, buckets: list[Bucket]):
        check_every_optimizer()
        self._parts = {bucket: self._share(bucket) for bucket in buckets}

    def optimizer(self, kind, parameters: Iterable | None, elementwise: bool | None, options: dict):
        """Return an optimizer of class `kind` over this rank's pieces; see `DataParallel.optimizer`."""
        sums_norms = getattr(kind, "sums_norms_of_pieces", False)
        self._check(kind, True if sums_norms else elementwise)
        pieces = {id(slot.parameter): at.piece for part in self._parts.values() for slot, at in part.places.items()}

        def to_pieces(group: dict) -> dict:
            given = group["params"]
            given = [given] if isinstance(given, torch.Tensor) else list(given)
            named = [entry if isinstance(entry, tuple) else ("", entry) for entry in given]
            found = []
            for name, parameter in named:
                piece = pieces.get(id(parameter))
                if piece is None and parameter.requires_grad:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"a parameter {shape} of the optimizer is not of the wrapped module")
                if piece is not None and (piece.numel() or sums_norms):  # a frozen parameter has none
                    found.append((name, piece))
            names = {"param_names": [name for name, _ in found]} if any(name for name, _ in named) else {}
            return {**group, "params": [piece for _, piece in found], **names}

        groups = list(self._trained() if parameters is None else parameters)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        made = kind([to_pieces(group) for group in groups], **options)
        add = made.add_param_group
        made.add_param_group = lambda group: add(to_pieces(group))
        made.register_step_pre_hook(lambda *_: self.adopt_writes())
        made.register_step_post_hook(lambda *_: self.gather())
        return made

    def _trained(self) -> list[nn.Parameter]:
        return [slot.parameter for bucket in self._parts for slot in bucket.slots]

    def _check(self, kind, elementwise: bool | None) -> None:
        if elementwise is None:
            elementwise = is_elementwise(kind)
        if not elementwise:
            raise TypeError(
                f"shard_optimizer=True: {kind.__name__} is not known to update each element by itself, and a rank "
                "holds pieces of parameters, flat and cut anywhere. Known are torch's "
                f"{', '.join(sorted(ELEMENTWISE))}, and weft.LARS and weft.LAMB, which sum norms over the ranks; pass "
                "elementwise=True for another class that updates each element by itself, or shard_optimizer=False"
            )

    @torch.no_grad()
    def deliver(self) -> None:
        """Copy reduced gradients to the pieces, or add them to gradients that the optimizer has not zeroed.

        `.grad` of each parameter of the module then refers to the gradient of its piece.
        """
        for bucket, part in self._parts.items():
            if part.add(bucket.own_part):
                measure(part.gradients, bucket)
            for at in part.places.values():
                at.piece.grad = at.of_piece
            for slot in bucket.slots:
                slot.parameter.grad = part.places[slot].of_parameter
                if slot.into_main_grad:
                    slot.place.zero_()

    def zero_grad(self) -> None:
        """Set `.grad` of all pieces to None."""
        for part in self._parts.values():
            for at in part.places.values():
                at.piece.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Send every part to every rank."""
        for bucket, part in self._parts.items():
            if part.stepped is not part.local:
                part.local.copy_(part.stepped)
            parts = list(part.flat.chunk(bucket.ranks.world_size))
            bucket.ranks.all_gather_into(part.local, parts)

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Copy elements of parameters that were written since the last step to the memory that the optimizer steps.

        Raises:
            RuntimeError: a parameter got other memory after it was wrapped, so its steps would be lost.
        """
        for part in self._parts.values():
            for slot, address in part.known.items():
                if slot.parameter.data_ptr() != address:
                    raise RuntimeError(
                        f"shard_optimizer=True: {slot.name!r} was given other memory since it was wrapped, and the "
                        "optimizer's steps would not reach it: write to it in place (copy_), or convert the module "
                        "(.to, .data = ...) before it is wrapped"
                    )
            if part.stepped is not part.local:
                written = part.stepped.to(part.local.dtype) != part.local
                if written.any():
                    part.stepped.copy_(torch.where(written, part.local, part.stepped))

    @torch.no_grad()
    def reload(self) -> None:
        """Make the fp32 copies anew from the parameters, after a state_dict was loaded into the module."""
        for part in self._parts.values():
            if part.stepped is not part.local:
                part.stepped.copy_(part.local)

    def pieces_of(self, bucket: Bucket) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return this rank's pieces of the bucket's parameters, with their gradients."""
        return [(at.piece, at.gradient) for at in self._parts[bucket].places.values()]

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of each bucket's gradients."""
        return [part.gradients for part in self._parts.values()]

    @torch.no_grad()
    def _share(self, bucket: Bucket) -> _BucketPart:
        """Move the bucket's parameters into the layout of their gradients, and cut this rank's pieces."""
        first = bucket.slots[0].parameter
        count = bucket.flat.numel()
        flat = shared_memory(count * first.element_size(), first.device, bucket.ranks).view(first.dtype)
        for slot in bucket.slots:
            place = place_in(flat, slot)
            place.copy_(slot.parameter)
            slot.parameter.data = place
        local = flat.chunk(bucket.ranks.world_size)[bucket.ranks.rank]
        stepped = local.to(bucket.flat.dtype)
        part = _BucketPart(bucket, flat, local, stepped, torch.zeros_like(stepped))
        begin = bucket.ranks.rank * local.numel()
        for slot in bucket.slots:
            elements = slot.parameter.numel()
            start, stop = (min(max(end - slot.offset, 0), elements) for end in (begin, begin + local.numel()))
            here = slice(slot.offset + start - begin, slot.offset + stop - begin) if start < stop else slice(0, 0)
            piece = nn.Parameter(stepped[here])
            set_metadata(piece, "piece", Piece(slot.name, slot.parameter, start, stop, bucket.ranks))
            gradient = part.gradients[here]
            shown = gradient_like(piece, gradient), gradient_elsewhere(slot.parameter, piece)
            part.places[slot] = _PartPlace(piece, gradient, *shown)
            part.known[slot] = slot.parameter.data_ptr()
        return part
