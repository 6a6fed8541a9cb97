"""Experts on different ranks: each rank's tokens go to the experts that the router chose, and come back weighted.

Two ways, which may be combined:

    tp   the ranks have the same tokens. Each computes the tokens of its own experts, or its part of the intermediate
         dimension of all of them; one all_reduce adds the results.
    ep   the ranks have tokens of their own. Tokens travel to the ranks of their experts and back, by all_to_all.

Rows stand in the order of their experts everywhere. Sums over the experts of a token are in fp32 (fp64 for fp64), in
the order of experts, and rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.communicator import Communicator
from weft.ops import kernel_choice
from weft.ops.backward import RankFunction, first_order
from weft.ops.mappings import total
from weft.sharding.sizes import Cut, split_sizes

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks over which experts are split. Consecutive ranks of "tp", then those of "ep", hold consecutive experts.

    Attributes:
        experts: number of experts of the whole layer.
        tp: ranks that have the same tokens; None if there is one.
        ep: ranks that have tokens of their own; None if there is one.
        inner: the ranks of tp share each expert's intermediate dimension, and each has a part of all experts of its
            rank of ep. False: each has experts of its own.
        capacity_factor: None drops nothing. Otherwise each expert takes at most this many times its even share of the
            tokens of all ranks. First choices of all tokens come before second ones (GShard, Lepikhin et al. 2020,
            algorithm 1); among these, earlier tokens come first, in the order of ranks.
        replicas: with a capacity_factor, further ranks with tokens of the same batch. Those of ep change faster.
    """

    experts: int
    tp: Communicator | None
    ep: Communicator | None
    inner: bool = False
    capacity_factor: float | None = None
    replicas: Communicator | None = None

    def __post_init__(self) -> None:
        split_sizes(self.experts, self._owners * self._size(self.ep))

    @property
    def world_size(self) -> int:
        return self._size(self.tp) * self._size(self.ep)

    @property
    def rank(self) -> int:
        """Index of this rank among all ranks with experts, in the order of their experts."""
        return self._rank(self.ep) * self._size(self.tp) + self._rank(self.tp)

    @property
    def cut(self) -> Cut:
        """The experts of each rank; with `inner`, of each rank of ep."""
        return Cut.one_after_another(split_sizes(self.experts, self._owners * self._size(self.ep)))

    @property
    def own(self) -> range:
        """Numbers of this rank's experts in the whole layer."""
        return self.experts_at(self._rank(self.ep))

    def experts_at(self, ep_rank: int) -> range:
        """Return the experts of the rank with which this rank exchanges tokens."""
        owner = 0 if self.inner else self._rank(self.tp)
        return range(*self.cut.stretches[ep_rank * self._owners + owner][0])

    @property
    def _owners(self) -> int:
        """Ranks of tp with experts of their own."""
        return 1 if self.inner else self._size(self.tp)

    @staticmethod
    def _size(ranks: Communicator | None) -> int:
        return 1 if ranks is None else ranks.world_size

    @staticmethod
    def _rank(ranks: Communicator | None) -> int:
        return 0 if ranks is None else ranks.rank


