"""Sums of the gradients that the units of a batch give to parameters, and their nodes in autograd's graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from weft.comm.communicator import Communicator
from weft.ops.backward import RankFunction, first_order
from weft.ops.invariant import Node, Units, add_up, plus, sum_over_nodes
from weft.ops.unit_parameters import ParameterOfUnits


class UnitSums:
    """Sums of the gradients that the units of a batch give to some parameters, in one backward.

    Args:
        units: the V units of the batch.
        ranks: ranks that share the batch; each has V / ranks of the units, one after another.
        named: the parameters by name.
        chunk_bytes: bytes of sums that travel together.
    """

    def __init__(self, units: Units, ranks: Communicator, named: Mapping[str, torch.Tensor], chunk_bytes: int):
        self.units, self.ranks, self._chunk_bytes = units, ranks, chunk_bytes
        self.names, self.trained = list(named), list(named.values())
        self.device = next((parameter.device for parameter in self.trained), torch.device("cpu"))
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in self.trained]
        self.begin()

    def begin(self) -> None:
        """Forget all gradients."""
        self.sums: dict[Node, list[torch.Tensor | None]] = {}
        self.absent = torch.zeros(len(self.trained), dtype=torch.int32)

    @property
    def here(self) -> range:
        """Numbers of this rank's units."""
        return self.units.here(self.ranks)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes of the tree that lie here."""
        return self.units.of_rank(self.ranks, self.ranks.rank)

    def put(self, unit: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a unit, in the type of the parameters."""
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(f"invariant: the gradient of {name!r} is {gradient.layout}; it must be dense")
        self.absent += torch.tensor([gradient is None for gradient in gradients], dtype=torch.int32)
        self._add(unit, [None if g is None else g.to(w) for g, w in zip(gradients, self.wide, strict=True)])

    def _add(self, unit: int, gradients: list[torch.Tensor | None]) -> None:
        self.sums[unit, unit + 1] = gradients
        add_up(self.sums, self.units.total, lambda left, right: list(map(plus, left, right)))

    def absences(self) -> str:
        """Return the parameters without a gradient in some unit, as a text. A collective call, once before `total`."""
        for unit in self.here:
            if not any(low <= unit < high for low, high in self.sums):  # no output of it takes part in the loss
                self.absent += 1
                self._add(unit, [None] * len(self.trained))
        counts = self.ranks.all_reduce_(self.absent.to(self.ranks.device_of_numbers(self.device))).tolist()
        return ", ".join(f"{name!r} in {count}" for name, count in zip(self.names, counts, strict=True) if count)

    def total(self) -> list[torch.Tensor]:
        """Return the gradients of the whole batch, in the parameters' types, and begin anew. A collective call."""
        nodes = [self.sums[node] for node in self.nodes]
        self.begin()
        totals = []
        for chunk in self._chunks():
            like = [self.trained[i] for i in chunk]
            local = [[self._zeros(i) if (total := node[i]) is None else total for i in chunk] for node in nodes]
            for i in chunk:
                for node in nodes:
                    node[i] = None
            summed = local[0] if self.ranks.world_size == 1 else self._exchanged(local)
            totals += [x.view(p.shape).to(p.dtype) for x, p in zip(summed, like, strict=True)]
        return totals

    def _zeros(self, i: int) -> torch.Tensor:
        return self.trained[i].new_zeros(self.trained[i].shape, dtype=self.wide[i])

    def _exchanged(self, local: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the sums over ranks of the nodes here; all of them are of one type."""
        sizes = [gradient.numel() for gradient in local[0]]
        flat = torch.cat([gradient.reshape(-1) for node in local for gradient in node])
        return list(sum_over_nodes(self.ranks, self.units, flat.view(len(local), -1, 1)).view(-1).split(sizes))

    def _chunks(self) -> Iterator[list[int]]:
        """Yield the numbers of parameters whose gradients travel together: neighbours of one type."""
        chunk: list[int] = []
        held = 0
        for i, parameter in enumerate(self.trained):
            if chunk and (held >= self._chunk_bytes or self.wide[i] != self.wide[chunk[0]]):
                yield chunk
                chunk, held = [], 0
            chunk.append(i)
            held += parameter.numel() * self.wide[i].itemsize
        if chunk:
            yield chunk


class UnitBatch(UnitSums):
    """Sums of the units' gradients, and the nodes of autograd's graph around them.

    Args:
        units, ranks, named, chunk_bytes: as UnitSums.
        places: (a module's parameters, name, number) of each use of these parameters.
        unused: "zero", or "error" to refuse units without a gradient.
        expect: is called with the parameters before they get their gradients.
    """

    def __init__(
        self,
        units: Units,
        ranks: Communicator,
        named: Mapping[str, torch.Tensor],
        chunk_bytes: int,
        places: list[tuple[dict, str, int]],
        unused: str,
        expect: Callable[[Sequence[torch.Tensor]], None],
    ):
        super().__init__(units, ranks, named, chunk_bytes)
        self._places, self._unused, self._expect = places, unused, expect
        self.of_units: list[ParameterOfUnits] = []  # where all units here run at once
        self._token = _BatchFunction.apply(self, *self.trained)

    @contextmanager
    def parameters_of(self, unit: int) -> Iterator[Sequence[torch.Tensor]]:
        """Give the module the parameters of a unit, and return them, while the context lasts."""
        with self._in_place(_UnitFunction.apply(self, unit, self._token, *[p.detach() for p in self.trained])) as own:
            yield own

    @contextmanager
    def parameters_at_once(self) -> Iterator[Sequence[torch.Tensor]]:
        """Give the module parameters that keep the gradients of all units here apart, while the context lasts."""
        own = _UnitFunction.apply(self, None, self._token, *[p.detach() for p in self.trained])
        first, count = self.here.start, len(self.here)
        nodes = [(low - first, high - first) for low, high in self.nodes]
        self.of_units = [ParameterOfUnits(x, count, nodes) for x in own]
        with self._in_place(own):
            yield own
        for of_units in self.of_units:
            of_units.end()

    @contextmanager
    def _in_place(self, own: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        for x in own:
            x._is_param = True  # type: ignore[attr-defined]  # for isinstance
        for members, name, index in self._places:
            members[name] = own[index]
        try:
            yield own
        finally:
            for members, name, index in self._places:
                members[name] = self.trained[index]

    def _take(self) -> None:
        """Put the gradients of all units here into the tree."""
        found: list[list] = [[] for _ in self.nodes]
        for index, of_units in enumerate(self.of_units):
            sums, missing = of_units.take()
            self.absent[index] += missing
            for of_node, total in zip(found, sums, strict=True):
                of_node.append(total)
        self.sums = dict(zip(self.nodes, found, strict=True))

    def total(self) -> list[torch.Tensor]:
        if self.of_units:
            self._take()
        absences = self.absences()
        if absences and self._unused == "error":
            self.begin()
            raise RuntimeError(
                f"DataParallel: parameters got no gradient in some of {self.units.total} units: {absences}; "
                'unused_parameters="zero" counts these as zeros'
            )
        self._expect(self.trained)
        return super().total()


class _BatchFunction(RankFunction):
    """A token for the units of a batch; the parameters' gradients are sums over all units on all ranks.

    forward   nothing travels
    backward  dp = sum over units of dp_unit, in the tree's order, from the sums that the units' nodes left
    """

    @staticmethod
    def forward(ctx, batch: UnitBatch, *parameters):
        ctx.batch = batch
        return torch.zeros((), device=batch.device)

    @staticmethod
    @first_order
    def backward(ctx, _):
        return None, *ctx.batch.total()


class _UnitFunction(RankFunction):
    """p_unit = p: the parameters of one unit; of all units here if `unit` is None.

    forward   nothing travels
    backward  leaves dp_unit with the batch; functions have left those of several units there
    """

    @staticmethod
    def forward(ctx, batch: UnitBatch, unit: int | None, token, *parameters):
        ctx.batch, ctx.unit = batch, unit
        ctx.set_materialize_grads(False)
        return tuple([parameter.view_as(parameter) for parameter in parameters])

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        if ctx.unit is not None:
            ctx.batch.put(ctx.unit, gradients)
        elif gradients.count(None) < len(gradients):
            raise RuntimeError(f"invariant={ctx.batch.units.total}: a gradient of several units together")
        return None, None, torch.zeros((), device=ctx.batch.device), *[None] * len(gradients)
