"""Gradients of a pipeline with `invariant=V`: its micro-batches are units of the batch, as those of DataParallel.

A stage's gradients are taken after each backward of a micro-batch, so that they never add up in `.grad`, and go to the
tree over units. A parameter that several stages use has a part of a unit's gradient on each. One process adds these
parts in the order of its backward, in the parameter's type; so do the ranks, before the tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.context_parallel.region import sharing_in
from weft.data_parallel.batch_units import check_units, within_unit
from weft.invariant.unit_sums import UnitSums
from weft.metadata import set_metadata
from weft.ops.invariant import Units
from weft.pipeline.cut import PipelineCut
from weft.pipeline.split_backward import uses_of
from weft.pipeline.stage_boundary import leaves_as_it_is
from weft.pipeline.tied_params import Ties
from weft.rng import generator_states, name_modules
from weft.sharding.sharded_grad import gradient_like, local

_CHUNK_BYTES = 25 << 20  # as DataParallel's bucket_mb


class UnitGradients:
    """Gradients of one step, by micro-batch.

    Args:
        units: the V units of the batch.
        replicas: ranks of "dp".
        stages: this rank's stages, by number.
        named: this rank's parameters by name.
        ties: the parameters that stages of several ranks use.
        device: that of the stages.

    Attributes:
        problems: reasons why one process would have other bits; `finish` raises them on every rank.
    """

    def __init__(
        self,
        units: Units,
        replicas: Communicator,
        stages: Mapping[int, nn.Module],
        named: Mapping[str, nn.Parameter],
        ties: Ties,
        device: torch.device,
    ):
        self._ties, self._here, self._device = ties, units.here(replicas), device
        self.problems: dict[str, None] = {}
        self._of_stage = {number: [p for p in stages[number].parameters() if p.requires_grad] for number in stages}
        self._tie_of = {tie.parameter: tie for tie in ties.ties}
        # Ties first, in their order: it is that of every rank.
        users = {p: list(tie.stages) for p, tie in self._tie_of.items() if p.requires_grad}
        for number, own in self._of_stage.items():
            for parameter in own:
                if parameter not in self._tie_of:
                    users.setdefault(parameter, []).append(number)
        self._stages_of = {parameter: numbers for parameter, numbers in users.items() if len(numbers) > 1}
        self._parts: dict[tuple[nn.Parameter, int], dict[int, torch.Tensor]] = {
            (parameter, unit): {} for parameter in self._stages_of for unit in self._here
        }
        self._names = {p: name for name, p in named.items()}
        self._shared = UnitSums(units, replicas, {self._names[p]: p for p in self._stages_of}, _CHUNK_BYTES)
        self._alone = {
            number: UnitSums(
                units, replicas, {self._names[p]: p for p in own if p not in self._stages_of}, _CHUNK_BYTES
            )
            for number, own in self._of_stage.items()
        }

    def within(self, microbatch: int) -> AbstractContextManager:
        """Return a context for the forward of a micro-batch."""
        return within_unit(self._here[microbatch])

    def watch(self, number: int, outputs, inputs: Sequence) -> None:
        """Note what one process would compute in another way. Call it after a forward of a stage."""
        for x in outputs if isinstance(outputs, tuple) else (outputs,):
            if not leaves_as_it_is(x):
                self._note(f"a value that leaves stage {number} is not contiguous in memory")
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(lambda dx: self._check_gradient(dx, number))
        for parameter in filter(self._stages_of.get, self._of_stage[number]):
            if number < max(self._stages_of[parameter]) and uses_of(parameter, outputs) > 1:
                self._note(f"{self._names[parameter]!r} is used several times in stage {number}, and in a later one")

    def _check_gradient(self, dx: torch.Tensor, number: int) -> None:
        if not dx.is_contiguous():
            self._note(f"the gradient of a value that enters stage {number} is not contiguous in memory")

    def _note(self, problem: str) -> None:
        self.problems[problem] = None

    @contextmanager
    def without_draws(self, name: str) -> Iterator[None]:
        """Note a layer that draws random numbers in another way than by `UnitDraws`: one process would draw others."""
        before = generator_states(self._device)
        yield
        if not all(map(torch.equal, before, generator_states(self._device))):
            self._note(f"{name} draws random numbers")

    @torch.no_grad()
    def take(self, number: int, microbatch: int) -> None:
        """Take the gradients of a stage's backward of a micro-batch out of `.grad`."""
        unit, found = self._here[microbatch], {}
        for parameter in self._of_stage[number]:
            found[parameter] = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None
            parts = self._parts.get((parameter, unit))
            if parts is not None and found[parameter] is not None:
                parts[number] = found[parameter]  # type: ignore[assignment]
        sums = self._alone[number]
        sums.put(unit, [found[parameter] for parameter in sums.trained])  # type: ignore[index]

    @torch.no_grad()
    def finish(self, groups: Sequence[Communicator]) -> None:
        """Set `.grad` to the gradients of the whole batch. A collective call.

        Args:
            groups: the ranks of "pp", then those of "dp".

        Raises:
            RuntimeError: one process would have other bits, or a unit has no gradient for a parameter; on every rank.
        """
        for unit in self._here:
            self._shared.put(unit, [self._sum_of_parts(p, unit) for p in self._shared.trained])  # type: ignore[arg-type]
        everything = [*self._alone.values(), self._shared]
        absences = [text for sums in everything if (text := sums.absences())]
        if absences:
            self._note(f"parameters got no gradient in some of the units: {', '.join(absences)}")
        if found := _of_all_ranks(self.problems, groups, self._device):
            raise RuntimeError(
                f"Pipeline: invariant={self._shared.units.total}: {'; '.join(found)}. One process would compute other "
                "bits, or refuse it: change these layers, or cut elsewhere (balance=[...])"
            )
        for sums in everything:
            for parameter, gradient in zip(sums.trained, sums.total(), strict=True):
                parameter.grad = gradient_like(parameter, gradient)

    def _sum_of_parts(self, parameter: nn.Parameter, unit: int) -> torch.Tensor | None:
        """Return a unit's gradient from those of all stages, the last stage first, as backward adds them."""
        parts = self._parts.pop((parameter, unit))
        if parameter in self._tie_of:
            parts = self._ties.parts_of_all(self._tie_of[parameter], parts)
        total = None
        for number in sorted(parts, reverse=True):
            total = parts[number] if total is None else total + parts[number]
        return total


