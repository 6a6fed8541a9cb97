"""Checks between ranks: replicated tensors are equal, and the ranks of one model get equal calls.

Ranks that split layers ("tp"), a sequence ("cp") or a model's stages ("pp") compute one model. Some mistakes keep every
shape right and make the model wrong: a sampler that gives each of these ranks its own batch, weights that are drawn
again after the split, or all ranks loading rank 0's file.
"""

import weakref
import zlib
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from weft.arguments import check_choice, check_module
from weft.comm.communicator import Communicator
from weft.comm.purpose import calls_for
from weft.context_parallel.region import FIRST_CALLS, sharing_in
from weft.forward import remove_hooks
from weft.ops.backward import refuse_transforms
from weft.sharding.bits import mark_of_bits, sum_of_bits
from weft.sharding.owners import owners_of
from weft.sharding.quantized import values_of
from weft.sharding.shard import shard_of, split_over
from weft.sharding.sharded_grad import local

CHECKS = ("first", "always", "off")
_SAME_EXPERTS = "have the same experts"
_DIFFERENCES = "with arguments of different kinds", "one to train and one not", "with different batches"


@torch.no_grad()
def check_same_model(model: nn.Module, ranks: Communicator) -> None:
    """Check that all ranks have the same whole model, before it is split. A collective call.

    Raises:
        ValueError: the models differ; raised on every rank.
    """
    sums = {name: sum_of_bits(x) for name, x in model.named_parameters() if not x.is_meta}
    if difference := _difference(ranks, sums):
        kinds = ranks.all_gather_object({name: (tuple(x.shape), x.dtype) for name, x in model.named_parameters()})
        for rank, its in zip(ranks.global_ranks, kinds, strict=True):
            for name, kind in kinds[0].items():
                if its.get(name, kind) != kind:
                    first, other = (f"{dtype} {list(shape)}" for shape, dtype in (kind, its[name]))
                    raise ValueError(
                        f"parallelize: {name} is {first} on rank {ranks.global_ranks[0]} and {other} on rank {rank}. "
                        "Every rank must have the same whole model"
                    )
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
def check_same_draw(drawn: Mapping[str, torch.Tensor], ranks: Communicator) -> None:
    """Check that all ranks have drawn the same whole tensors. A collective call.

    Raises:
        ValueError: they differ; raised on every rank.
    """
    if difference := _difference(ranks, {name: sum_of_bits(x) for name, x in drawn.items() if not x.is_meta}):
        raise ValueError(f"{difference}: seed all ranks alike, without the rank (torch.manual_seed), before the draw")


