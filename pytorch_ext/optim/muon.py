"""Muon: momentum, orthogonalised matrix by matrix (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.data_parallel.sharded_optimizer import piece_of
from weft.optim.layerwise import OfWholeParameters
from weft.sharding.shard import Shard, shard_of
from weft.sharding.sharded_grad import local


class Muon(OfWholeParameters):
    """torch.optim.Muon for matrices that lie on several ranks, and AdamW for the other parameters.

        optimizer = weft.Muon([
            {"params": matrices},
            {"params": others, "use_muon": False, "lr": 3e-4},
        ], lr=0.02)

    The steps are those of torch.optim.Muon and AdamW on the unsplit model. Momentum stays where the gradients are. Each
    matrix is made whole on one rank, which orthogonalises it, and its ranks get their parts of the result. Matrices are
    dealt out so that every rank has about the same work. They travel in bf16, the type in which torch orthogonalises.

    Args:
        params: parameters, or groups with options of their own. Matrices [rows, columns]; or [matrices, rows, columns],
            as fused experts have them. A group with use_muon=False may have any parameters, AdamW steps them. With
            a sharded optimizer: `model.optimizer(weft.Muon, groups, ...)`.
        lr: learning rate.
        weight_decay: factor of lr and the parameter, taken off it.
        momentum: decay rate of the mean of gradients.
        nesterov: use the gradient together with the mean.
        ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon.
        parts: rows of each matrix in a fused parameter (query, key and value), which are orthogonalised apart. None:
            the parameter is one matrix.
        use_muon: False steps by AdamW.
        betas, adamw_eps: options of AdamW.
        replicas: ranks that have the same parameters and gradients, and share the work (`mesh["dp"]`, without a sharded
            optimizer). None: each does all of it.

    Raises:
        ValueError: an option is out of its range, or a parameter is not made of matrices.

    Examples:
        >>> layer = nn.Linear(8, 4)
        >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "use_muon": False, "lr": 1e-3}]
        >>> optimizer = weft.Muon(groups, lr=0.02)
        >>> layer(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        parts: Sequence[int] | None = None,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        replicas: Group = None,
    ):
        options: dict[str, Any] = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        options |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        torch.optim.Muon([torch.empty(1, 1)], lr, **options)  # checks them
        options |= {"lr": lr, "parts": parts, "use_muon": use_muon, "betas": betas, "adamw_eps": adamw_eps}
        self._replicas = None if replicas is None else communicator(replicas)
        self._dealt: dict[torch.Tensor, _Matrices] = {}
        self._dealt_of: list[tuple] = []
        super().__init__(params, options)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"] if group["use_muon"] else ():
            shape, parts = _whole_shape(parameter), group["parts"]
            if len(shape) not in (2, 3):
                raise ValueError(
                    f"Muon steps matrices, and a parameter has the shape {tuple(shape)}: put vectors, and kernels of "
                    'convolutions, in a group with "use_muon": False, which AdamW steps'
                )
            if parts is not None and sum(parts) != shape[-2]:
                raise ValueError(
                    f"Muon: parts={parts} must add up to the {shape[-2]} rows of the matrix {tuple(shape)}"
                )

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_replicas": self._replicas, "_dealt": {}, "_dealt_of": []}

    def _step(self) -> None:
        updates: dict[torch.Tensor, torch.Tensor] = {}
        group_of: dict[torch.Tensor, dict] = {}
        for group in self.param_groups:
            given = self._given(group)
            if not group["use_muon"]:
                self._step_by_adamw(group, given)
                continue
            for x, gradient in given.items():
                updates[x], group_of[x] = self._direction(group, x, gradient), group
        those = [(id(x), group["parts"]) for x, group in group_of.items()]
        if those != self._dealt_of:
            self._dealt_of = those
            self._dealt = _deal({x: _result_of(x, group) for x, group in group_of.items()}, self._replicas)
        wholes = _to_owners(self._dealt, updates)
        for parameter, whole in wholes[-1].items():
            dealt = self._dealt[parameter]
            wholes[-1][parameter] = _orthogonal(group_of[parameter], whole.view(dealt.shape), dealt.result)
        for parameter, update in _from_owners(self._dealt, wholes).items():
            here, group = local(parameter.detach()), group_of[parameter]
            lr, shape = float(group["lr"]), self._dealt[parameter].shape
            here.mul_(1 - lr * group["weight_decay"])
            if group["parts"] is None:  # else the update is scaled already
                lr = _adjust_lr(lr, group["adjust_lr_fn"], torch.Size(shape[-2:]))
            here.add_(update.view(here.shape), alpha=-lr)

    def _direction(self, group: dict, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add a gradient to its mean; return this rank's elements of what is to be orthogonalised, in bf16."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=gradient.dtype)
        mean, decay = local(state["momentum_buffer"]), group["momentum"]
        mean.lerp_(gradient, 1 - decay)
        update = gradient.lerp(mean, decay) if group["nesterov"] else mean
        return update.to(torch.bfloat16, copy=True).reshape(-1)

    def _step_by_adamw(self, group: dict, given: dict[nn.Parameter, torch.Tensor]) -> None:
        for x, gradient in given.items():
            if not self.state[x]:
                first = torch.tensor(0.0), *(torch.zeros_like(x, dtype=gradient.dtype) for _ in range(2))
                self.state[x].update(zip(("step", "exp_avg", "exp_avg_sq"), first, strict=True))
        steps, means, squares = (
            [local(self.state[x][key]) for x in given] for key in ("step", "exp_avg", "exp_avg_sq")
        )
        weights = [local(x.detach()) for x in given]
        beta1, beta2 = group["betas"]
        options = {"beta1": beta1, "beta2": beta2, "eps": group["adamw_eps"], "weight_decay": group["weight_decay"]}
        options |= {"lr": float(group["lr"]), "amsgrad": False, "maximize": False}
        adamw(weights, list(given.values()), means, squares, [], steps, foreach=True, **options)


def _whole_shape(parameter: torch.Tensor) -> Sequence[int]:
    piece = piece_of(parameter)
    base = parameter if piece is None else piece.parameter
    shard = shard_of(base)
    return base.shape if shard is None else shard.global_shape


def _result_of(parameter: torch.Tensor, group: dict) -> torch.dtype:
    return torch.bfloat16 if group["parts"] is None else torch.promote_types(parameter.dtype, torch.float32)


def _orthogonal(group: dict, whole: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """Return matrices, [rows, columns] or a batch of such, each orthogonalised; scaled if the group has parts."""
    done = [whole.new_empty([0, whole.size(-1)], dtype=result)]
    for matrix in whole.view(-1, *whole.shape[-2:]).unbind():
        for rows in matrix.split(list(group["parts"] or [len(matrix)])):
            made = _zeropower_via_newtonschulz(rows, group["ns_coefficients"], group["ns_steps"], group["eps"])
            scale = 1.0 if group["parts"] is None else _adjust_lr(1.0, group["adjust_lr_fn"], rows.shape)
            done.append(made if scale == 1.0 else made.to(result) * scale)
    return torch.cat(done).view(-1)


@dataclass
class _Level:
    """Ranks that have a matrix together: one way from the parts of each to all of it on one.

    Attributes:
        sizes: number of elements that each rank has. Copies have all of them.
        shard: how the parts are cut. None: they are stretches of the elements, in rank order, or copies.
    """

    ranks: Communicator
    sizes: list[int]
    copies: bool = False
    shard: Shard | None = None

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)) if self.shard is None else self.shard.join(parts).view(-1)

    def cut(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the elements of each rank."""
        if self.copies:
            return [whole] * self.ranks.world_size
        if self.shard is None:
            return whole.split(self.sizes)
        shaped = whole.view(self.shard.global_shape)
        return [self.shard.take(shaped, rank).reshape(-1) for rank in range(self.ranks.world_size)]


@dataclass
class _Matrices:
    """The matrices of a parameter.

    Attributes:
        shape: [rows, columns], or [matrices, rows, columns], on the rank that orthogonalises them.
        levels: the ranks that have parts of them, from this rank's elements to all elements.
        result: type of the results. If it is not bf16, the owner scales them, by their different numbers of rows.
        owner: the rank at each level that gets all elements of it.
    """

    shape: tuple[int, ...]
    levels: list[_Level]
    result: torch.dtype
    owner: tuple[int, ...] = ()

    @property
    def cost(self) -> int:
        rows, columns = sorted(self.shape[-2:])
        return prod(self.shape[:-2]) * rows * rows * (rows + columns)


def _deal(parameters: dict[torch.Tensor, torch.dtype], replicas: Communicator | None) -> dict[torch.Tensor, _Matrices]:
    """Choose the rank that orthogonalises each matrix, the same on every rank. A collective call.

    Args:
        parameters: each, with the type of its results.
    """
    pieces: dict[Communicator, list[torch.Tensor]] = {}
    for x in parameters:
        if (piece := piece_of(x)) is not None:
            pieces.setdefault(piece.ranks, []).append(x)
    sizes: dict[torch.Tensor, list[int]] = {}
    for ranks, those in pieces.items():
        here = torch.tensor(
            [[local(x.detach()).numel() for x in those]], device=ranks.device_of_numbers(those[0].device)
        )
        sizes |= zip(those, ranks.all_gather(here, 0, [1] * ranks.world_size).t().tolist(), strict=True)
    dealt = {x: _Matrices(*_levels_of(x, sizes.get(x), replicas), result) for x, result in parameters.items()}
    load: dict[tuple[Communicator, ...], dict[tuple[int, ...], int]] = {}
    for matrices in sorted(dealt.values(), key=lambda each: -each.cost):
        groups = tuple(level.ranks for level in matrices.levels)
        places = product(*(range(ranks.world_size) for ranks in groups))
        of_ranks = load.setdefault(groups, dict.fromkeys(places, 0))
        matrices.owner = min(of_ranks, key=of_ranks.__getitem__)
        of_ranks[matrices.owner] += matrices.cost
    return dealt


def _levels_of(
    x: torch.Tensor, sizes: list[int] | None, replicas: Communicator | None
) -> tuple[tuple[int, ...], list[_Level]]:
    """Return the shape of a parameter's matrices on their owner, and the levels to it.

    Args:
        sizes: number of elements in every rank's piece, if the parameter is one.
    """
    piece = piece_of(x)
    base = x if piece is None else piece.parameter
    shard, shape = shard_of(base), tuple(base.shape)
    levels = []
    apart = shard is not None and len(shape) == 3 and shard.dim == 0 and shard.across is None  # whole experts
    if piece is not None and sizes is not None:
        if not base.is_contiguous():
            raise ValueError(
                f"Muon: {piece.name!r} {shape} is not contiguous, and its ranks have stretches of its memory"
            )
        count = prod(shape[-2:])
        if len(shape) == 3 and (shard is None or apart) and not any(size % count for size in sizes):  # whole ones again
            shape = (sizes[piece.ranks.rank] // count, *shape[-2:])
        else:
            levels.append(_Level(piece.ranks, sizes))
    else:
        ranks = replicas if shard is None or shard.replicas is None else shard.replicas
        if ranks is not None and replicas is not None:
            levels.append(_Level(ranks, [x.numel()] * ranks.world_size, copies=True))
    if shard is not None and not apart:
        ranks, shape = shard.communicator, shard.global_shape
        levels.append(_Level(ranks, [prod(shard.shape_of(rank)) for rank in range(ranks.world_size)], shard=shard))
    return shape, [level for level in levels if level.ranks.world_size > 1]


_Elements = dict[torch.Tensor, torch.Tensor]  # by parameter


def _to_owners(dealt: dict[torch.Tensor, _Matrices], here: _Elements) -> list[_Elements]:
    """Send each matrix to its owner, level by level. A collective call.

    Returns:
        What this rank has before each level, and at last the whole matrices that it owns.
    """
    found = [here]
    for depth in range(_depth(dealt)):
        above = {x: part for x, part in here.items() if len(dealt[x].levels) <= depth}
        for (ranks, copies, _), those in _alike(dealt, here, depth).items():
            own = [x for x in those if dealt[x].owner[depth] == ranks.rank]
            if copies:
                above |= {x: here[x] for x in own}
                continue
            sent = [[here[x] for x in those if dealt[x].owner[depth] == rank] for rank in range(ranks.world_size)]
            sizes = [[dealt[x].levels[depth].sizes[rank] for x in own] for rank in range(ranks.world_size)]
            received = _exchange(ranks, sent, sizes, here[those[0]].new_empty(0))
            above |= {
                x: dealt[x].levels[depth].join(parts) for x, parts in zip(own, zip(*received, strict=True), strict=True)
            }
        here = {x: above[x] for x in dealt if x in above}
        found.append(here)
    return found


def _from_owners(dealt: dict[torch.Tensor, _Matrices], found: list[_Elements]) -> _Elements:
    """Send each rank its elements of what the owners have made of their matrices. A collective call.

    Args:
        found: as `_to_owners` returns it, with the results at last.
    """
    results = found[-1]
    for depth in reversed(range(_depth(dealt))):
        below = {x: results[x] for x in found[depth] if len(dealt[x].levels) <= depth}
        for (ranks, _, result), those in _alike(dealt, found[depth], depth).items():
            cuts = [dealt[x].levels[depth].cut(results[x]) for x in those if dealt[x].owner[depth] == ranks.rank]
            sent = [[cut[rank] for cut in cuts] for rank in range(ranks.world_size)]
            from_rank = [[x for x in those if dealt[x].owner[depth] == rank] for rank in range(ranks.world_size)]
            sizes = [[dealt[x].levels[depth].sizes[ranks.rank] for x in each] for each in from_rank]
            nothing = found[depth][those[0]].new_empty(0, dtype=result)
            received = _exchange(ranks, sent, sizes, nothing)
            for each, parts in zip(from_rank, received, strict=True):
                below |= zip(each, parts, strict=True)
        results = below
    return results


def _depth(dealt: dict[torch.Tensor, _Matrices]) -> int:
    return max((len(matrices.levels) for matrices in dealt.values()), default=0)


def _alike(
    dealt: dict[torch.Tensor, _Matrices], here: _Elements, depth: int
) -> dict[tuple[Communicator, bool, torch.dtype], list[torch.Tensor]]:
    """Return the parameters that travel together, in the same order on each rank: by ranks, `copies` and `result`."""
    found: dict[tuple[Communicator, bool, torch.dtype], list[torch.Tensor]] = {}
    for x, matrices in dealt.items():
        if x in here and len(matrices.levels) > depth:
            level = matrices.levels[depth]
            found.setdefault((level.ranks, level.copies, matrices.result), []).append(x)
    return found


def _exchange(
    ranks: Communicator, sent: list[list[torch.Tensor]], sizes: list[list[int]], nothing: torch.Tensor
) -> list[Sequence[torch.Tensor]]:
    """Send lists of flat tensors to every rank; return those from every rank, of `sizes`. A collective call."""
    flat = [torch.cat([nothing, *those]) for those in sent]
    received = [nothing.new_empty(sum(those)) for those in sizes]
    ranks.all_to_all_into(flat, received)
    return [part.split(those) for part, those in zip(received, sizes, strict=True)]
