"""ParallelExperts: the experts of a mixture, each on one rank of a group."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.nn.expert_form import ExpertForm, InnerForm, form_of, inner_of
from weft.nn.placed import PlacedModules, check_apart, tensors_of
from weft.nn.sharded import ShardedModule
from weft.ops import grouped_matmul
from weft.ops.activation import activation_of
from weft.ops.empty_grad import added_once, with_absent
from weft.ops.experts import ExpertRanks, grouped, routed_experts
from weft.sharding.shard import Shard
from weft.sharding.sizes import Cut, split_sizes

SPLITS = ("auto", "experts", "intermediate")


class Experts(nn.Module):
    """Feed-forward experts with fused weights, all on this rank: what ParallelExperts splits.

        expert e   down_e @ (activation(gate_e @ x) * (up_e @ x)), or down_e @ activation(up_e @ x) without a gate
        layer      the sum over the chosen experts, each times its routing weight

    Args:
        num_experts, hidden_size, intermediate_size: sizes of the layer.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether the up projection has a gate. The weight `gate_up_proj` [E, 2 I, H] then has gate and up one
            after another; otherwise `up_proj` is [E, I, H].
        bias: whether the projections have biases.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if min(num_experts, hidden_size, intermediate_size) < 1:
            raise ValueError(
                f"Experts: num_experts={num_experts}, hidden_size={hidden_size} and "
                f"intermediate_size={intermediate_size} must be at least 1"
            )
        activation_of(activation)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation, self.gated = activation, gated
        up, wide = ("gate_up_proj", 2 * intermediate_size) if gated else ("up_proj", intermediate_size)
        for name, *shape in ((up, wide, hidden_size), ("down_proj", hidden_size, intermediate_size)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype)))
            if bias:
                of_bias = torch.empty(num_experts, shape[0], device=device, dtype=dtype)
                self.register_parameter(f"{name}_bias", nn.Parameter(of_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's projections uniformly, as nn.Linear draws its own."""
        for name in ("gate_up_proj" if self.gated else "up_proj", "down_proj"):
            weight = self.get_parameter(name)
            bound = weight.size(-1) ** -0.5
            for parameter in (weight, self._parameters.get(f"{name}_bias")):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [..., H] for tokens [..., H], the chosen experts [..., k] and the routing weights [..., k]."""
        place = ExpertRanks(self.num_experts, None, None)
        return routed_experts(x, top_k_index, top_k_weights, self.rows, place, weighted=False)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, activation={self.activation!r}"

    def rows(self, rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return [R, H], the output of `expert` [R], in ascending order, for rows [R, H], without weights."""
        weights = self.weights()
        if grouped_matmul.algorithm(weights.up).kernel:
            return grouped_matmul.expert_mlps(rows, expert, weights)
        return grouped(rows, expert, self.num_experts, self._expert)

    def weights(self) -> grouped_matmul.ExpertWeights:
        """Return the parameters by their roles."""
        names = "gate_up_proj" if self.gated else "up_proj", "down_proj"
        up, down = (self._parameters[name] for name in names)
        up_bias, down_bias = (self._parameters.get(f"{name}_bias") for name in names)
        assert up is not None and down is not None
        return grouped_matmul.ExpertWeights(up, down, up_bias, down_bias, self.activation, self.gated)

    def _expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        activation = activation_of(self.activation)
        assert activation is not None
        if self.gated:
            gate, up = self._project("gate_up_proj", number, rows).chunk(2, -1)
            return self._project("down_proj", number, activation.apply(gate) * up)
        return self._project("down_proj", number, activation.apply(self._project("up_proj", number, rows)))

    def _project(self, name: str, number: int, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters[name], self._parameters.get(f"{name}_bias")
        assert weight is not None
        return F.linear(rows, weight[number], None if bias is None else bias[number])


@dataclass(frozen=True)
class LastCall:
    """Sizes of the last call of a layer of experts, for `weft.explain`.

    Attributes:
        chosen: number of experts of a token.
        row_bytes, weight_bytes: size of a token and of a routing weight.
        weighted: whether the routing weights travel with the tokens.
        counts: tokens of each expert of this rank.
    """

    chosen: int
    row_bytes: int
    weight_bytes: int
    weighted: bool
    counts: torch.Tensor

    def load(self) -> list[int]:
        """Return the tokens of each expert of this rank. On a GPU this waits for the call."""
        return self.counts.tolist()


class _Routed:
    """Mixin of layers of experts: calls `_compute` for this rank's rows and notes the sizes."""

    place: ExpertRanks
    weighted = False  # whether `_compute` multiplies by the routing weights
    seen: LastCall | None = None

    def _route(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def compute(rows, expert, scale):
            counts = torch.bincount(expert, minlength=len(self.place.own))
            sizes = index.size(-1), x.size(-1) * x.element_size(), weights.element_size()
            self.seen = LastCall(*sizes, self.weighted, counts)
            return self._compute(rows, expert, scale)

        return routed_experts(x, index, weights, compute, self.place, weighted=self.weighted)

    def _compute(self, rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class ParallelExperts(_Routed, ShardedModule):
    """Experts split over ranks. The router stays whole on every rank and gets its whole gradient.

        y = sum over the chosen experts e of top_k_weights[e] * expert_e(x)

    Two ways, which may be combined:
        group: the ranks have the same tokens ("tp"). Each computes the tokens of its experts; one all_reduce adds the
            results. Backward sums the gradients of the tokens and of the routing weights, once.
        ep_group: the ranks have tokens of their own ("ep"). Tokens travel to their experts and back by all_to_all, and
            backward sends the gradients the same way. The gradient of an expert is the sum over all tokens of the
            group; `weft.DataParallel` averages it as it averages the rest of the model.

    With `split="intermediate"` the ranks of `group` share each expert: each has its part of the intermediate dimension
    of every expert of its rank of ep_group. The parts add up in the same all_reduce.

    No token is dropped, however uneven the load. Experts need not divide by the number of ranks.

    Args:
        num_experts, hidden_size, intermediate_size, activation, gated, bias, device, dtype: of the whole layer, as in
            `weft.nn.Experts`. A layer built from a seed holds this rank's experts of the Experts built from that seed.
        group: the ranks with the same tokens: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default
            group. With ep_group, None means that no ranks have the same tokens.
        ep_group: the ranks with tokens of their own.
        all_group: with both, the ranks of both together, ep changing slowest.
        replica_group: with ep_group, the ranks that have the same experts: those of data parallelism are ep_group times
            these. `weft.DataParallel` needs it. None: this rank alone. With capacity_factor, the ranks of data
            parallelism also without ep_group.
        split: what the ranks of `group` split: "experts", "intermediate", or "auto": the experts, or the intermediate
            dimension where there are fewer experts than ranks.
        capacity_factor: drop tokens on purpose: an expert takes at most this many times its even share of the tokens,
            ceil(capacity_factor * tokens * k / num_experts) (Fedus et al. 2022, equation 3; Lepikhin et al. 2020). All
            first choices come before second ones, and earlier tokens before later ones. The tokens are those of all
            ranks of ep_group and replica_group, in rank order, so every mesh drops the same. None drops nothing.

    Raises:
        ValueError: fewer experts than ranks, and no intermediate dimension that can be split besides; an option that
            does not exist. Raised before any communication.
        ValueError: in forward, a router that chooses an expert that does not exist; on every rank.

    Examples:
        >>> layer = weft.ParallelExperts(4, 16, 32)
        >>> index, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
        >>> layer(torch.ones(2, 16), index, weights).shape, layer.down_proj.shape  # 2 of the 4 experts on this rank
        (torch.Size([2, 16]), torch.Size([2, 16, 32]))
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        group: Group = None,
        ep_group: Group = None,
        all_group: Group = None,
        replica_group: Group = None,
        split: str = "auto",
        capacity_factor: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_capacity(capacity_factor)
        options: dict[str, Any] = {"activation": activation, "gated": gated, "bias": bias, "dtype": dtype}
        whole = Experts(num_experts, hidden_size, intermediate_size, device=device, **options)
        sizes = num_experts, hidden_size, intermediate_size
        self._whole: Callable[..., Experts] | None = partial(Experts, *sizes, **options)
        place = _ranks(num_experts, group, ep_group, replica_group, capacity_factor, split)
        self._split(whole, _form(whole), place, all_group, replica_group)

    @classmethod
    def from_experts(
        cls,
        experts: nn.Module,
        *,
        group: Group = None,
        ep_group: Group = None,
        all_group: Group = None,
        replica_group: Group = None,
        split: str = "auto",
        capacity_factor: float | None = None,
    ) -> "ParallelExperts | ParallelExpertList":
        """Return this rank's part of existing experts.

        Args:
            experts: fused experts, forward(tokens, chosen experts, routing weights) with parameters stacked along their
                first dimension (as in transformers), which then runs its own forward on this rank's experts; or an
                nn.ModuleList of experts, each a module that takes and returns rows. The result is called with (tokens,
                chosen experts, routing weights) in either case.

        Raises:
            ValueError: the module's forward is no sum over experts that are stacked so, as a trial on small random
                weights shows.
            TypeError: experts is no such module.
        """
        _check_capacity(capacity_factor)
        if isinstance(experts, nn.ModuleList):
            how = "experts" if split == "auto" else split
            place = _ranks(len(experts), group, ep_group, replica_group, capacity_factor, how)
            return ParallelExpertList(experts, place, all_group, replica_group)
        form = _form(experts)
        layer = cls.__new__(cls)
        ShardedModule.__init__(layer)
        layer._whole = None
        place = _ranks(form.experts, group, ep_group, replica_group, capacity_factor, split)
        layer._split(experts, form, place, all_group, replica_group)
        return layer.train(experts.training)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [..., H]; the arguments are those of the whole layer's forward.

        They are tokens [..., H], the chosen experts [..., k] and the routing weights [..., k].
        """
        x, index, weights = self._given(args, kwargs)
        return self._route(x, index, weights)

    def extra_repr(self) -> str:
        own, ranks = self.place.own, self.place
        part = "a part of " if ranks.inner else ""
        where = f"rank {ranks.rank} of {ranks.world_size}"
        return f"{part}experts {own.start} to {own.stop - 1} of {ranks.experts}, {where}"

    @property
    def communicator(self) -> Communicator | None:
        """The ranks that hold the experts; None for one rank."""
        return self._ranks

    def _split(
        self, experts: nn.Module, form: ExpertForm, place: ExpertRanks, all_group: Group, replica_group: Group
    ) -> None:
        """Register this rank's experts, and a copy of the module that runs its own forward with them."""
        self.place, self._ranks, self._form = place, _ranks_of_all(place, all_group), form
        inner = _inner(experts, place)
        replicas = None if place.ep is None or replica_group is None else communicator(replica_group)
        for name, parameter in experts._parameters.items():
            if parameter is not None and self._ranks is not None:
                shard = _shard(name, tuple(parameter.shape), place, self._ranks, replicas, inner)
                self.shards |= {} if shard is None else {name: shard}
        self.register_parts(experts)
        self._modules.update(experts._modules)
        part = form.part_of(experts, self._parameters, len(place.own))
        vars(part)["_modules"] = self._modules
        self._once: tuple[str, ...] = ()
        if inner is not None:
            assert place.tp is not None
            self._once = inner.once
            for name in inner.attributes:
                setattr(part, name, split_sizes(inner.size, place.tp.world_size)[place.tp.rank])
        self._part = [part]  # in a list, so that it is no submodule
        self.weighted = not isinstance(part, Experts)
        self._names = list(inspect.signature(type(experts).forward).parameters)[1:4]

    def _compute(self, rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if len(rows) == 0:  # the gradient of fused weights is zeros where no token chose an expert
            return with_absent(rows.new_zeros(rows.shape), [p for p in self._parameters.values() if p is not None])
        part = self._part[0]
        part.training = self.training
        if self._once:
            assert self.place.tp is not None
            once = {name: added_once(self.get_parameter(name), self.place.tp.rank == 0) for name in self._once}
            part = self._form.part_of(part, {**self._parameters, **once}, len(self.place.own))  # type: ignore[dict-item]
        if isinstance(part, Experts):
            return part.rows(rows, expert)
        assert scale is not None
        return self._form.run(part, rows, expert, scale)

    def fused(self) -> grouped_matmul.ExpertWeights | None:
        """Return this rank's weights if the experts are `weft.nn.Experts`, else None."""
        part = self._part[0]
        return part.weights() if isinstance(part, Experts) else None

    def _given(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if len(args) > 3 or set(given) != set(self._names):
            raise TypeError(
                f"ParallelExperts takes {', '.join(self._names)} and nothing else; got {len(args)} arguments and "
                f"{', '.join(kwargs) or 'none by name'}"
            )
        return [given[self._names[self._form.order.index(role)]] for role in range(3)]

    def _draw_whole(self) -> nn.Module:
        if self._whole is None:
            raise NotImplementedError("ParallelExperts of existing experts draws nothing: draw before the split")
        return self._whole(device=next(self.parameters()).device)


class ParallelExpertList(_Routed, PlacedModules, ShardedModule):
    """Experts that are modules of their own, each on one rank; `ParallelExperts.from_experts` makes it.

    Called with (tokens [..., H], chosen experts [..., k], routing weights [..., k]). An expert without tokens gets no
    gradient, as in one process.
    """

    def __init__(
        self, experts: nn.ModuleList, place: ExpertRanks, all_group: Group = None, replica_group: Group = None
    ):
        super().__init__()
        if place.inner:
            raise ValueError(
                'ParallelExperts: split="intermediate" takes fused experts; a list of modules is split by experts'
            )
        self.place, self.communicator = place, _ranks_of_all(place, all_group)
        if self.communicator is None:
            raise ValueError("ParallelExperts: a list of experts on one rank is what it was: leave it whole")
        of_expert = [tensors_of(experts, [str(number)]) for number in range(len(experts))]
        check_apart(of_expert, "experts")
        owners = [rank for rank, ((start, stop),) in enumerate(place.cut.stretches) for _ in range(start, stop)]
        replicas = None if place.ep is None or replica_group is None else communicator(replica_group)
        self._place_modules(dict(experts.named_children()), of_expert, owners, self.communicator, replicas)
        self.train(experts.training)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        y = self._route(x, top_k_index, top_k_weights)
        return with_absent(y, self.absent_parameters())

    def extra_repr(self) -> str:
        return ParallelExperts.extra_repr(self)  # type: ignore[arg-type]

    def _compute(self, rows: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return grouped(rows, expert, len(self.place.own), self._expert)

    def _expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(str(self.place.own[number]))(rows)


def _inner(experts: nn.Module, place: ExpertRanks) -> InnerForm | None:
    """Return how the ranks of tp share each expert; None if they do not."""
    if not place.inner or place.tp is None:
        return None
    inner, ranks = inner_of(experts), place.tp.world_size
    if isinstance(inner, InnerForm) and inner.size >= ranks:
        return inner
    why = inner if isinstance(inner, str) else f"it is {inner.size}"
    raise ValueError(
        f"ParallelExperts: {place.experts} experts on {place.world_size} ranks, {ranks} of them for each expert: the "
        f"intermediate dimension of {type(experts).__name__} cannot be split over {ranks} ranks: {why}. Use fewer ranks"
    )


def _shard(
    name: str,
    shape: tuple[int, ...],
    place: ExpertRanks,
    ranks: Communicator,
    replicas: Communicator | None,
    inner: InnerForm | None,
) -> Shard | None:
    """Return the place of a parameter's part; None if every rank has all of it."""
    if inner is None or place.tp is None:
        return Shard(shape, 0, place.cut, ranks, replicas)
    if name in inner.once:
        return None if place.ep is None else Shard(shape, 0, place.cut, place.ep, replicas)
    dim, cut = inner.cut_over(name, shape[inner.cuts[name][0]], place.tp.world_size)
    if place.ep is None:
        return Shard(shape, dim, cut, ranks, replicas)
    by_expert = Cut(tuple(stretches for stretches in place.cut.stretches for _ in range(place.tp.world_size)))
    return Shard(shape, 0, by_expert, ranks, replicas, (dim, Cut(cut.stretches * place.ep.world_size)))


def _ranks(
    experts: int, group: Group, ep_group: Group, replica_group: Group, capacity_factor: float | None, split: str
) -> ExpertRanks:
    """Return the ranks over which experts are split; a group of one rank is none."""
    if split not in SPLITS:
        raise ValueError(f"ParallelExperts: split={split!r} is not one of {', '.join(map(repr, SPLITS))}")
    tp = None if group is None and ep_group is not None else communicator(group)
    ep = None if ep_group is None else communicator(ep_group)
    tp, ep = (None if ranks is None or ranks.world_size == 1 else ranks for ranks in (tp, ep))
    counted = capacity_factor is not None and replica_group is not None
    replicas = communicator(replica_group) if counted else None
    few = tp is not None and experts < tp.world_size * (1 if ep is None else ep.world_size)
    inner = tp is not None and (split == "intermediate" or (split == "auto" and few))
    try:
        return ExpertRanks(experts, tp, ep, inner, capacity_factor, replicas)
    except ValueError as error:
        raise ValueError(f"ParallelExperts: the experts: {error}") from None


def _ranks_of_all(place: ExpertRanks, all_group: Group) -> Communicator | None:
    if place.tp is None or place.ep is None:
        return place.tp or place.ep
    if all_group is None:
        raise ValueError("ParallelExperts: experts over group and ep_group need all_group, the ranks of both together")
    ranks = communicator(all_group)
    if (ranks.world_size, ranks.rank) != (place.world_size, place.rank):
        raise ValueError(
            f"ParallelExperts: all_group has {ranks.world_size} ranks and this is its rank {ranks.rank}; of group and "
            f"ep_group together it is rank {place.rank} of {place.world_size}, ep changing slowest"
        )
    return ranks


def _form(experts: nn.Module) -> ExpertForm:
    form = form_of(experts)
    if isinstance(form, str):
        raise ValueError(f"ParallelExperts: {type(experts).__name__} cannot be split by experts: {form}")
    return form


def _check_capacity(factor: float | None) -> None:
    if factor is not None and not factor > 0:
        raise ValueError(f"ParallelExperts: capacity_factor={factor} must be more than 0; None drops no token")
