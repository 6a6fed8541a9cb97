"""Checks between ranks: what they hold alike is alike, and they are called alike.

Ranks that split layers ("tp"), a sequence ("cp") or a model's stages ("pp") compute one model. Where a sampler gives
each of them its own batch, where weights are drawn again after the split or all ranks load rank 0's file, every shape
is right and the model is not.
"""

import zlib
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from weft.comm.communicator import Communicator
from weft.context_parallel.region import mark_of_bits, sharing_in, sum_of_bits
from weft.sharding.owners import owners_of
from weft.sharding.shard import shard_of

FIRST_CALLS = 3
_DIFFERENCES = "with arguments of different kinds", "one to train and one not", "with different batches"


@torch.no_grad()
def check_same_model(model: nn.Module, ranks: Communicator) -> None:
    """Check that all ranks have the same whole model, before it is split. A collective call.

    Raises:
        ValueError: on every rank.
    """
    sums = {name: sum_of_bits(x) for name, x in model.named_parameters() if not x.is_meta}
    if difference := _difference(ranks, sums):
        shards = ((name, shard_of(parameter)) for name, parameter in model.named_parameters())
        for name in (name for name, shard in shards if shard is not None and shard.communicator == ranks):
            raise ValueError(
                f"parallelize: the model is parallelized already: {name} is split over these ranks. Call it once, with "
                "the whole mesh and a plan of all layers, on a model as it was built"
            )
        raise ValueError(
            f"parallelize: {difference}. Every rank must have the same whole model: seed all ranks alike "
            "(torch.manual_seed), or load the same weights, before you build it"
        )


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Check that what ranks hold alike is the same bits on all of them. A collective call.

    Whole parameters and buffers are compared over the ranks of "tp", all of them over those of "cp", all parameters
    over those of "dp" (where each rank may keep its own running means), copies of tied ones over the stages of "pp".

    Args:
        model: what weft.parallelize, weft.DataParallel, weft.LayerSplit or weft.Pipeline returned.

    Raises:
        ValueError: on every rank of those that differ; names the first tensor, the ranks and how many differ.
    """
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    compared: list[tuple[Communicator, Mapping[str, torch.Tensor], str]] = []
    for ranks in _splitters(model):
        whole = {name: x for name, x in tensors.items() if _splitters_of(x) != ranks}
        compared.append((ranks, whole, "split the layers"))
    sharers = dict.fromkeys(sharing.ranks for sharing in sharing_in(model).values())
    compared += [(ranks, tensors, "share the sequence") for ranks in sharers]
    compared += [(ranks, parameters, "are replicas") for ranks in _replicas(model)]
    for ranks, alike, who in compared:
        if difference := _difference(ranks, {name: sum_of_bits(x) for name, x in alike.items()}):
            raise ValueError(
                f"check_replicas: of the ranks that {who}, {difference}. Something wrote to it on one rank alone, or "
                "its gradients were not summed"
            )
    for ranks in _splitters(model):
        _compare_copies(
            ranks,
            {
                (name, stretch): int(sum_of_bits(x.narrow(shard.dim, start, stop - start)))
                for name, x in parameters.items()
                if (shard := shard_of(x)) is not None and shard.communicator == ranks and shard.cut.replicated
                for stretch, (start, stop) in shard.cut.places(ranks.rank).items()
            },
        )  # rows that several ranks have: KV heads, where these are fewer than ranks
    owned = {name: owners for name, x in parameters.items() if (owners := owners_of(x)) is not None}
    for ranks in dict.fromkeys(owners.ranks for owners in owned.values()):
        tied = [name for name, owners in owned.items() if len(owners.holders) > 1]
        _compare_copies(ranks, {(name, None): int(sum_of_bits(parameters[name])) for name in tied})


def _splitters_of(tensor: torch.Tensor) -> Communicator | None:
    shard = shard_of(tensor)
    return None if shard is None else shard.communicator


def _splitters(model: nn.Module) -> list[Communicator]:
    """The ranks that split the model's layers."""
    return list(dict.fromkeys(ranks for x in model.parameters() if (ranks := _splitters_of(x)) is not None))


def _replicas(model: nn.Module) -> list[Communicator]:
    """The ranks of "dp", as the wrappers among the modules know them."""
    known = (getattr(module, "replicas", None) for module in model.modules())
    return [ranks for ranks in known if isinstance(ranks, Communicator)]


def _difference(ranks: Communicator, sums: dict[str, torch.Tensor]) -> str:
    """The first tensor that ranks do not have alike; "" where there is none."""
    if not sums or ranks.world_size == 1:
        return ""
    rows = ranks.all_gather(torch.stack(list(sums.values())).unsqueeze(0), 0, [1] * ranks.world_size)
    for rank in range(1, ranks.world_size):
        different = (rows[rank] != rows[0]).nonzero().flatten().tolist()
        if different:
            name = list(sums)[different[0]]
            return f"{name} differs between rank 0 and rank {rank} ({len(different)} of {len(sums)} tensors do)"
    return ""


def _compare_copies(ranks: Communicator, sums: dict[tuple[str, Any], int]) -> None:
    """Of copies that some of the ranks have. A collective call where any rank may have one."""
    first_with: dict[tuple[str, Any], tuple[int, int]] = {}
    for rank, its in enumerate(ranks.all_gather_object(sums)):
        for key, total in its.items():
            first, expected = first_with.setdefault(key, (rank, total))
            if total != expected:
                raise ValueError(
                    f"check_replicas: the copies of {key[0]} on ranks {first} and {rank} differ. Something wrote to "
                    "one of them alone, or their gradients were not summed"
                )


