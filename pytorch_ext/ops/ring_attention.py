"""Ring attention: keys and values travel round the ranks while each computes its current chunk (Liu et al. 2023)."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from weft.comm.communicator import Communicator
from weft.comm.p2p import PendingTransfer, send_recv
from weft.kernels.attention_rules import Positions, Rules
from weft.ops import attention_chunk
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.backward import RankFunction, first_order
from weft.ops.head_groups import head_groups, joined

_ALIGNED = 8  # elements; values begin at a multiple of 16 bytes, which a GPU's copy engine needs


class RingStep(NamedTuple):
    """One rank's part of one step of the ring, in which it has the keys and values of rank `source`.

    Attributes:
        chunk: its queries against these keys; None if no query sees one of them.
        ends: no later step has a chunk for this rank.
        last: the last step in which any rank uses these keys.
        coming: number of positions of the keys that arrive for the next step; None if none do.
    """

    source: int
    chunk: AttentionChunk | None
    ends: bool
    last: int
    coming: int | None


@dataclass(frozen=True)
class RingSchedule:
    """Positions, documents and visibility of all ranks' queries and keys; the same on every rank.

    Attributes:
        query_positions, key_positions: positions of each rank.
        query_documents, key_documents: documents of each rank, [B, positions of the rank], or None.
        sees: sees[r][s] is True if a query of rank r can see a key of rank s.
        library: as in AttentionChunk.
    """

    ranks: Communicator
    rules: Rules
    query_positions: tuple[Positions, ...]
    key_positions: tuple[Positions, ...]
    query_documents: tuple[torch.Tensor, ...] | None
    key_documents: tuple[torch.Tensor, ...] | None
    sees: tuple[tuple[bool, ...], ...]
    library: str = ""

    def chunk(self, source: int) -> AttentionChunk:
        """Return the chunk of this rank's queries against the keys of rank `source`."""
        rank = self.ranks.rank
        documents: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if self.query_documents is not None and self.key_documents is not None:
            documents = self.query_documents[rank], self.key_documents[source]
        positions = self.query_positions[rank], self.key_positions[source]
        return AttentionChunk(self.rules, *positions, *documents, library=self.library)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of key positions of each rank."""
        return [positions.length + positions.second_length for positions in self.key_positions]

    def from_head(self, first: int) -> "RingSchedule":
        """Return the schedule for the heads from number `first` on."""
        if first == 0:
            return self
        return replace(self, rules=replace(self.rules, head_start=self.rules.head_start + first))

    @cached_property
    def steps(self) -> list[RingStep]:
        """This rank's steps; in step t it has the keys of rank - t."""
        rank, world = self.ranks.rank, self.ranks.world_size
        sources = [(rank - step) % world for step in range(world)]
        used = [step for step, source in enumerate(sources) if self.sees[rank][source]]
        steps = []
        for step, source in enumerate(sources):
            following = sources[(step + 1) % world]
            comes = step + 1 < world and last_step(self.sees, following) > step
            chunk = self.chunk(source) if step in used else None
            coming = self.lengths[following] if comes else None
            steps.append(RingStep(source, chunk, step == max(used, default=0), last_step(self.sees, source), coming))
        return steps


def last_step(sees: tuple[tuple[bool, ...], ...], source: int) -> int:
    """Return the last step in which a rank uses the keys of `source`; rank source + t has them in step t."""
    world = len(sees)
    return max((t for t in range(world) if sees[(source + t) % world][source]), default=0)