def routed_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    compute: Compute,
    place: ExpertRanks,
    *,
    weighted: bool = True,
) -> torch.Tensor:
    """Return the weighted sum of the experts' outputs that the router chose for each token.

    Args:
        x: [..., H], tokens.
        index: [..., K] whole numbers, the experts of each token, numbered in the whole layer.
        weights: [..., K], the routing weights.
        compute: compute(rows [R, H], experts [R] numbered on this rank, weights [R]) -> [R, H], the weighted outputs.
            It is also called with R = 0, so that parameters can take part.
        weighted: whether `compute` takes the weights. If not, it gets None for them and returns the outputs as they
            are. The weights then do not travel: they are multiplied in the sum of a token's rows.

    Returns:
        [..., H], of the type of x.

    Raises:
        ValueError: shapes that do not match, or an index that is no expert; on every rank, before tokens travel.
    """
    if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"experts: the tokens have shape {tuple(x.shape)}, the chosen experts {tuple(index.shape)} and the routing "
            f"weights {tuple(weights.shape)}; they must be [..., hidden], [..., k] and [..., k]"
        )
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"experts: the chosen experts are {index.dtype}; they must be whole numbers")
    tokens, chosen = x.reshape(-1, x.size(-1)), index.reshape(-1, index.size(-1))
    weights = weights.reshape(chosen.shape)
    _check_range(chosen, place)
    if place.tp is not None:
        tokens, weights = _copy_to(tokens, weights, place.tp)
    pair, expert = _pairs_by_expert(chosen, place)
    token = pair // max(1, chosen.size(1))
    by_kernel = kernel_choice.streams(tokens) and kernel_choice.streams(weights)
    place_of = _places(pair, chosen) if by_kernel else None
    rows = _TokenRows.apply(tokens, token, place_of)
    scale = weights.reshape(-1).index_select(0, pair)
    travels, stays = (scale, None) if weighted else (None, scale)
    if place.ep is None:
        y = _reached(compute(rows, expert - place.own.start, travels), rows, travels)
    else:
        y = _at_their_experts(rows, expert, travels, compute, place)
    y = _SumRows.apply(y, stays, token, place_of, tokens.size(0), x.dtype)
    if place.tp is not None:
        y = total(y, place.tp)
    return y.reshape(x.shape)


def _check_range(chosen: torch.Tensor, place: ExpertRanks) -> None:
    """Check the chosen experts. A rank with tokens of its own may have wrong ones alone, so all ranks compare."""
    if chosen.numel():
        lowest, highest = (int(bound) for bound in chosen.aminmax())
    else:
        lowest, highest = 0, 0
    bounds = [[lowest, highest, dist.get_rank() if dist.is_initialized() else 0]]
    for ranks in (place.ep, place.replicas):
        if ranks is not None:
            rows = torch.tensor(bounds, device=ranks.device_of_numbers(chosen.device))
            bounds = ranks.all_gather(rows, 0, [len(rows)] * ranks.world_size).tolist()
    for lowest, highest, rank in bounds:
        if lowest < 0 or highest >= place.experts:
            wrong = lowest if lowest < 0 else highest
            where = f" on rank {rank}" if len(bounds) > 1 else ""
            raise ValueError(
                f"experts: the router chose expert {wrong}{where}; the {place.experts} experts are numbered from 0 to "
                f"{place.experts - 1}. Choose all experts among these; a token without expert has a weight of 0"
            )


