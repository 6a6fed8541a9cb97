"""Base class of layers made of whole modules, each on one rank of a group."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.nn.sharded import ShardHolder
from weft.sharding.shard import Shard


class PlacedModules(ShardHolder):
    """Modules by name, each held by one rank. The other ranks have empty parameters and no buffers for it.

    Names in the state_dict are those of all modules; `load_state_dict` takes a whole state_dict.
    """

    def _place_modules(
        self,
        modules: Mapping[str, nn.Module],
        of_unit: Sequence[Mapping[str, torch.Tensor]],
        assignment: Sequence[int],
        ranks: Communicator,
        replicas: Communicator | None = None,
    ) -> None:
        """Add copies of the modules: this rank's units share the originals' memory, the others have none.

        Args:
            of_unit: the parameters and buffers of each unit that stays together, by name.
            assignment: the rank of each unit.
            replicas: as in Shard.
        """
        memo: dict[int, torch.Tensor | None] = {}
        self._absent_buffers: set[str] = set()
        for tensors, rank in zip(of_unit, assignment, strict=True):
            for name, tensor in tensors.items():
                if isinstance(tensor, nn.Parameter):
                    self.shards[name] = replace(_shard(name, tensor, rank, ranks), replicas=replicas)
                    if id(tensor) not in memo:
                        part = self.shards[name].take(tensor.detach())
                        memo[id(tensor)] = nn.Parameter(part, tensor.requires_grad)
                elif rank == ranks.rank:
                    memo[id(tensor)] = tensor
                else:
                    memo[id(tensor)] = None
                    self._absent_buffers.add(name)
        for name, module in copy.deepcopy(dict(modules), memo).items():
            self.add_module(name, module)
        self._absent = [name for name, shard in self.shards.items() if shard.size == 0]
        self._mark()
        self.register_load_state_dict_post_hook(_mark_again)

    def absent_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of other ranks, which are empty here."""
        return [self.get_parameter(name) for name in self._absent]

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            shard.mark(self.get_parameter(name))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in self._absent_buffers:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def reset_parameters(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} draws nothing: draw the modules' parameters before the split")


def tensors_of(tree: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of modules, by their names in the tree."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        module = tree.get_submodule(name)
        for key, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            found[f"{name}.{key}"] = tensor
    return found


def check_apart(of_unit: Sequence[Mapping[str, torch.Tensor]], unit: str) -> None:
    """Raise ValueError if two units share a parameter or buffer."""
    owner: dict[int, tuple[int, str]] = {}
    for number, tensors in enumerate(of_unit):
        for name, tensor in tensors.items():
            first, other = owner.setdefault(id(tensor), (number, name))
            if first != number:
                raise ValueError(f"{other} and {name} are one parameter in two {unit}, which may be on two ranks")


def _mark_again(layer: PlacedModules, _) -> None:
    """Mark the parameters again, since a load with assign=True replaces them."""
    layer._mark()


def _shard(name: str, parameter: torch.Tensor, rank: int, ranks) -> Shard:
    if parameter.dim() == 0:
        raise ValueError(f"{name} has no dimension and cannot be on one rank alone: give it the shape (1,)")
    return Shard.on_one_rank(tuple(parameter.shape), rank, ranks)
