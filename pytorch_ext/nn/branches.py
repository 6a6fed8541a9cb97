"""Branches: modules with one input, as in an Inception block, on different ranks."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise

import torch
from torch import nn

from weft.arguments import check_choice
from weft.comm.registry import Group, communicator
from weft.nn.placed import PlacedModules, check_apart, tensors_of
from weft.nn.sharded import ShardHolder
from weft.ops.empty_grad import with_absent
from weft.ops.mappings import gather, total, used_by_parts
from weft.rng import own_random_numbers
from weft.sharding.sizes import Cut

_COMBINE = ("concat", "sum")


class Branches(PlacedModules):
    """Branches of one input, each computed by one rank; every rank gets the outputs, joined or summed.

        forward   y = all_gather of the branches' outputs along `dim`, in the branches' order (all_reduce, for a sum)
        backward  dx = all_reduce of the branches' dx

    Only the rank of a branch holds its parameters and buffers. The other ranks have empty parameters and no buffers for
    it. Each rank draws its own random numbers.

    `load_state_dict` takes a whole state_dict.

    Args:
        branches: modules, or modules by name; each takes the input and returns a tensor.
        combine: "concat" or "sum".
        dim: the dimension along which outputs are joined; their sizes along it may differ.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        assignment: the rank of each branch. By default the ranks get about equal numbers of parameters, with the
            largest branches placed first.

    Raises:
        ValueError: fewer branches than ranks; an assignment that leaves a rank without a branch; a parameter without
            dimensions; two branches that share a parameter; a group without this rank.
    """

    assignment: tuple[int, ...]

    def __init__(
        self,
        branches: Iterable[nn.Module] | Mapping[str, nn.Module],
        *,
        combine: str = "concat",
        dim: int = 1,
        group: Group = None,
        assignment: Sequence[int] | None = None,
    ):
        check_choice("Branches: combine", combine, _COMBINE)
        super().__init__()
        self.communicator = ranks = communicator(group)
        self._combine, self._dim, self._checked = combine, dim, False
        named = dict(branches) if isinstance(branches, Mapping) else {str(n): m for n, m in enumerate(branches)}
        tree = nn.Module()
        for name, module in named.items():
            tree.add_module(name, module)
        of_branch = [tensors_of(tree, [name]) for name in named]
        check_apart(of_branch, "branches")
        weights = [sum(p.numel() for p in tensors.values() if isinstance(p, nn.Parameter)) for tensors in of_branch]
        self.assignment = _assigned(weights, ranks.world_size, assignment)
        self._names = list(named)
        self._place_modules(named, of_branch, self.assignment, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranks = self.communicator
        shared = used_by_parts(x, ranks) if ranks.world_size > 1 else x
        draws = own_random_numbers(ranks, x.device) if self.training and ranks.world_size > 1 else nullcontext()
        with draws:
            outputs = {number: self.get_submodule(self._names[number])(shared) for number in self._branches_here()}
        y = total(sum(outputs.values()), ranks) if self._combine == "sum" else self._concatenated(outputs)
        return with_absent(y, self.absent_parameters())

    def _concatenated(self, outputs: dict[int, torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(list(outputs.values()), self._dim)
        where = self.communicator.device_of_numbers(joined.device)
        sizes = torch.zeros(len(self.assignment), dtype=torch.int64, device=where)
        for number, output in outputs.items():
            sizes[number] = output.size(self._dim)
        sizes = self.communicator.all_reduce_(sizes)
        ends = list(pairwise(accumulate(sizes.tolist(), initial=0)))
        ranks = range(self.communicator.world_size)
        cut = Cut.of([[ends[n] for n, owner in enumerate(self.assignment) if owner == rank] for rank in ranks])
        return gather(joined, self._dim, self.communicator, cut)

    def _branches_here(self) -> list[int]:
        if not self._checked:
            inner = [name for name, module in self.named_modules() if name and isinstance(module, ShardHolder)]
            if inner:
                raise ValueError(f"{', '.join(inner)} is split over ranks inside of a branch, which one rank computes")
            self._checked = True
        return [number for number, rank in enumerate(self.assignment) if rank == self.communicator.rank]

    def extra_repr(self) -> str:
        how = "summed" if self._combine == "sum" else f"joined along {self._dim}"
        return f"{how}, on ranks {', '.join(map(str, self.assignment))}; this is rank {self.communicator.rank}"


def _assigned(weights: Sequence[int], world: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the rank of each branch."""
    count = len(weights)
    if count < world:
        raise ValueError(
            f"{count} branches cannot be placed on {world} ranks; every rank needs at least one. Use a group of at "
            f"most {count} ranks."
        )
    if given is not None:
        if len(given) != count or set(given) != set(range(world)):
            raise ValueError(
                f"assignment={tuple(given)} must name a rank for each of the {count} branches, and each of the "
                f"{world} ranks"
            )
        return tuple(given)
    loads = [(0, 0, rank) for rank in range(world)]
    found = [0] * count
    for number in sorted(range(count), key=lambda number: -weights[number]):
        load, branches, rank = min(loads)
        found[number] = rank
        loads[rank] = (load + weights[number], branches + 1, rank)
    return tuple(found)