@calls_for("weft.check_replicas, which every rank calls")
@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Check that replicated tensors have the same bits on all their ranks. A collective call.

    The check compares:
        over "tp": whole parameters and buffers, and rows that several ranks have;
        over "cp": all parameters and buffers, except experts that these ranks split, and sharded parameters;
        over "dp": all parameters (each rank may keep its own running means); of experts over "ep", those that two
            ranks have;
        over "pp": copies of tied parameters.

    Args:
        model: the result of weft.parallelize, weft.DataParallel, weft.LayerSplit or weft.Pipeline.

    Raises:
        ValueError: tensors differ; raised on every rank of the group. The message names the first tensor and two
            ranks and, for whole tensors, says how many differ.

    Examples:
        >>> model = weft.DataParallel(nn.Linear(4, 4))
        >>> weft.check_replicas(model)
    """
    check_module("check_replicas", model)
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    compared: list[tuple[Communicator, Mapping[str, torch.Tensor], str]] = []
    apart = {name: shard.replicas for name, x in parameters.items() if (shard := shard_of(x)) and shard.replicas}
    over_ep = {shard_of(parameters[name]).communicator for name in apart}  # type: ignore[union-attr]
    for ranks in _splitters(model):
        if ranks in over_ep:  # they have tokens of their own, so they are replicas of all else
            continue
        whole = {name: x for name, x in tensors.items() if _splitters_of(x) != ranks and name not in apart}
        compared.append((ranks, whole, "split the layers"))
    sharers = dict.fromkeys(sharing.ranks for sharing in sharing_in(model).values())
    for ranks in sharers:
        shared = {name: x for name, x in tensors.items() if not split_over(x, ranks) and not isinstance(x, DTensor)}
        compared.append((ranks, shared, "share the sequence"))
    replicated = {name: x for name, x in parameters.items() if name not in apart and not isinstance(x, DTensor)}
    compared += [(ranks, replicated, "are replicas") for ranks in _replicas(model)]
    for ranks in dict.fromkeys(apart.values()):
        of_ranks = {
            name: x
            for name, others in apart.items()
            if others == ranks and not isinstance(x := parameters[name], DTensor)
        }
        compared.append((ranks, of_ranks, _SAME_EXPERTS))
    for ranks, alike, role in compared:
        difference = _difference(ranks, {name: sum_of_bits(x) for name, x in alike.items()})
        for all_ranks in _replicas(model) if role == _SAME_EXPERTS else []:  # ranks with other experts raise too
            difference = next(filter(None, all_ranks.all_gather_object(difference)), "")
        if difference:
            raise ValueError(
                f"check_replicas: of the ranks that {role}, {difference}. Something wrote to it on one rank alone, or "
                "its gradients were not summed"
            )
    for ranks in _splitters(model):
        _compare_copies(
            ranks,
            {
                (name, stretch): int(sum_of_bits(whole.narrow(shard.dim, start, stop - start)))
                for name, x in parameters.items()
                if (shard := shard_of(x)) is not None and shard.communicator == ranks and shard.replicated
                for whole in [x.full_tensor() if isinstance(x, DTensor) else x]
                for stretch, (start, stop) in shard.cut.places(ranks.rank).items()
            },
        )  # rows that several ranks have: KV heads, if these are fewer than ranks
    owned = {name: owners for name, x in parameters.items() if (owners := owners_of(x)) is not None}
    for ranks in dict.fromkeys(owners.ranks for owners in owned.values()):
        tied = [name for name, owners in owned.items() if len(owners.holders) > 1]
        _compare_copies(ranks, {(name, None): int(sum_of_bits(parameters[name])) for name in tied})


def _splitters_of(tensor: torch.Tensor) -> Communicator | None:
    shard = shard_of(tensor)
    return None if shard is None else shard.communicator


def _splitters(model: nn.Module) -> list[Communicator]:
    """Return the groups of ranks that split the model's layers."""
    return list(dict.fromkeys(ranks for x in model.parameters() if (ranks := _splitters_of(x)) is not None))


def _replicas(model: nn.Module) -> list[Communicator]:
    """Return the groups of ranks of "dp", from the wrappers among the modules."""
    known = (getattr(module, "replicas", None) for module in model.modules())
    return [ranks for ranks in known if isinstance(ranks, Communicator)]


def _difference(ranks: Communicator, sums: dict[str, torch.Tensor]) -> str:
    """Describe the first tensor that differs between ranks; "" if there is none."""
    if not sums or ranks.world_size == 1:
        return ""
    own = torch.stack(list(sums.values())).unsqueeze(0)
    rows = ranks.all_gather(own.to(ranks.device_of_numbers(own.device)), 0, [1] * ranks.world_size)
    for rank in range(1, ranks.world_size):
        different = (rows[rank] != rows[0]).nonzero().flatten().tolist()
        if different:
            name = list(sums)[different[0]]
            first, other = ranks.global_ranks[0], ranks.global_ranks[rank]
            return f"{name} differs between rank {first} and rank {other} ({len(different)} of {len(sums)} tensors do)"
    return ""


def _compare_copies(ranks: Communicator, sums: dict[tuple[str, Any], int]) -> None:
    """Compare copies that only some of the ranks have. A collective call, also for ranks without a copy."""
    first_with: dict[tuple[str, Any], tuple[int, int]] = {}
    for rank, its in zip(ranks.global_ranks, ranks.all_gather_object(sums), strict=True):
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
        ValueError: two ranks have the same part; raised on every rank that splits the layers.
    """
    for ranks in _splitters(model):
        parts = {
            name: x
            for name, x in model.named_parameters()
            if (shard := shard_of(x)) is not None
            and shard.communicator == ranks
            and not shard.replicated
            and x.dim() > 1  # biases and norms often start with equal values
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
                    f"ranks {ranks.global_ranks[first]} and {ranks.global_ranks[second]} have the same part of "
                    f"{same[0]} ({len(same)} of {len(parts)} split weights): they were drawn alike, or loaded from one "
                    "rank's file, after weft.parallelize. Initialise before it, and load whole weights or by "
                    "weft.load_checkpoint"
                )


def _mark_of_varied(x: torch.Tensor) -> int | None:
    """Return the tensor's mark; None for one of at most two values (a constant, an identity), which ranks may share."""
    x = local(values_of(x))
    others = x[x != x.flatten()[0]] if x.numel() else x.flatten()
    return int(mark_of_bits(x)) if others.numel() and bool((others != others[0]).any()) else None