def _pairs_by_expert(chosen: torch.Tensor, place: ExpertRanks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places in `chosen` (flat) of the tokens that this rank handles, by expert, and their experts."""
    expert, pair = torch.sort(chosen.reshape(-1), stable=True)
    keep = None if place.capacity_factor is None else _within_capacity(chosen, place).reshape(-1)[pair]
    if place.tp is not None and not place.inner:
        starts = torch.tensor([start for ((start, _),) in place.cut.stretches], device=expert.device)
        owner = torch.searchsorted(starts, expert, right=True) - 1
        here = owner % place.tp.world_size == place.tp.rank
        keep = here if keep is None else keep & here
    return (pair, expert) if keep is None else (pair[keep], expert[keep])


def _within_capacity(chosen: torch.Tensor, place: ExpertRanks) -> torch.Tensor:
    """Return [T, K], whether the expert has room for the token.

    Nothing is read on the host. With ranks that have tokens of their own, their counts travel: K E numbers each.
    """
    assert place.capacity_factor is not None
    tokens, choices = chosen.shape
    key = chosen + place.experts * torch.arange(choices, device=chosen.device)
    key, order = key.t().reshape(-1).sort(stable=True)  # by choice, expert and token
    counts = torch.bincount(key, minlength=choices * place.experts)
    everywhere, rank = counts.view(1, choices, place.experts), 0
    for ranks in (place.ep, place.replicas):
        if ranks is not None:
            rank += ranks.rank * everywhere.size(0)
            everywhere = ranks.all_gather(everywhere, 0, [everywhere.size(0)] * ranks.world_size)
    of_choice = everywhere.sum(0)
    before = of_choice.cumsum(0) - of_choice + everywhere[:rank].sum(0)
    number = torch.arange(key.numel(), device=key.device) - (counts.cumsum(0) - counts)[key] + before.reshape(-1)[key]
    most = (place.capacity_factor * everywhere.sum().double() / place.experts).ceil()
    keep = torch.empty_like(number, dtype=torch.bool)
    keep[order] = number < most
    return keep.view(choices, tokens).t()


def _at_their_experts(rows, expert, scale, compute: Compute, place: ExpertRanks) -> torch.Tensor:
    """Send rows to the ranks of their experts, compute there, and send the results back."""
    ranks = place.ep
    assert ranks is not None
    counts = torch.bincount(expert, minlength=place.experts)
    everywhere = ranks.all_gather(counts.unsqueeze(0), 0, [1] * ranks.world_size)
    sent = [int(counts[places.start : places.stop].sum()) for places in map(place.experts_at, range(ranks.world_size))]
    own = everywhere[:, place.own.start : place.own.stop]  # [ranks, experts of this rank]
    received = own.sum(1).tolist()
    here = torch.arange(own.size(1), device=expert.device).repeat(ranks.world_size)
    arrived_expert = here.repeat_interleave(own.reshape(-1))
    if scale is None:
        rows = _RowsAllToAll.apply(rows, ranks, sent, received)
    else:
        rows, scale = _Exchange.apply(rows, scale.unsqueeze(-1), ranks, sent, received)
    order = torch.argsort(arrived_expert, stable=True)
    y = compute(rows[order], arrived_expert[order], None if scale is None else scale.squeeze(-1)[order])
    y = _reached(y, rows, scale)
    return _RowsAllToAll.apply(y[torch.argsort(order)], ranks, received, sent)


def _copy_to(tokens: torch.Tensor, weights: torch.Tensor, ranks: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    return _CopyTo.apply(tokens, weights, ranks) if tokens.requires_grad or weights.requires_grad else (tokens, weights)


class _CopyTo(RankFunction):
    """tokens and routing weights, the same on every rank, for this rank's experts.

    forward   nothing travels
    backward  all_reduce of both gradients: each rank's covers its own experts
    """

    @staticmethod
    def forward(ctx, tokens, weights, ranks):
        ctx.ranks = ranks
        return tokens.view_as(tokens), weights.view_as(weights)

    @staticmethod
    @first_order
    def backward(ctx, d_tokens, d_weights):
        of_tokens, of_weights, _ = ctx.needs_input_grad
        return (
            ctx.ranks.all_reduce_(d_tokens.clone(memory_format=torch.contiguous_format)) if of_tokens else None,
            ctx.ranks.all_reduce_(d_weights.clone(memory_format=torch.contiguous_format)) if of_weights else None,
            None,
        )


class _TokenRows(RankFunction):
    """rows [R, H] = x[token]; backward  dx = sums of the rows of each token."""

    @staticmethod
    def forward(ctx, x, token, places):
        ctx.save_for_backward(token, places)
        ctx.count = x.size(0)
        return take_rows(x, token, x.dtype, places is not None)

    @staticmethod
    @first_order
    def backward(ctx, d_rows):
        token, places = ctx.saved_tensors
        return sum_rows(d_rows, token, places, ctx.count, d_rows.dtype), None, None


class _SumRows(RankFunction):
    """y [T, H] = sums of the rows of each token, each times its scale if there is one.

    backward  d_rows = scale * dy[token],  d_scale = sum over H of rows * dy[token]
    """

    @staticmethod
    def forward(ctx, rows, scale, token, places, count, dtype):
        ctx.dtype, ctx.kernel = rows.dtype, places is not None
        ctx.save_for_backward(token, *(() if scale is None else (rows, scale)))
        return sum_rows(rows, token, places, count, dtype, scale)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        token, *weighted = ctx.saved_tensors
        if not weighted:
            return take_rows(dy, token, ctx.dtype, ctx.kernel), None, None, None, None, None
        rows, scale = weighted
        if ctx.kernel:
            from weft.kernels.permute import unpermute_backward

            return *unpermute_backward(dy, rows, token, scale), None, None, None, None
        of_rows = dy.index_select(0, token)
        wide = torch.promote_types(torch.promote_types(rows.dtype, scale.dtype), torch.float32)
        d_scale = (rows.to(wide) * of_rows).sum(1).to(scale.dtype) if ctx.needs_input_grad[1] else None
        return (of_rows * scale.to(wide).unsqueeze(1)).to(rows.dtype), d_scale, None, None, None, None


class _Exchange(RankFunction):
    """rows and weights of the tokens that come to this rank's experts, in the order of ranks.

    forward   all_to_all of both
    backward  all_to_all of both gradients, back
    """

    @staticmethod
    def forward(ctx, rows, scale, ranks, sent, received):
        ctx.arguments = ranks, sent, received
        return all_to_all_rows(rows, ranks, sent, received), all_to_all_rows(scale, ranks, sent, received)

    @staticmethod
    @first_order
    def backward(ctx, d_rows, d_scale):
        ranks, sent, received = ctx.arguments
        back = (all_to_all_rows(gradient, ranks, received, sent) for gradient in (d_rows, d_scale))
        return *back, None, None, None


class _RowsAllToAll(RankFunction):
    """rows of the tokens that come to this rank's experts, or y of its own tokens; forward and backward  all_to_all."""

    @staticmethod
    def forward(ctx, x, ranks, sent, received):
        ctx.arguments = ranks, sent, received
        return all_to_all_rows(x, ranks, sent, received)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        ranks, sent, received = ctx.arguments
        return all_to_all_rows(dy, ranks, received, sent), None, None, None


def _reached(y: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return _Reached.apply(y, rows) if scale is None else _Reached.apply(y, rows, scale)


class _Reached(RankFunction):
    """y, connected with the tensors from which it is computed, also where a rank has no rows or ignores some.

    Their backwards communicate, so they must run on every rank or on none.
    """

    @staticmethod
    def forward(ctx, y, *anchors):
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return dy, *(None for _ in ctx.needs_input_grad[1:])


def all_to_all_rows(x: torch.Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send sent[r] rows of x to each rank r, in order; return received[r] rows from each, in order."""
    y = x.new_empty([sum(received), *x.shape[1:]])
    ranks.all_to_all_into(list(x.contiguous().split(sent)), list(y.split(received)))
    return y


def _places(pair: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return [T, K], the rows of each token in ascending order, after a -1 for each choice without a row here."""
    places = pair.new_full((chosen.numel(),), -1)
    places[pair] = torch.arange(pair.numel(), device=pair.device)
    return places.view(chosen.shape).sort(1).values


def take_rows(x: torch.Tensor, token: torch.Tensor, dtype: torch.dtype, kernel: bool) -> torch.Tensor:
    """Return x[token] in another type."""
    if kernel:
        from weft.kernels.permute import permute

        return permute(x, token, dtype)
    return x.index_select(0, token).to(dtype)


def sum_rows(
    rows: torch.Tensor,
    token: torch.Tensor,
    places: torch.Tensor | None,
    count: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [count, H], the sums of the rows of each token, times their scale, in their order.

    The kernel computes them if there are places.
    """
    if places is not None:
        from weft.kernels.permute import unpermute

        return unpermute(rows, places, dtype, scale)
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows if scale is None else rows.to(wide) * scale.to(wide).unsqueeze(1)
    y = torch.zeros(count, *rows.shape[1:], dtype=wide, device=rows.device)
    if rows.is_cuda:
        y.index_put_((token,), rows.to(wide), accumulate=True)  # in a fixed order, which index_add_ on GPUs is not
    else:
        y.index_add_(0, token, rows.to(wide))
    return y.to(dtype)


def grouped(rows: torch.Tensor, expert: torch.Tensor, experts: int, apply: Callable) -> torch.Tensor:
    """Return apply(number of the expert, its rows) for every expert with rows, one after another.

    A loop: on CPUs, torch's grouped_mm takes neither fp64 nor every gradient. GPUs have `ops.grouped_matmul` for
    experts of one form.

    Args:
        rows: [R, H], by expert.
        expert: [R], in ascending order.
    """
    counts = torch.bincount(expert, minlength=experts).tolist()
    parts = [apply(number, part) for number, part in enumerate(rows.split(counts)) if len(part)]
    return torch.cat(parts) if parts else rows.new_zeros(rows.shape)
