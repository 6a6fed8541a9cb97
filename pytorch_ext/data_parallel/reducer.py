"""Reduction of gradients during backward: autograd fills buckets, full buckets travel, the end of backward waits.

Two hooks run for each parameter in every backward. The first runs before autograd accumulates. If there is no `.grad`
yet, it copies the gradient to its place in the bucket and returns that place, which autograd takes as the `.grad`
without another copy. If there is a `.grad`, autograd adds to it in place. The second hook runs afterwards and counts
the gradient.

Where weft's kernels pack a bucket (on GPUs), the first hook leaves the gradient to autograd, which makes it the `.grad`
as it is. One launch moves all gradients of the bucket when it is full.

The first backward has no buckets. Gradients stay where autograd put them, and the reducer records their order. At the
end the ranks take rank 0's order, and each gradient is moved to its place.

From then on a bucket travels when its last gradient has come. Buckets always travel in the same order, so no bit
depends on which bucket was full first.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from weft.comm.communicator import Communicator
from weft.data_parallel import consensus
from weft.data_parallel.bucket_comm import Transport, Wait, measure
from weft.data_parallel.buckets import (
    Bucket,
    Slot,
    alike,
    group_slots,
    lay_out,
    pack_by_kernels,
    put,
    ranks_that_reduce,
)
from weft.data_parallel.consensus import BackwardErrors, ErrorConsensus
from weft.data_parallel.grad_norm import BLOCK, counted, powers
from weft.sharding.owners import owners_of
from weft.sharding.ruled_tensor import RuledTensor
from weft.sharding.sharded_grad import gradient_like, is_elsewhere, local, over_ranks

if TYPE_CHECKING:
    from weft.data_parallel.sharded_optimizer import Shards

_STILL_RIGHT = 1e-5  # relative error of a squared norm: ten times that of fp32 sums over a block
_TAKEN = (
    "a hook took the gradient of {!r} away before the ranks had summed it (an optimizer that steps in backward would "
    "use this rank's own gradient): leave .grad there until backward ends"
)
_OTHER_LAYOUT = "the gradient of {!r} is {}; gradients must be dense (for nn.Embedding, sparse=False)"


class Reducer:
    """Reducer of the gradients of one module, from backward to the optimizer.

    Attributes:
        slots: the module's parameters, each with the place of its gradient.
        transport: transport of the buckets; `transport_of` gives that of experts, which fewer ranks have.
        ranks: ranks that reduce.
        sync: a forward's backward reduces; otherwise gradients add up on each rank. The value is stored with each
            forward's outputs and used by their backward.
        buckets: the buckets in the order in which they travel; [] until they are laid out.
        backwards: number of backwards that have reduced.
        norm_squared: float64 [1], squared norm of all gradients at the last reduction or the last `measure_anew`.
        owner: pieces of a sharded optimizer, which take over the reduced gradients; None without one.
        nonfinite_here: names of this rank's own non-finite gradients in the last reduction.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        transport: Transport,
        *,
        bucket_bytes: int,
        overlap: bool,
        unused: str,
        check_gradients: bool,
        by_hand: bool = False,
    ):
        """Make a reducer of these parameters.

        Args:
            unused: "error", "zero", or "others": a parameter unused on every rank keeps no gradient; if some ranks used
                it, the others count zeros.
            by_hand: one reduction covers all backwards from `begin`, before which no parameter has a gradient, to
                `finish`. `sync` is set in the last backward of a parameter, and its bucket may travel from then on.
                Other backwards are left as they are.
        """
        self.slots, self.transport, self.ranks = list(slots), transport, transport.ranks
        self.sync = True
        self._of_fewer: dict[Communicator, Transport] = {}
        self.buckets: list[Bucket] = []
        self.backwards = 0
        self.norm_squared = torch.zeros(1, dtype=torch.float64)
        self.owner: Shards | None = None
        self.nonfinite_here: list[str] = []
        self._bucket_bytes, self._overlap, self._unused = bucket_bytes, overlap, unused
        self._check_gradients, self._by_hand = check_gradients, by_hand
        self._consensus = ErrorConsensus(self.ranks, self.slots[0].parameter.device)
        self._reduces = True  # the backward under way
        self._ends = False  # autograd calls `_end` at the end of this backward, which has reached an output of forward
        self._task: int | None = None  # autograd's number of the backward under way
        self._outputs_begin = False  # hooks on the module's outputs call `begin`
        self.batch: list[int] = []  # mark of the last forward's arguments, while `learns`
        self._learning = True  # this backward records the order of gradients and how often each comes
        self._arrived: list[Slot] = []  # in that order
        self._waits: list[Wait] = []  # one for each bucket under way
        self._problems: list[str] = []
        self._nonfinite: list[str] = []
        self._watched: dict[Slot, torch.autograd.graph.Node] = {}  # keeps the nodes, which autograd would free
        self.watch()
        weakref.finalize(self, _forget_main_grads, self.slots)

    def set_sync(self, sync: bool) -> None:
        """Set whether the backwards of the next forwards reduce."""
        self.sync = self._reduces = sync
        self._ends = False

    def watch(self) -> None:
        """Reduce all parameters that now require gradients; the next backward records their order anew.

        Raises:
            ValueError: a frozen parameter has a gradient from no_sync() that was not reduced.
        """
        frozen = [slot for slot in self.slots if not slot.parameter.requires_grad]
        own = [slot.name for slot in frozen if slot.touched and slot.parameter.grad is not None]
        if own:
            raise ValueError(
                f"DataParallel: {', '.join(map(repr, own))} frozen while gradients from no_sync() wait to be summed: "
                "freeze after a backward that reduces"
            )
        self.buckets, self._learning = [], True
        for slot in self.slots:
            slot.bucket = slot.view = slot.outside = None
            if slot.parameter.requires_grad and slot not in self._watched:
                self._watched[slot] = self._hook(slot)

    def lay_out(self, order: Sequence[Slot]) -> None:
        """Lay out buckets for slots in this order. A collective call; every rank passes the same order."""
        self.buckets = lay_out(group_slots(order, self._bucket_bytes), self.ranks)
        if self.transport.packs:
            for ranks in dict.fromkeys(bucket.ranks for bucket in self.buckets):
                of_ranks = [bucket for bucket in self.buckets if bucket.ranks == ranks]
                pack_by_kernels(of_ranks, ranks, self.transport.wire_dtype)

    def transport_of(self, bucket: Bucket) -> Transport:
        """Return the transport of a bucket, between the ranks that have its parameters."""
        if bucket.ranks == self.ranks:
            return self.transport
        return self._of_fewer.setdefault(bucket.ranks, replace(self.transport, ranks=bucket.ranks))

    # During backward.

    def begin_at(self, outputs: Sequence[torch.Tensor]) -> None:
        """Begin the reduction when backward reaches one of these outputs of forward.

        A reentrant checkpoint runs a backward inside the backward, and that one reaches parameters first. Its end is
        not the end of the whole, so the outer backward must begin the reduction.

        A backward reduces if `sync` was set in its own forward, regardless of forwards that ran since. A backward
        from outputs of several forwards reduces if it was set in one of them.
        """
        # The graph holds the reducer, because nothing else does after `weft.DataParallel(model)(x)`.
        reducer, sync = self, self.sync

        def begin(_) -> None:
            if reducer._task == torch._C._current_graph_task_id():
                return
            if reducer._task is not None:
                reducer._abandon()
            if not reducer._ends:
                Variable._execution_engine.queue_callback(reducer._end)  # type: ignore[attr-defined]
            if reducer.slots[0].into_main_grad:  # all are: products are added there before a parameter's hooks run
                for slot in reducer.slots:
                    reducer._count_once(slot)
            reducer._outputs_begin, reducer._ends, reducer._reduces = True, True, sync
            if sync:
                reducer._begin()

        if not any(slot.parameter.requires_grad for slot in self.slots):  # frozen, and passed through
            outputs = ()
        self._outputs_begin = bool(outputs)
        for output in outputs:
            output.register_hook(begin)

    def begin(self) -> None:
        """Begin a reduction that ends with `finish`. What a step that raised has left is given up."""
        if self._task is not None:
            self._abandon()
        self.check_earlier()
        self.set_sync(False)
        for slot in self.slots:
            slot.reduced = False
        self._task = -1  # of no backward

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and wait for all of it. A collective call."""
        self._reduces = True
        self._finish()

    def _begin(self) -> None:
        if self._task is not None:
            self._abandon()
        self.check_earlier()
        for slot in self.slots:
            if type(slot.parameter.grad) is RuledTensor and is_elsewhere(slot.parameter.grad):
                slot.parameter.grad = None
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _end(self) -> None:
        if self._task is None:
            self._reduces, self._ends = self.sync, False

    def check_earlier(self) -> None:
        """Raise an error of the last backward that this rank has not heard of yet; see ErrorConsensus."""
        self._consensus.check_earlier(self.backwards)

    def _hook(self, slot: Slot) -> torch.autograd.graph.Node:
        reference = weakref.ref(self)  # a parameter may outlive the wrapper

        def coming(gradients):
            reducer = reference()
            return None if reducer is None else reducer._coming(slot, gradients[0])

        def arrived(_):
            reducer = reference()
            if reducer is not None:
                reducer._has_arrived(slot)

        node = get_gradient_edge(slot.parameter).node
        for handle in (
            node.register_prehook(coming),
            slot.parameter.register_post_accumulate_grad_hook(arrived),
        ):
            weakref.finalize(self, handle.remove)  # otherwise the hooks would keep the buckets
        return node

    def _coming(self, slot: Slot, gradient: torch.Tensor | None):
        """Return the tuple that autograd accumulates instead of the gradient, or None to keep the gradient."""
        # In few calls of Python functions: this runs for each parameter in each backward.
        if self._by_hand and self._task is None:  # a backward outside of a step, which reduces nothing
            return None
        slot.given = False
        if type(slot.parameter.grad) is RuledTensor and is_elsewhere(slot.parameter.grad):
            slot.parameter.grad = None
        if gradient is None:
            return None
        again = self._reduces and not self._learning and slot.arrivals >= slot.due
        if again or torch.is_grad_enabled() or gradient.layout is not torch.strided:
            self._problems.append(self._problem_with(slot, gradient))
            return (None,)
        slot.given = True
        if self._check_gradients and not gradient.isfinite().all():
            self._nonfinite.append(slot.name)
        if slot.reduced and (slot.into_main_grad or slot.parameter.grad is not None):
            self._count_once(slot)
        slot.reduced = False
        if slot.view is None or slot.bucket is None:
            return None
        if slot.into_main_grad:
            slot.view.add_(gradient)
            return (None,)
        if slot.parameter.grad is None and (slot.bucket.packing is None or not self._stays(slot, gradient)):
            put(gradient, slot)
            return (slot.view.detach(),)
        return None

    def _stays(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether a gradient outside the bucket stays there until the bucket is packed.

        It does only if its bucket is packed during this backward, so that its memory is soon free again. A gradient in
        memory of the buckets does not stay, because a reduction may write to it.
        """
        assert slot.bucket is not None
        if slot.bucket.packing is None or self._learning or not (self._reduces and self._overlap):
            return False
        buckets, own = slot.place.untyped_storage(), gradient.untyped_storage()
        return alike(gradient, slot.place) and own.data_ptr() != buckets.data_ptr()

    def _problem_with(self, slot: Slot, gradient: torch.Tensor) -> str:
        if gradient.layout is not torch.strided:
            return _OTHER_LAYOUT.format(slot.name, gradient.layout)
        if torch.is_grad_enabled():
            return (
                f"the gradient of {slot.name!r} is to be differentiated (create_graph=True); sums over ranks cannot be "
                "differentiated"
            )
        return (
            f"{slot.name!r} got another gradient after the {slot.due} that it got in the first backward; run the "
            "same graph in every step, or checkpoint with use_reentrant=False"
        )

    def _count_once(self, slot: Slot) -> None:
        """Change the result of the last reduction, before more is added to it, so that the next one leaves it as it is.

        An average over all ranks needs no change. For gradients that are summed, all ranks but rank 0 drop the result.
        A sum over few ranks (those of an expert) that is divided by the number of all would shrink it.
        """
        gradient = slot.view if slot.into_main_grad else slot.parameter.grad
        reduced, slot.reduced = slot.reduced, False
        if not reduced or gradient is None:
            return
        ranks, divisor = ranks_that_reduce(slot.parameter, self.ranks), self.transport.divisor
        if divisor == 1 and ranks.rank > 0:
            slot.parameter.grad = None
        elif divisor not in (1, ranks.world_size):
            local(gradient).mul_(divisor / ranks.world_size)

    def _has_arrived(self, slot: Slot) -> None:
        if self._by_hand and self._task is None:
            return
        gradient = slot.parameter.grad
        if slot.into_main_grad:
            slot.touched = True
        elif gradient is not None:
            slot.touched = True
            slot.outside = None
            if slot.view is not None and gradient.data_ptr() != slot.address:
                self._move_in(slot, gradient)
        if not self._reduces:
            return
        if not self._by_hand and (
            self._task is None or (not self._outputs_begin and self._task != torch._C._current_graph_task_id())
        ):
            self._begin()
        if gradient is None and not slot.into_main_grad:
            if slot.given:
                self._problems.append(_TAKEN.format(slot.name))
            elif slot.view is not None:  # an autograd function gave None
                self._fill_in(slot)
        slot.arrivals += 1
        if self._learning:
            self._arrived.append(slot)
        elif slot.arrivals == slot.due:
            bucket = slot.bucket
            assert bucket is not None
            bucket.missing -= 1
            if bucket.flat.is_cuda:
                bucket.is_written()
            if self._overlap and bucket.missing <= 0:
                self._launch_full()

    def _move_in(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Move a `.grad` from outside the bucket to the slot's place, now or when the bucket is packed.

        It was left there, or a user's hook made it, or it was assigned.
        """
        if gradient.layout is not torch.strided or gradient.dtype != slot.place.dtype:
            found = gradient.dtype if gradient.layout is torch.strided else gradient.layout
            self._problems.append(_OTHER_LAYOUT.format(slot.name, found))
            return
        if self._stays(slot, gradient):
            slot.outside = gradient
            return
        put(gradient, slot)
        slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())

    def _launch_full(self) -> None:
        """Start full buckets in bucket order, up to the first that is not full."""
        while len(self._waits) < len(self.buckets) and self.buckets[len(self._waits)].missing <= 0:
            bucket = self.buckets[len(self._waits)]
            self._waits.append(self.transport_of(bucket).start(bucket, self._overlap))

    # At the end of backward.

    def _finish(self) -> None:
        self._task = None
        self.backwards += 1
        self.nonfinite_here, self._nonfinite = self._nonfinite, []
        try:
            self._reduce_the_rest()
        finally:
            self._reset()

    def _reduce_the_rest(self) -> None:
        if self._learning:
            self._learn()
        trained = [slot for bucket in self.buckets for slot in bucket.slots]
        # Those without a gradient of this backward, or one of an earlier no_sync() backward.
        unused = [
            slot
            for slot in trained
            if (not slot.touched and not self._by_hand)  # torch's pipelines add some gradients past the hooks
            or not (slot.arrivals or slot.into_main_grad or slot.parameter.grad is not None)
        ]
        for slot in trained:
            if slot.arrivals and slot.touched and slot.parameter.grad is None and not slot.into_main_grad:
                self._problems.append(_TAKEN.format(slot.name))
            elif not slot.arrivals or (slot.parameter.grad is None and not slot.into_main_grad):
                self._fill_in(slot)
        for bucket in self.buckets[len(self._waits) :]:
            bucket.missing = 0
            bucket.is_written()
        self._launch_full()
        for wait in self._waits:
            wait()
        unused_names = [slot.name for slot in unused] if self._unused == "error" else []
        errors = BackwardErrors(unused_names, self._problems)
        own_error = self._consensus.check(self.backwards, errors)
        if self._unused == "others":
            self._drop_unused(trained, unused)
        for slot in trained:
            slot.reduced = True
        if self.owner is not None:
            self.owner.deliver()
        if not self._by_hand:
            self.norm_squared = self._norm_squared()
        if own_error:
            raise RuntimeError(own_error)

    @property
    def learns(self) -> bool:
        """Whether the next backward is a first one."""
        return self._learning

    def _learn(self) -> None:
        """Record from the first backward how often each gradient comes, and lay out buckets if there are none.

        Buckets follow the order of the gradients. Parameters without a gradient come last.
        """
        trained = [slot for slot in self.slots if slot.parameter.requires_grad]
        for slot in trained:
            slot.due = max(1, slot.arrivals)
        if not self.buckets:
            last_time = {slot: place for place, slot in enumerate(self._arrived)}
            order = sorted(trained, key=lambda slot: last_time.get(slot, len(self._arrived)))
            self.lay_out(consensus.agreed_order(self.ranks, order))
        if not self._by_hand:
            consensus.warn_of_same_batch(self.ranks, self.batch)
        self._learning = False

    def _fill_in(self, slot: Slot) -> None:
        """Prepare the place of a parameter that got no gradient in this backward: an earlier gradient, or zeros."""
        self._count_once(slot)
        if slot.into_main_grad:
            return
        if slot.parameter.grad is None:
            slot.place.zero_()
            if self._unused != "error":
                slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())
        elif slot.parameter.grad.data_ptr() != slot.address:
            self._move_in(slot, slot.parameter.grad)

    def _drop_unused(self, trained: Sequence[Slot], unused: Sequence[Slot]) -> None:
        """Remove the gradients of parameters that no rank has used."""
        where = self.ranks.device_of_numbers(trained[0].parameter.device)
        used = torch.ones(len(trained), dtype=torch.int32, device=where)
        numbers = {slot: number for number, slot in enumerate(trained)}
        used[[numbers[slot] for slot in unused]] = 0
        for slot, by_some in zip(trained, self.ranks.all_reduce_(used, dist.ReduceOp.MAX).tolist(), strict=True):
            if not by_some:
                slot.parameter.grad = None

    def _norm_squared(self) -> torch.Tensor:
        """Return the squared norm of all gradients, with each element counted once.

        Shards are summed over the ranks that hold them, and whole parameters are counted on this rank alone. For a
        model in stages the result is then summed over the ranks that have the stages.
        """
        owners = owners_of(self.slots[0].parameter)
        stages = [] if owners is None else [owners.ranks]
        total = torch.zeros_like(self.buckets[0].squared_norm)
        for ranks in dict.fromkeys(bucket.ranks for bucket in self.buckets):
            parts = [
                (self._counted_norm(bucket), () if bucket.shard_ranks is None else (bucket.shard_ranks,))
                for bucket in self.buckets
                if bucket.ranks == ranks
            ]
            total += over_ranks(parts, [*([ranks] if self.transport.scatter else []), *stages], total)
        return total

    def _counted_norm(self, bucket: Bucket) -> torch.Tensor:
        """Return the squared norm of this rank's part of the bucket, without elements that another rank counts."""
        if not bucket.counted_here:
            return torch.zeros_like(bucket.squared_norm)
        if not bucket.replicated:
            return bucket.squared_norm
        views = [(slot.parameter, slot.place) for slot in bucket.slots]
        pairs = views if self.owner is None else self.owner.pieces_of(bucket)
        held = [counted(parameter, view) for parameter, view in pairs]
        return powers(held, 2.0).reshape(1) if held else torch.zeros_like(bucket.squared_norm)

    def _abandon(self) -> None:
        """Wait for the buckets of a backward that raised before its end, so that nothing writes to them under way."""
        for wait in self._waits:
            wait()
        self._task = None
        self._reset()

    def _reset(self) -> None:
        self._reduces, self._ends = self.sync, False
        self._waits, self._arrived, self._problems = [], [], []
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.written.clear()
        for slot in self.slots:
            slot.arrivals, slot.touched, slot.outside = 0, False, None

    # After backward.

    def measure_anew(self) -> None:
        """Set norm_squared to that of the present gradients, which may be unscaled or clipped since the reduction.

        A collective call if ranks have different parts of the gradients.
        """
        if self.owner is None:
            self._gather_strays()
        for bucket, held in zip(self.buckets, self.held(), strict=True):
            # Sums in fp32 take an eighth of the time, and show whether the reduction's norm is still right.
            if held.is_cuda or not powers(held.split(BLOCK), 2.0).isclose(bucket.squared_norm, _STILL_RIGHT):
                measure(held, bucket)
        if self.buckets:
            self.norm_squared = self._norm_squared()

    def _gather_strays(self) -> None:
        """Zero the places of gradients that were removed, and move gradients that were replaced to their places."""
        for slot in (slot for bucket in self.buckets for slot in bucket.slots if not slot.into_main_grad):
            gradient = slot.parameter.grad
            if gradient is None:
                slot.place.zero_()
            elif gradient.data_ptr() != slot.address:
                put(gradient, slot)
                slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())

    def held(self) -> list[torch.Tensor]:
        """Return each bucket's reduced gradients: all of them, or this rank's part under a sharded optimizer."""
        return [bucket.flat for bucket in self.buckets] if self.owner is None else self.owner.gradients()

    def nonfinite(self) -> dict[str, list[int]]:
        """Return the parameters with non-finite gradients, each with the ranks that had one before the reduction."""
        names = [
            name for bucket, held in zip(self.buckets, self.held(), strict=True) for name in self._bad(bucket, held)
        ]
        gathered: list[tuple[list[str], list[str]]] = self.ranks.all_gather_object((names, self.nonfinite_here))
        found: dict[str, list[int]] = {name: [] for reduced, _ in gathered for name in reduced}
        for rank, (_, own) in zip(self.ranks.global_ranks, gathered, strict=True):
            for name in own:
                found.setdefault(name, []).append(rank)
        return found

    def _bad(self, bucket: Bucket, held: torch.Tensor) -> Iterator[str]:
        begin = 0 if self.owner is None else bucket.ranks.rank * held.numel()
        for slot in bucket.slots:
            start, stop = max(slot.offset - begin, 0), slot.offset + slot.parameter.numel() - begin
            if not held[start : max(stop, 0)].isfinite().all():
                yield slot.name


def _forget_main_grads(slots: Sequence[Slot]) -> None:
    """Remove `main_grad` from the parameters, because layers would add gradients to it that nothing reads."""
    for slot in slots:
        if slot.into_main_grad and getattr(slot.parameter, "main_grad", None) is slot.view:
            del slot.parameter.main_grad  # type: ignore[attr-defined]
