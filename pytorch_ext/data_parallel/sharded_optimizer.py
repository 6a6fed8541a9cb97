"""A sharded optimizer (ZeRO stage 1, Rajbhandari et al. 2020): each rank steps its part of every bucket of parameters.

Parameters are laid out like their gradients, so that rank r's part of a bucket of gradients, which a reduce-scatter
leaves it, belongs to its part of the parameters. The optimizer is one of torch's own: its parameters are `pieces`, the
stretches of this rank's part that belong to one parameter each. After its step the parts are gathered: before anything
else, or while forward goes on, which waits for each (`first_use`).

Every rank has a piece of every parameter, which may be empty. Optimizers that update each element by itself are not
given the empty ones; those that sum norms over the ranks are, so that all of them count the same parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.data_parallel.bucket_comm import Transport, Wait, measure
from weft.data_parallel.buckets import Bucket, Slot, place_in, shared_memory
from weft.metadata import metadata, set_metadata
from weft.sharding.optimizer_check import ELEMENTWISE, is_elementwise
from weft.sharding.sharded_grad import gradient_elsewhere, gradient_like


@dataclass(frozen=True)
class Piece:
    """What a piece is of: elements start to stop of its parameter, in the order of memory; `ranks` hold the others. It
    may be empty: start and stop are alike."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    ranks: Communicator


def piece_of(parameter: torch.Tensor) -> Piece | None:
    """Of which parameter an optimizer's parameter is a piece; None for one that is no piece."""
    return metadata(parameter, "piece")


class _PartPlace(NamedTuple):
    """A piece, its gradient after a reduction, and what the optimizer and the module's parameter get as `.grad`."""

    piece: nn.Parameter
    gradient: torch.Tensor
    of_piece: torch.Tensor
    of_parameter: torch.Tensor


@dataclass(eq=False)
class _BucketPart:
    """A bucket's parameters, and what this rank holds of them.

    Attributes:
        flat: all of them, as the module's parameters lie there; `mine` is this rank's part of it.
        stepped: what the optimizer steps: `mine`, or an fp32 copy of it where gradients are in main_grad.
        gradients: of what is stepped, after a reduction.
        places: of the bucket's parameters.
        known: where each of these lies.
    """

    bucket: Bucket
    flat: torch.Tensor
    mine: torch.Tensor
    stepped: torch.Tensor
    gradients: torch.Tensor
    places: dict[Slot, _PartPlace] = field(default_factory=dict)
    known: dict[Slot, int] = field(default_factory=dict)

    def add(self, reduced: torch.Tensor) -> bool:
        """Adds to the gradients that were not zeroed since the last time; whether there are any."""
        zeroed = [at.gradient for at in self.places.values() if at.piece.grad is None or not at.piece.numel()]
        if len(zeroed) == len(self.places):
            self.gradients.copy_(reduced)
            return False
        for gradient in zeroed:
            gradient.zero_()
        self.gradients.add_(reduced)
        return True


