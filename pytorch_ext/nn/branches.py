"""Branches: a block (an Inception block, say) with its branches on different ranks."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise

import torch
from torch import nn

from weft.arguments import check_choice
from weft.comm.registry import Group, communicator
from weft.nn.branch_trace import SideBySide, of_block, of_modules
from weft.nn.sharded import ShardHolder, lost_with
from weft.ops.empty_grad import with_absent
from weft.ops.mappings import gather, total, used_by_parts
from weft.rng import own_random_numbers
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut

_COMBINE = ("concat", "sum")


class Branches(ShardHolder):
    """Branches of one input, each computed by one rank; every rank gets the outputs, joined or summed.

        forward   y = all_gather of the branches' outputs along `dim`, in the branches' order (all_reduce, for a sum)
        backward  dx = all_reduce of the branches' dx

    Only the rank of a branch holds its parameters and buffers. The other ranks have empty parameters and no buffers for
    it. Each rank draws its own random numbers.

    Names in the state_dict are those of the block; `load_state_dict` takes a whole state_dict.

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
    _checked: bool

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
        named = dict(branches) if isinstance(branches, Mapping) else {str(n): m for n, m in enumerate(branches)}
        super().__init__()
        self._place(of_modules(list(named), dim if combine == "concat" else None), named, group, assignment)

    @classmethod
    def from_block(
        cls, block: nn.Module, *, group: Group = None, assignment: Sequence[int] | None = None
    ) -> "Branches":
        """Return the branches of an existing block, placed on the ranks.

        torch.fx must read the block's forward as torch.cat([f(x), g(x), ...], dim) or f(x) + g(x) + .... The block does
        not change; this rank's branches share its memory.

        Raises:
            ValueError: the forward is something else; a parameter or buffer belongs to no branch; the block has hooks.
        """
        if lost := lost_with(block, parameters=False):
            raise ValueError(f"{type(block).__name__} has {lost}, which its replacement would lose: remove that first")
        layer = cls.__new__(cls)
        ShardHolder.__init__(layer)
        layer._place(of_block(block), dict(block.named_children()), group, assignment)
        odd = sorted({*dict(block.named_parameters()), *dict(block.named_buffers())} - layer._known)
        if odd:
            raise ValueError(f"{', '.join(odd)} of {type(block).__name__} is in no branch")
        return layer.train(block.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranks = self.communicator
        shared = used_by_parts(x, ranks) if ranks.world_size > 1 else x
        draws = own_random_numbers(ranks, x.device) if self.training and ranks.world_size > 1 else nullcontext()
        with draws:
            outputs = {number: self._found.branches[number].run(self, shared) for number in self._branches_here()}
        if self._found.dim is None:
            y = total(sum(outputs.values()), ranks)  # type: ignore[arg-type]
        else:
            y = self._concatenated(outputs, self._found.dim)
        return with_absent(y, [self.get_parameter(name) for name in self._absent])

    def _concatenated(self, outputs: dict[int, torch.Tensor], dim: int) -> torch.Tensor:
        joined = torch.cat(list(outputs.values()), dim)
        sizes = torch.zeros(len(self.assignment), dtype=torch.int64)
        for number, output in outputs.items():
            sizes[number] = output.size(dim)
        on_host = self.communicator.host is not self.communicator or not joined.is_cuda
        sizes = self.communicator.all_reduce_(sizes if on_host else sizes.to(joined.device))
        ends = list(pairwise(accumulate(sizes.tolist(), initial=0)))
        ranks = range(self.communicator.world_size)
        cut = Cut.of([[ends[n] for n, owner in enumerate(self.assignment) if owner == rank] for rank in ranks])
        return gather(joined, dim, self.communicator, cut)

    def _branches_here(self) -> list[int]:
        if not self._checked:
            inner = [name for name, module in self.named_modules() if name and isinstance(module, ShardHolder)]
            if inner:
                raise ValueError(f"{', '.join(inner)} is split over ranks inside of a branch, which one rank computes")
            self._checked = True
        return [number for number, rank in enumerate(self.assignment) if rank == self.communicator.rank]

    def _place(self, found: SideBySide, modules: dict[str, nn.Module], group, assignment) -> None:
        """Add copies of the modules: this rank's branches share the originals' memory, the others have none."""
        self.communicator = ranks = communicator(group)
        self._found, self._checked = found, False
        tree = nn.Module()
        for name, module in modules.items():
            tree.add_module(name, module)
        of_branch = [_tensors(tree, branch.modules) for branch in found.branches]
        _check_apart(of_branch)
        weights = [sum(p.numel() for p in tensors.values() if isinstance(p, nn.Parameter)) for tensors in of_branch]
        self.assignment = _assigned(weights, ranks.world_size, assignment)
        memo: dict[int, torch.Tensor | None] = {}
        self._absent_buffers: set[str] = set()
        for tensors, rank in zip(of_branch, self.assignment, strict=True):
            for name, tensor in tensors.items():
                if isinstance(tensor, nn.Parameter):
                    self.shards[name] = _shard(name, tensor, rank, ranks)
                    if id(tensor) not in memo:
                        part = self.shards[name].take(tensor.detach())
                        memo[id(tensor)] = nn.Parameter(part, tensor.requires_grad)
                elif rank == ranks.rank:
                    memo[id(tensor)] = tensor
                else:
                    memo[id(tensor)] = None
                    self._absent_buffers.add(name)
        self._known = {*self.shards, *(name for tensors in of_branch for name in tensors)}
        for name, module in copy.deepcopy(dict(modules), memo).items():
            self.add_module(name, module)
        self._absent = [name for name, shard in self.shards.items() if shard.size == 0]
        self._mark()
        self.register_load_state_dict_post_hook(_mark_again)

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            shard.mark(self.get_parameter(name))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in self._absent_buffers:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def reset_parameters(self) -> None:
        raise NotImplementedError("Branches draws nothing: draw the block's parameters before it is split")

    def extra_repr(self) -> str:
        how = "summed" if self._found.dim is None else f"joined along {self._found.dim}"
        return f"{how}, on ranks {', '.join(map(str, self.assignment))}; this is rank {self.communicator.rank}"


def _mark_again(layer: Branches, _) -> None:
    """Mark the parameters again, since a load with assign=True replaces them."""
    layer._mark()


def _tensors(tree: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of modules, by their names in the tree."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        module = tree.get_submodule(name)
        for key, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            found[f"{name}.{key}"] = tensor
    return found


def _check_apart(of_branch: Sequence[dict[str, torch.Tensor]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for number, tensors in enumerate(of_branch):
        for name, tensor in tensors.items():
            first, other = owner.setdefault(id(tensor), (number, name))
            if first != number:
                raise ValueError(f"{other} and {name} are one parameter in two branches, which may be on two ranks")


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


def _shard(name: str, parameter: torch.Tensor, rank: int, ranks) -> Shard:
    if parameter.dim() == 0:
        raise ValueError(f"{name} has no dimension and cannot be on one rank alone: give it the shape (1,)")
    return Shard.on_one_rank(tuple(parameter.shape), rank, ranks)