@torch.no_grad()
def check_distinct(model: nn.Module) -> None:
    """Check that no two ranks have the same part of a split weight. A collective call.

    Raises:
        ValueError: on every rank that splits the layers.
    """
    for ranks in _splitters(model):
        parts = {
            name: x
            for name, x in model.named_parameters()
            if (shard := shard_of(x)) is not None
            and shard.communicator == ranks
            and not shard.cut.replicated
            and x.dim() > 1  # biases and norms often begin alike
        }
        rows: list[list[int | None]] = ranks.all_gather_object([_mark_of_varied(x) for x in parts.values()])
        for first, second in combinations(range(ranks.world_size), 2):
            same = [
                name
                for name, its, other in zip(parts, rows[first], rows[second], strict=True)
                if its is not None and its == other
            ]
            if same:
                raise ValueError(
                    f"ranks {first} and {second} have the same part of {same[0]} ({len(same)} of {len(parts)} split "
                    "weights): they were drawn alike, or loaded from one rank's file, after weft.parallelize. "
                    "Initialise before it, and load whole weights or by weft.load_checkpoint"
                )


def _mark_of_varied(x: torch.Tensor) -> int | None:
    """None of a constant, which ranks may have alike."""
    return int(mark_of_bits(x)) if x.numel() and bool((x != x.flatten()[0]).any()) else None


class SameCalls:
    """A forward pre-hook, and, as `leave`, a forward hook: the first calls of ranks that compute one model are alike.

    Args:
        groups: the ranks that must be called alike, each with whether they must draw the same random numbers.
        calls: how many are looked at. In the first, and in one after each load_state_dict, split weights are too.
        every: look at replicas in every so many calls that train; 0 is never.
    """

    at_edge = True  # a model in stages has its own

    def __init__(self, groups: Mapping[Communicator, bool], calls: int = FIRST_CALLS, every: int = 0):
        self.groups = {ranks: draw_alike for ranks, draw_alike in groups.items() if ranks.world_size > 1}
        self.left, self.every = calls if self.groups else 0, every
        self._calls, self._weights_checked, self._trained = calls, False, 0
        self._random: list[tuple[bool, int]] = []  # of calls under way: whether ranks differ, and this rank's numbers

    def install(self, called: nn.Module, loaded: nn.Module) -> None:
        """Look at calls of one, and after loads into the other, which it may wrap."""
        called.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        called.register_forward_hook(self.leave, always_call=True)
        loaded.register_load_state_dict_post_hook(self._loaded)

    def __deepcopy__(self, memo):
        return SameCalls(self.groups, self._calls, self.every)

    def _loaded(self, *_) -> None:
        self._weights_checked = False
        self.left = max(self.left, min(1, self._calls)) if self.groups else 0

    def __call__(self, module: nn.Module, args, kwargs) -> None:
        if not torch.compiler.is_compiling():
            self._random.append(self.look(module, type(module).__name__, (args, kwargs)))

    def leave(self, module: nn.Module, args, output) -> None:
        """Also after an error."""
        if not self._random:
            return
        differ, before = self._random.pop()
        if differ and output is not None and _random_numbers() != before:
            raise ValueError(
                f"{type(module).__name__}: ranks that compute one model drew different random numbers, and drop "
                "different elements of what they have whole: seed them alike, without the rank"
            )

    def look(self, module: nn.Module, name: str, tree) -> tuple[bool, int]:
        """Compare one call. A collective call while calls are left to be looked at.

        Returns:
            Whether the ranks' random numbers differ, and this rank's.
        """
        if self.every and module.training and torch.is_grad_enabled():
            self._trained += 1
            if self._trained % self.every == 0:
                check_replicas(module)
        if self.left <= 0:
            return False, 0
        self.left -= 1
        self._refuse_ddp()
        if not self._weights_checked:
            self._weights_checked = True
            check_distinct(module)
        leaves, structure = tree_flatten(tree)
        mode = f"{module.training} {torch.is_grad_enabled()}"
        numbers = [zlib.crc32(text.encode()) for text in (f"{structure} {[_kind(x) for x in leaves]}", mode)]
        values = zlib.crc32(repr([int(mark_of_bits(x)) for x in leaves if isinstance(x, torch.Tensor)]).encode())
        random = _random_numbers()
        differ = False
        for ranks, draw_alike in self.groups.items():
            told: list[tuple] = ranks.all_gather_object((*numbers, values, random))
            for rank, its in enumerate(told):
                for mine, other, what in zip(told[0], its, _DIFFERENCES, strict=False):
                    if mine != other:
                        raise ValueError(
                            f"{name}: ranks 0 and {rank}, which compute one model together, were called {what}. A "
                            'sampler must count the ranks of mesh["dp"] alone: num_replicas=mesh["dp"].size(), '
                            'rank=mesh["dp"].get_local_rank()'
                        )
                differ |= draw_alike and its[-1] != told[0][-1]
        return differ, random

    def _refuse_ddp(self) -> None:
        """torch's DistributedDataParallel knows nothing of shards and stages, and makes all of them rank 0's."""
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None:
            return
        replicas = set(dist.get_process_group_ranks(wrapper.process_group))
        for ranks in self.groups:
            common = sorted(replicas & set(dist.get_process_group_ranks(ranks.group)))
            if len(common) > 1:
                raise ValueError(
                    f"DistributedDataParallel over ranks {common}, which have different parts of the model: it made "
                    "them all the first one's. Build the model again, and wrap it by "
                    'process_group=mesh["dp"].get_group() or by weft.DataParallel(model, group=mesh["dp"])'
                )


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    return x if isinstance(x, bool | int | float | str | None) else type(x)


def _random_numbers() -> int:
    """A number that stands for the states of torch's generators."""
    total = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        total += zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    return total
