"""Ring attention: keys and values travel round the ranks while each computes its current chunk (Liu et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.comm.communicator import Communicator
from weft.comm.p2p import PendingTransfer, send_recv
from weft.kernels.attention_rules import Positions, Rules
from weft.ops import attention_chunk
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.backward import RankFunction, first_order
from weft.ops.head_groups import head_groups, joined


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

    @property
    def longest(self) -> int:
        """Largest number of key positions on one rank."""
        return max(positions.length + positions.second_length for positions in self.key_positions)

    def from_head(self, first: int) -> "RingSchedule":
        """Return the schedule for the heads from number `first` on."""
        return replace(self, rules=replace(self.rules, head_start=self.rules.head_start + first))

    def last_step(self, source: int) -> int:
        """Return the last step at which a rank uses the keys of `source`; rank source + t has them at step t."""
        return last_step(self.sees, source)


def last_step(sees: tuple[tuple[bool, ...], ...], source: int) -> int:
    """Return the number of steps that the keys of rank `source` go round the ring."""
    world = len(sees)
    return max((t for t in range(world) if sees[(source + t) % world][source]), default=0)


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
        for queries, keys in head_groups(q, k, v, schedule.longest):
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
        for queries, keys in head_groups(q, k, v, schedule.longest):
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
    ranks = schedule.ranks
    used = [t for t in range(ranks.world_size) if schedule.sees[ranks.rank][(ranks.rank - t) % ranks.world_size]]
    held = [k.contiguous(), v.contiguous()]
    for step in range(ranks.world_size):
        source = (ranks.rank - step) % ranks.world_size
        coming, passing = _pass_on(schedule, step, held, (k, v))
        if step in used:
            state = attention_chunk.forward(q, held[0], held[1], schedule.chunk(source), state, step == used[-1])
        passing.wait()
        held = coming
    if used:
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
    ranks = schedule.ranks
    alone = not has_sinks and sum(schedule.sees[ranks.rank]) == 1
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    held, sums = [k.contiguous(), v.contiguous()], [_zeros(k), _zeros(v)]
    leaving: list[torch.Tensor] = []  # gradients of the chunk before, for the next rank
    going_home: list[tuple[torch.Tensor, int]] = []  # sent after the round, with what comes home
    for step in range(ranks.world_size):
        source = (ranks.rank - step) % ranks.world_size
        last, sees = schedule.last_step(source), schedule.sees[ranks.rank][source]
        # 1. Start to pass on the gradients of the chunk before and this chunk, and to receive this chunk's gradients so
        #    far and the next chunk: one batch, the same on both sides.
        arrives = 0 < step <= last
        if arrives:
            sums = [_zeros(part) for part in held]
        coming, passing = _pass_on(schedule, step, held, (k, v), leaving, sums if arrives else [])
        # 2. Compute this rank's part.
        if sees:
            own = [_zeros(part) for part in held] if step else sums
            attention_chunk.backward(of_queries, held, schedule.chunk(source), [dq, *own], alone)
        # 3. Add it, in the order of the ring.
        passing.wait()
        if arrives and sees:
            for total, part in zip(sums, own, strict=True):
                total += part
            del own
        # 4. The gradients go to the next rank, or to the owner.
        leaving = sums if step < last else []
        if 0 < step == last:
            going_home += [(part, source) for part in sums]
        elif step == 0:
            home = sums
        held = coming
    travelled = schedule.last_step(ranks.rank)
    if travelled:
        home = [_zeros(k), _zeros(v)]
    coming_home = [(part, (ranks.rank + travelled) % ranks.world_size) for part in home] if travelled else []
    send_recv(ranks, going_home, coming_home).wait()
    return [dq, *home]


def sinks_gradient(sinks, lse, delta, ranks: Communicator) -> torch.Tensor:
    """Return the gradient of the sinks from all ranks' queries; the same on every rank."""
    gradient = -(torch.exp(sinks.float().view(1, -1, 1) - lse) * delta).sum((0, 2))
    return ranks.all_reduce_(gradient).to(sinks.dtype)


def _pass_on(
    schedule: RingSchedule, step: int, held, like, leaving: Sequence[torch.Tensor] = (), arriving: Sequence = ()
) -> tuple[list[torch.Tensor], PendingTransfer]:
    """Start to send the current chunk and to receive the next, each only if a later rank uses it.

    Args:
        schedule: the schedule of the ring.
        step: number of the step.
        held: the current chunk.
        like: tensors of the types of a chunk.
        leaving: tensors to send before the chunk.
        arriving: tensors to receive before the chunk.

    Returns:
        The buffers of the next chunk ([] if it does not come), and the transfer under way.
    """
    ranks = schedule.ranks
    source, following = (ranks.rank - step) % ranks.world_size, (ranks.rank - step - 1) % ranks.world_size
    sends = schedule.last_step(source) > step
    receives = step + 1 < ranks.world_size and schedule.last_step(following) > step
    coming: list[torch.Tensor] = []
    if receives:
        positions = schedule.key_positions[following]
        rows = positions.length + positions.second_length
        coming = [x.new_empty((*x.shape[:2], rows, x.size(3))) for x in like]
    to, origin = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    passing = send_recv(
        ranks,
        [(x, to) for x in (*leaving, *(held if sends else ()))],
        [(x, origin) for x in (*arriving, *coming)],
    )
    return coming, passing


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