class Shards:
    """The parameters of all buckets as this rank's pieces.

    Attributes:
        under_way: the parts that are being gathered, where `gathers_late`, and what waits for each.
    """

    def __init__(self, buckets: list[Bucket], transport: Transport, gathers_late: bool):
        self._transport, self._ranks, self._gathers_late = transport, transport.ranks, gathers_late
        self._parts = {bucket: self._share(bucket) for bucket in buckets}
        self._part_of = {id(slot.parameter): part for part in self._parts.values() for slot in part.places}
        self.under_way: dict[_BucketPart, Wait] = {}

    def optimizer(self, kind, parameters: Iterable | None, elementwise: bool | None, options: dict):
        """An optimizer of that class over this rank's pieces; see `DataParallel.optimizer`."""
        sums_norms = getattr(kind, "sums_norms_of_pieces", False)
        self._check(kind, True if sums_norms else elementwise)
        pieces = {id(slot.parameter): at.piece for part in self._parts.values() for slot, at in part.places.items()}

        def mine(group: dict) -> dict:
            given = group["params"]
            given = [given] if isinstance(given, torch.Tensor) else list(given)
            named = [one if isinstance(one, tuple) else ("", one) for one in given]
            found = []
            for name, parameter in named:
                piece = pieces.get(id(parameter))
                if piece is None and parameter.requires_grad:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"a parameter {shape} of the optimizer is not of the wrapped module")
                if piece is not None and (piece.numel() or sums_norms):  # None: it is frozen
                    found.append((name, piece))
            names = {"param_names": [name for name, _ in found]} if any(name for name, _ in named) else {}
            return {**group, "params": [piece for _, piece in found], **names}

        groups = list(self._trained() if parameters is None else parameters)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        made = kind([mine(group) for group in groups], **options)
        add = made.add_param_group
        made.add_param_group = lambda group: add(mine(group))
        made.register_step_pre_hook(lambda *_: self.look())
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
                "elementwise=True for another that does, or shard_optimizer=False"
            )

    @torch.no_grad()
    def deliver(self) -> None:
        """Gives each piece its reduced gradient, or adds it to what the optimizer has not zeroed yet. In `.grad` of the
        module's parameters stands what refers to it."""
        for bucket, part in self._parts.items():
            reduced = bucket.parts(self._ranks.world_size)[self._ranks.rank]
            if part.add(reduced):
                measure(part.gradients, bucket)
            for at in part.places.values():
                at.piece.grad = at.of_piece
            for slot in bucket.slots:
                slot.parameter.grad = part.places[slot].of_parameter
                if slot.into_main_grad:
                    slot.place.zero_()

    def zero_grad(self) -> None:
        for part in self._parts.values():
            for at in part.places.values():
                at.piece.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Sends every part to every rank. Parameters are whole when this returns, or after `wait`."""
        for part in reversed(self._parts.values()):  # gradients come last to what forward needs first
            if part.stepped is not part.mine:
                part.mine.copy_(part.stepped)
            parts = list(part.flat.chunk(self._ranks.world_size))
            self.under_way[part] = self._transport.gather(part.mine, parts, self._gathers_late)
            if not self._gathers_late:
                self.wait()

    def wait(self, things: Iterable | None = None) -> None:
        """Until the parameters among these things are whole, or all parameters (None)."""
        if not self.under_way:
            return
        parts = list(self.under_way) if things is None else [self._part_of.get(id(one)) for one in things]
        for part in parts:
            if part in self.under_way:
                self.under_way[part]()
                del self.under_way[part]  # not where the wait was broken off

    @torch.no_grad()
    def look(self) -> None:
        """Before a step: what somebody wrote to elements of a parameter since the last one is what is stepped.

        Raises:
            RuntimeError: a parameter lies elsewhere than when it was wrapped, so that its steps would be lost.
        """
        self.wait()
        for part in self._parts.values():
            for slot, address in part.known.items():
                if slot.parameter.data_ptr() != address:
                    raise RuntimeError(
                        f"shard_optimizer=True: {slot.name!r} was given other memory since it was wrapped, and the "
                        "optimizer's steps would not reach it: write to it in place (copy_), or convert the module "
                        "(.to, .data = ...) before it is wrapped"
                    )
            if part.stepped is not part.mine:
                written = part.stepped.to(part.mine.dtype) != part.mine
                if written.any():
                    part.stepped.copy_(torch.where(written, part.mine, part.stepped))

    @torch.no_grad()
    def reload(self) -> None:
        """The module was loaded: all that is stepped is that, without what fp32 copies knew more."""
        for part in self._parts.values():
            if part.stepped is not part.mine:
                part.stepped.copy_(part.mine)

    def pieces_of(self, bucket: Bucket) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """This rank's pieces of the bucket's parameters, with their gradients."""
        return [(at.piece, at.gradient) for at in self._parts[bucket].places.values()]

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of each bucket's gradients."""
        return [part.gradients for part in self._parts.values()]

    @torch.no_grad()
    def _share(self, bucket: Bucket) -> _BucketPart:
        """Moves the bucket's parameters to where they can be cut like their gradients, and cuts this rank's pieces."""
        first = bucket.slots[0].parameter
        count = bucket.flat.numel()
        flat = shared_memory(count * first.element_size(), first.device, self._ranks).view(first.dtype)
        for slot in bucket.slots:
            place = place_in(flat, slot)
            place.copy_(slot.parameter)
            slot.parameter.data = place
        mine = flat.chunk(self._ranks.world_size)[self._ranks.rank]
        stepped = mine.to(bucket.flat.dtype)
        part = _BucketPart(bucket, flat, mine, stepped, torch.zeros_like(stepped))
        begin = self._ranks.rank * mine.numel()
        for slot in bucket.slots:
            elements = slot.parameter.numel()
            start, stop = (min(max(end - slot.offset, 0), elements) for end in (begin, begin + mine.numel()))
            here = slice(slot.offset + start - begin, slot.offset + stop - begin) if start < stop else slice(0, 0)
            piece = nn.Parameter(stepped[here])
            set_metadata(piece, "piece", Piece(slot.name, slot.parameter, start, stop, self._ranks))
            gradient = part.gradients[here]
            shown = gradient_like(piece, gradient), gradient_elsewhere(slot.parameter, piece)
            part.places[slot] = _PartPlace(piece, gradient, *shown)
            part.known[slot] = slot.parameter.data_ptr()
        return part