def _of_all_ranks(notes: Mapping[str, None], groups: Sequence[Communicator], device: torch.device) -> list[str]:
    """Return the notes of all ranks of all groups. A collective call."""
    count = torch.tensor([len(notes)], device=groups[0].device_of_numbers(device))
    for ranks in groups:
        ranks.all_reduce_(count)
    for ranks in groups if count else ():
        notes = {note: None for of_rank in ranks.all_gather_object(list(notes)) for note in of_rank}
    return list(notes)


def check_alike(units: int, batch: int, groups: Sequence[Communicator], device: torch.device) -> None:
    """Check that all ranks have batches of one size, and compute in as many threads. A collective call.

    Raises:
        ValueError: they do not; on every rank.
    """
    found = torch.tensor([[batch, torch.get_num_threads()]], device=groups[0].device_of_numbers(device))
    for ranks in groups:
        found = ranks.all_gather(found, 0, [len(found)] * ranks.world_size)
    for of_ranks, thing in zip(found.cpu().unique(dim=0).t().tolist(), ("batches", "threads"), strict=True):
        if len(set(of_ranks)) > 1:
            numbers = ", ".join(map(str, sorted(set(of_ranks))))
            raise ValueError(
                f"Pipeline: invariant={units}: the ranks have {numbers} as the size of their {thing}, and bits follow "
                "it: give every rank of dp as large a batch, and set OMP_NUM_THREADS alike in every process"
            )


def microbatches_in_units(
    model: nn.Module, along: Mapping, units: int, microbatches: int | None, reduction: str
) -> int:
    """Return the number of micro-batches of a pipeline, the units of each rank of "dp".

    Raises:
        ValueError: a mesh, model or option that has no form with invariant.
    """
    if "dp" not in along:
        raise ValueError(
            f'Pipeline: invariant={units}: the mesh has no dimension "dp", which shares the units out; give the mesh '
            "of weft.init_mesh, where its size may be 1"
        )
    sharing = sharing_in(model).get("")
    if "cp" in along and along["cp"].size() > 1 and (sharing is None or sharing.units is None):
        raise ValueError(
            f'Pipeline: invariant={units} with "cp" needs a sequence in units: context={{"units": ...}} of '
            "weft.parallelize"
        )
    if reduction != "mean":
        raise ValueError(f"Pipeline: invariant={units}: the loss is the mean over units, not reduction={reduction!r}")
    replicas = communicator(along["dp"])
    check_units(model, replicas, units)
    each = units // replicas.world_size
    if microbatches not in (None, each):
        raise ValueError(
            f"Pipeline: invariant={units}: a micro-batch is a unit, and each of {replicas.world_size} ranks of dp has "
            f"{each}, not microbatches={microbatches}: leave microbatches out, or choose another invariant"
        )
    return each


def name_modules_in_stages(cut: PipelineCut) -> None:
    """Name the modules as one process does, for random numbers that follow from the name.

    A module that several stages call gets no name, because no stage knows how often it was called before. If it draws
    random numbers, `UnitGradients.without_draws` finds that.
    """
    name_modules(cut.model)
    first_stage: dict[nn.Module, int] = {}
    for called, stage in cut.calls():
        for module in called.modules():
            if first_stage.setdefault(module, stage) != stage:
                set_metadata(module, "name", None)