class Pair(NamedTuple):
    """Keys and values, or their gradients, of one rank; `both` is their memory where they travel as one message."""

    k: torch.Tensor
    v: torch.Tensor
    both: torch.Tensor | None = None

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, positions: int, dtype: torch.dtype) -> "Pair":
        """Return memory for a pair with the batch, heads and head dimensions of k and v."""
        of_k, of_v = ((*x.shape[:2], positions, x.size(3)) for x in (k, v))
        size, start = prod(of_k), -(-prod(of_k) // _ALIGNED) * _ALIGNED
        both = k.new_empty(start + prod(of_v), dtype=dtype)
        return cls(both[:size].view(of_k), both[start:].view(of_v), both)

    @classmethod
    def copied(cls, k: torch.Tensor, v: torch.Tensor) -> "Pair":
        pair = cls.empty(k, v, k.size(2), k.dtype)
        pair.k.copy_(k)
        pair.v.copy_(v)
        return pair


class RingAttentionFunction(RankFunction):
    """out = softmax(scale q k.T, masked) v over all ranks' keys and values, for this rank's queries.

    Per rank, with S_r of S positions:
        q [B, H, S_r, D]        k [B, Hkv, S_r, D]        v [B, Hkv, S_r, Dv]        sinks [H]        out as q, with Dv

    forward   at step t rank r has the chunk of rank r - t: it sends the chunk to r + 1, receives the next from r - 1,
              and at the same time continues (out, lse) with the chunk's keys, in fp32
    backward  the same round; each rank adds to dq, and to the dk and dv (fp32) that travel one step behind their chunk;
              the last rank that uses a chunk sends its dk and dv to the owner
    dsinks    -sum over this rank's rows of exp(sinks - lse) delta, since a sink's value is 0; all_reduce

    A chunk goes no farther than the last rank that sees any of it. A rank holds its own chunk, the current one and the
    next one; the last two are for one group of heads, and the groups go round one after the other. The order of every
    sum is fixed: keys from rank r downwards, dk and dv from the owner upwards.

    Saves q, k, v, sinks, out and lse [B, H, S_r] fp32.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, schedule: RingSchedule):
        if schedule.ranks.world_size > 1:
            schedule.ranks.p2p_group(q.device)  # with all ranks: some may have no message
        outs, lses = [], []
        for queries, keys in head_groups(q, k, v, max(schedule.lengths)):
            state = attention_chunk.beginning(q, None if sinks is None else sinks[queries])
            out, lse = _round(q[:, queries], k[:, keys], v[:, keys], state, schedule.from_head(queries.start))
            outs.append(out)
            lses.append(lse)
        out, lse = joined(outs), joined(lses)
        ctx.schedule = schedule
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        schedule: RingSchedule = ctx.schedule
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        delta = attention_chunk.row_sums(out, dout)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for queries, keys in head_groups(q, k, v, max(schedule.lengths)):
            gradients = _round_back(
                [x[:, queries] for x in (q, dout, out, lse, delta)],
                [x[:, keys] for x in (k, v)],
                schedule.from_head(queries.start),
                sinks is not None,
            )
            for whole, heads, gradient in zip((dq, dk, dv), (queries, keys, keys), gradients, strict=True):
                whole[:, heads] = gradient
        dsinks = sinks_gradient(sinks, lse, delta, schedule.ranks) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, dsinks, None


def _round(q, k, v, state, schedule: RingSchedule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, in q's type, and lse of some heads."""
    held = _of_this_rank(k, v, schedule)
    seen = False
    for number, step in enumerate(schedule.steps):
        coming, passing = _pass_on(schedule, number, held)
        if step.chunk is not None:
            state, seen = attention_chunk.forward(q, held.k, held.v, step.chunk, state, step.ends), True
        passing.wait()
        held = coming
    if seen:
        return state
    lse = state[1].contiguous() if state else q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    return q.new_zeros((*q.shape[:3], v.size(3))), lse


def _round_back(
    of_queries: list[torch.Tensor], of_keys: list[torch.Tensor], schedule: RingSchedule, has_sinks: bool
) -> list[torch.Tensor]:
    """Return dq, dk and dv, fp32, of some heads.

    Args:
        of_queries: q, dout, out, lse and delta of the heads.
        of_keys: k and v of the heads.
    """
    q, (k, v) = of_queries[0], of_keys
    ranks, steps = schedule.ranks, schedule.steps
    alone = not has_sinks and sum(schedule.sees[ranks.rank]) == 1
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    held = _of_this_rank(k, v, schedule)
    home = sums = _zeros(held)
    leaving: Pair | None = None  # gradients of the chunk before, for the next rank
    going_home: list[tuple[torch.Tensor, int]] = []  # sent after the round, with what comes home
    for number, step in enumerate(steps):
        # 1. Start to pass on the gradients of the chunk before and this chunk, and to receive this chunk's gradients so
        #    far and the next chunk: one batch, the same on both sides.
        arrives = 0 < number <= step.last
        if arrives:
            sums = Pair.empty(held.k, held.v, held.k.size(2), torch.float32)
        coming, passing = _pass_on(schedule, number, held, leaving, sums if arrives else None)
        # 2. Compute this rank's part.
        own = _zeros(held) if number and step.chunk is not None else sums
        if step.chunk is not None:
            attention_chunk.backward(of_queries, held[:2], step.chunk, [dq, own.k, own.v], alone)
        # 3. Add it, in the order of the ring.
        passing.wait()
        if own is not sums:
            sums.both.add_(own.both)  # type: ignore[union-attr, arg-type]
        # 4. The gradients go to the next rank, or to the owner.
        leaving = sums if number < step.last else None
        if 0 < number == step.last:
            going_home.append((sums.both, step.source))  # type: ignore[arg-type]
        held = coming
    coming_home: list[tuple[torch.Tensor, int]] = []
    if travelled := steps[0].last:
        home = Pair.empty(k, v, k.size(2), torch.float32)
        coming_home = [(home.both, (ranks.rank + travelled) % ranks.world_size)]  # type: ignore[list-item]
    if going_home or coming_home:
        send_recv(ranks, going_home, coming_home).wait()
    return [dq, home.k, home.v]


def sinks_gradient(sinks, lse, delta, ranks: Communicator) -> torch.Tensor:
    """Return the gradient of the sinks from all ranks' queries; the same on every rank."""
    gradient = -(torch.exp(sinks.float().view(1, -1, 1) - lse) * delta).sum((0, 2))
    return ranks.all_reduce_(gradient).to(sinks.dtype)


def _of_this_rank(k: torch.Tensor, v: torch.Tensor, schedule: RingSchedule) -> Pair:
    """Return this rank's keys and values, as one message where they travel."""
    return Pair.copied(k, v) if schedule.steps[0].last else Pair(k.contiguous(), v.contiguous())


def _pass_on(
    schedule: RingSchedule, number: int, held: Pair, leaving: Pair | None = None, arriving: Pair | None = None
) -> tuple[Pair, PendingTransfer]:
    """Start to send the current chunk and to receive the next, each only if a later rank uses it.

    Args:
        schedule: the schedule of the ring.
        number: number of the step.
        held: the current chunk.
        leaving: gradients to send before the chunk.
        arriving: memory for gradients to receive before the chunk.

    Returns:
        Memory of the next chunk (`held` if none comes), and the transfer under way.
    """
    ranks, step = schedule.ranks, schedule.steps[number]
    sent = [pair.both for pair in (leaving, held if step.last > number else None) if pair is not None]
    received, coming = [] if arriving is None else [arriving.both], held
    if step.coming is not None:
        coming = Pair.empty(held.k, held.v, step.coming, held.k.dtype)
        received.append(coming.both)
    to, origin = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    return coming, send_recv(ranks, [(x, to) for x in sent], [(x, origin) for x in received])  # type: ignore[misc]


def _zeros(held: Pair) -> Pair:
    pair = Pair.empty(held.k, held.v, held.k.size(2), torch.float32)
    assert pair.both is not None
    pair.both.zero_()
    return pair