class SameCalls:
    """Check of calls: the ranks that compute one model must get equal ones.

    The object is a forward pre-hook, and its `leave` is a forward hook. With checks="first" both are removed after
    FIRST_CALLS calls. The split weights are checked in the first call, and in one call after each load_state_dict.

    Args:
        groups: the ranks that must get equal calls, to whether they must also draw the same random numbers.
        checks: as in `weft.parallelize`.
    """

    def __init__(self, groups: Mapping[Communicator, bool], checks: str = "first"):
        check_choice("checks", checks, CHECKS)
        self.groups = {ranks: draw_alike for ranks, draw_alike in groups.items() if ranks.world_size > 1}
        self.checks, self._weights_checked = checks, False
        self.left = FIRST_CALLS if self.groups and checks != "off" else 0
        # of calls under way: whether the ranks' random states differ, and this rank's
        self._random: list[tuple[bool, int]] = []
        self._called: weakref.ref[nn.Module] | None = None
        self._removed = False  # the hooks, after the first calls

    def install(self, called: nn.Module, loaded: nn.Module) -> None:
        """Check the calls of `called`, and check weights again after loads into `loaded`, which it may wrap."""
        if self.checks != "off":
            self._hook(called)
            loaded.register_load_state_dict_post_hook(self._loaded)

    def _hook(self, called: nn.Module) -> None:
        if self.left or self.checks == "always":
            self._removed = False
            called.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
            called.register_forward_hook(self.leave, always_call=True)

    def __deepcopy__(self, memo):
        made = SameCalls(self.groups, self.checks)
        made._removed = self._removed
        return made

    def _loaded(self, module: nn.Module, *_) -> None:
        self._weights_checked = False
        self.left = max(self.left, 1) if self.groups else 0
        if self._removed:  # a copy knows no module that was called
            self._hook((self._called and self._called()) or module)

    def __call__(self, module: nn.Module, args, kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        if self.left <= 0 and self.checks == "first":
            self._removed = True
            remove_hooks(module, self, self.leave)
            return
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(type(module).__name__)
        self._called = weakref.ref(module)
        self._random.append(self.look(module, type(module).__name__, (args, kwargs)))

    def leave(self, module: nn.Module, args, output) -> None:
        """Check the random numbers that the call drew. Torch runs this hook also after an error."""
        if not self._random:
            return
        differ, before = self._random.pop()
        if differ and output is not None and _random_numbers() != before:
            raise ValueError(
                f"{type(module).__name__}: ranks that compute one model drew different random numbers, and drop "
                "different elements of whole tensors: seed them alike, without the rank"
            )

    def look(self, module: nn.Module, name: str, tree) -> tuple[bool, int]:
        """Compare one call over the ranks. A collective call while calls are left to check.

        Returns:
            Whether the ranks' random states differ, and the checksum of this rank's.
        """
        if self.checks == "always" and module.training and torch.is_grad_enabled():
            check_replicas(module)
        if self.left <= 0 and not (self.checks == "always" and self.groups):
            return False, 0
        self.left -= 1
        if empty := [name for name, x in module.named_parameters() if x.is_meta]:
            raise ValueError(
                f"{name}: {empty[0]} is on the meta device, without values: model.to_empty(device=...), and load them "
                "by weft.load_checkpoint or weft.load_safetensors, before a call"
            )
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
            per_rank: list[tuple] = ranks.all_gather_object((*numbers, values, random))
            for rank, its in zip(ranks.global_ranks, per_rank, strict=True):
                for first, other, difference in zip(per_rank[0], its, _DIFFERENCES, strict=False):
                    if first != other:
                        raise ValueError(
                            f"{name}: ranks {ranks.global_ranks[0]} and {rank}, which compute one model together, were "
                            f"called {difference}. "
                            'A sampler must count the ranks of mesh["dp"] alone: num_replicas=mesh["dp"].size(), '
                            'rank=mesh["dp"].get_local_rank()'
                        )
                differ |= draw_alike and its[-1] != per_rank[0][-1]
        return differ, random

    def _refuse_ddp(self) -> None:
        """Raise if torch's DistributedDataParallel spans these ranks. It copies rank 0's shards to all of them."""
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
                    'process_group=mesh["dp"].get_group() or by weft.DataParallel(model, group=mesh["dp"]); with '
                    "transformers' Trainer, pass **weft.adapters.trainer.settings(mesh, ...) to it"
                )


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    return x if isinstance(x, bool | int | float | str | None) else type(x)


def _random_numbers() -> int:
    """Return a checksum of the states of torch's generators."""
    total = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        total += zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    return total
