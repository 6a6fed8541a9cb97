"""The life of a gradient: autograd writes it into its bucket, the full bucket travels, the end of backward waits.

For each parameter two hooks run in every backward. The first, before autograd accumulates: where there is no `.grad`
yet it copies the gradient to its place and hands autograd that place, which autograd takes as the `.grad` without
another copy; where there is one, autograd adds to it in place. The second, after: the gradient has come.

In the first backward there are no buckets yet: gradients stay where autograd put them, which shows the order; at its
end the ranks agree on rank 0's order, and each gradient is moved to its place. From then on a bucket travels as soon as
its last gradient has come, buckets always in the same order, so that no bit depends on who was first.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from weft.data_parallel import consensus
from weft.data_parallel.bucket_comm import BLOCK, Transport, Wait, measure
from weft.data_parallel.buckets import Bucket, Slot, lay_out, plan, put
from weft.data_parallel.consensus import BackwardErrors, ErrorConsensus
from weft.data_parallel.grad_norm import counted, powers
from weft.sharding.owners import owners_of
from weft.sharding.sharded_grad import GradientElsewhere, gradient_like, over_ranks

if TYPE_CHECKING:
    from weft.data_parallel.sharded_optimizer import Shards

_STILL_RIGHT = 1e-5  # relative, of a squared norm: ten times what sums of a block in fp32 are off
_TAKEN = (
    "a hook took the gradient of {!r} away before the ranks had summed it (an optimizer that steps in backward would "
    "step by this rank's own): leave .grad there until backward ends"
)
_OTHER_LAYOUT = "the gradient of {!r} is {}; gradients must be dense (for nn.Embedding, sparse=False)"


class Reducer:
    """Gradients of one module, from backward to where an optimizer finds them.

    Attributes:
        sync: whether the backward that comes reduces (else gradients add up on each rank): as the last forward said,
            until an output of another forward tells better.
        among: ranks that take part; fewer than all once some have run out of inputs.
        norm_squared: float64 [1], of all gradients after the last reduction, or when they were measured since.
        owner: of a sharded optimizer, which takes the reduced gradients over.
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
    ):
        self.slots, self.transport, self.ranks = list(slots), transport, transport.ranks
        self.sync, self.among = True, self.ranks.world_size
        self.buckets: list[Bucket] = []
        self.backwards = 0
        self.norm_squared = torch.zeros(1, dtype=torch.float64)
        self.owner: Shards | None = None
        self.nonfinite_here: list[str] = []  # this rank's own gradients, of the last reduction
        self._bucket_bytes, self._overlap, self._unused = bucket_bytes, overlap, unused
        self._check_gradients = check_gradients
        self._verdict = ErrorConsensus(self.ranks, self.slots[0].parameter.device)
        self._task: int | None = None  # autograd's number of the backward under way
        self._outputs_tell = False  # the module's outputs call `begin`
        self._learning = True  # this backward shows the order of gradients and how often each comes
        self._arrived: list[Slot] = []  # in that order
        self._waits: list[Wait] = []  # of the buckets that fly
        self._problems: list[str] = []
        self._nonfinite: list[str] = []
        self._watched: dict[Slot, torch.autograd.graph.Node] = {}  # autograd alone would let go of the nodes
        self.watch()
        weakref.finalize(self, _forget_main_grads, self.slots)

    def watch(self) -> None:
        """From now on every parameter that requires a gradient is reduced; the next backward starts anew.

        Raises:
            ValueError: one that does not has a gradient of this rank's own, from no_sync().
        """
        frozen = [slot for slot in self.slots if not slot.parameter.requires_grad]
        own = [slot.name for slot in frozen if slot.touched and slot.parameter.grad is not None]
        if own:
            raise ValueError(
                f"DataParallel: {', '.join(map(repr, own))} frozen while gradients from no_sync() wait to be summed, "
                "which they now never would be: freeze after a backward that reduces"
            )
        self.buckets, self._learning = [], True
        for slot in self.slots:
            slot.bucket = slot.view = None
            if slot.parameter.requires_grad and slot not in self._watched:
                self._watched[slot] = self._hook(slot)

    def lay_out(self, order: Sequence[Slot]) -> None:
        """A collective call: every rank gives the same order."""
        self.buckets = lay_out(plan(order, self._bucket_bytes), self.ranks)

    # In backward.

    def begin_at(self, outputs: Sequence[torch.Tensor]) -> None:
        """Backward will come by these tensors first: of a backward inside of it (a reentrant checkpoint's), which
        reaches parameters first, the end is not the end. It reduces as this forward was told, whatever another forward
        was since; of several forwards' outputs, if any of them was told to."""
        reducer, sync = self, self.sync  # held by the graph: nobody else may hold `weft.DataParallel(model)(x)`

        def begin(_) -> None:
            if reducer._task == torch._C._current_graph_task_id():
                return
            if reducer._task is not None:
                reducer._abandon()
            reducer._outputs_tell, reducer.sync = True, sync
            if sync:
                reducer._begin()

        self._outputs_tell = bool(outputs)
        for output in outputs:
            output.register_hook(begin)

    def _begin(self) -> None:
        if self._task is not None:
            self._abandon()
        for slot in self.slots:
            if isinstance(slot.parameter.grad, GradientElsewhere):
                slot.parameter.grad = None
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _hook(self, slot: Slot) -> torch.autograd.graph.Node:
        me = weakref.ref(self)  # a parameter may outlive the wrapper

        def coming(gradients):
            reducer = me()
            return None if reducer is None else reducer._coming(slot, gradients[0])

        def arrived(_):
            reducer = me()
            if reducer is not None:
                reducer._has_arrived(slot)

        node = get_gradient_edge(slot.parameter).node
        for handle in (
            node.register_prehook(coming),
            slot.parameter.register_post_accumulate_grad_hook(arrived),
        ):
            weakref.finalize(self, handle.remove)  # or they would keep the buckets
        return node

    def _coming(self, slot: Slot, gradient: torch.Tensor | None):
        """Returns what autograd accumulates instead; None leaves it as it is."""
        slot.given = False
        if isinstance(slot.parameter.grad, GradientElsewhere):
            slot.parameter.grad = None
        if gradient is None:
            return None
        if problem := self._problem_with(slot, gradient):
            self._problems.append(problem)
            return (None,)
        slot.given = True
        if self._check_gradients and not gradient.isfinite().all():
            self._nonfinite.append(slot.name)
        if slot.view is None:
            return None
        if slot.reduced:
            self._before_writing(slot)
        if slot.into_main_grad:
            slot.view.add_(gradient)
            return (None,)
        if slot.parameter.grad is None:
            put(gradient, slot)
            return (slot.view.detach(),)
        return None

    def _problem_with(self, slot: Slot, gradient: torch.Tensor) -> str:
        if gradient.layout is not torch.strided:
            return _OTHER_LAYOUT.format(slot.name, gradient.layout)
        if torch.is_grad_enabled():
            return f"the gradient of {slot.name!r} is to be differentiated (create_graph=True); sums over ranks are not"
        if self.sync and not self._learning and slot.arrivals >= slot.due:
            return (
                f"{slot.name!r} got another gradient after the {slot.due} that it got in the first backward; run the "
                "same graph in every step, or checkpoint with use_reentrant=False"
            )
        return ""

    def _before_writing(self, slot: Slot) -> None:
        """The first gradient since a reduction whose result is still there: it must be counted once, not W times."""
        slot.reduced = False
        if not self.transport.average and self.ranks.rank > 0:
            slot.parameter.grad = None

    def _has_arrived(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if slot.into_main_grad:
            slot.touched = True
        elif gradient is not None:
            slot.touched = True
            if slot.view is not None and gradient.data_ptr() != slot.address:
                self._move_in(slot, gradient)
        if not self.sync:
            return
        if self._task is None or (not self._outputs_tell and self._task != torch._C._current_graph_task_id()):
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
            assert slot.bucket is not None
            self._is_ready(slot.bucket)

    def _is_ready(self, bucket: Bucket) -> None:
        """One more of the bucket's gradients has come."""
        bucket.missing -= 1
        bucket.is_written()
        if self._overlap:
            self._launch_full()

    def _move_in(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient that lies elsewhere: a hook of the user's made it, or somebody assigned it."""
        if gradient.layout is not torch.strided or gradient.dtype != slot.place.dtype:
            what = gradient.dtype if gradient.layout is torch.strided else gradient.layout
            self._problems.append(_OTHER_LAYOUT.format(slot.name, what))
            return
        put(gradient, slot)
        slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())

    def _launch_full(self) -> None:
        """Buckets travel in their order, whichever is full first."""
        while len(self._waits) < len(self.buckets) and self.buckets[len(self._waits)].missing <= 0:
            self._waits.append(self.transport.start(self.buckets[len(self._waits)], self.among, self._overlap))

    # At its end.

    def _finish(self) -> None:
        self._task = None
        self.backwards += 1
        self.nonfinite_here, self._nonfinite = self._nonfinite, []
        try:
            self._reduce_the_rest()
        finally:
            self._reset()

    def reduce_nothing(self) -> None:
        """Takes part in one reduction without gradients of its own: this rank has run out of inputs."""
        for slot in self.slots:
            slot.parameter.grad = None
            if slot.into_main_grad and slot.view is not None:
                slot.view.zero_()
        self._unused, unused = "zero", self._unused
        try:
            self._finish()
        finally:
            self._unused = unused

    def _reduce_the_rest(self) -> None:
        if self._learning:
            self._learn()
        trained = [slot for bucket in self.buckets for slot in bucket.slots]
        unused = [slot for slot in trained if not self._has_gradient(slot)]
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
        trouble = BackwardErrors(unused_names, self._problems)
        if self._verdict.ask(bool(trouble.unused or trouble.problems)):
            raise RuntimeError(self._verdict.explain(self.backwards, trouble))
        for slot in trained:
            slot.reduced = True
        if self.owner is not None:
            self.owner.deliver()
        self.norm_squared = self._norm_squared()

    def _learn(self) -> None:
        """From the first backward: how often each gradient comes and, where there are no buckets yet, in which order.
        Those that did not come are last."""
        trained = [slot for slot in self.slots if slot.parameter.requires_grad]
        for slot in trained:
            slot.due = max(1, slot.arrivals)
        if not self.buckets:
            last_time = {slot: place for place, slot in enumerate(self._arrived)}
            order = sorted(trained, key=lambda slot: last_time.get(slot, len(self._arrived)))
            self.lay_out(consensus.agreed_order(self.ranks, order))
        self._learning = False

    def _has_gradient(self, slot: Slot) -> bool:
        """From this backward, or from one without synchronisation before it which nobody has zeroed."""
        return slot.touched and (bool(slot.arrivals) or slot.into_main_grad or slot.parameter.grad is not None)

    def _fill_in(self, slot: Slot) -> None:
        """What travels for a parameter that got no gradient in this backward."""
        if slot.reduced:
            self._before_writing(slot)
        if slot.into_main_grad:
            return
        if slot.parameter.grad is None:
            slot.place.zero_()
            if self._unused == "zero":
                slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())
        elif slot.parameter.grad.data_ptr() != slot.address:
            self._move_in(slot, slot.parameter.grad)

    def _norm_squared(self) -> torch.Tensor:
        """Each element once: those of shards over the ranks that hold them, of whole parameters here; of a model in
        stages over the ranks that have them."""
        owners = owners_of(self.slots[0].parameter)
        then = [self.ranks] if self.transport.scatter else []
        then += [] if owners is None else [owners.ranks]
        parts = [
            (self._counted_norm(bucket), () if bucket.shard_ranks is None else (bucket.shard_ranks,))
            for bucket in self.buckets
        ]
        return over_ranks(parts, then, self.buckets[0].squared_norm)

    def _counted_norm(self, bucket: Bucket) -> torch.Tensor:
        """Of what this rank was left of the bucket, without what another rank counts."""
        if not bucket.counts:
            return torch.zeros_like(bucket.squared_norm)
        if not bucket.replicated:
            return bucket.squared_norm
        views = [(slot.parameter, slot.place) for slot in bucket.slots]
        held = [counted(one, view) for one, view in (views if self.owner is None else self.owner.pieces_of(bucket))]
        return powers(held, 2.0).reshape(1) if held else torch.zeros_like(bucket.squared_norm)

    def _abandon(self) -> None:
        """The backward before raised before its end: what it has sent must come back before anything is written."""
        for wait in self._waits:
            wait()
        self._task = None
        self._reset()

    def _reset(self) -> None:
        self._waits, self._arrived, self._problems = [], [], []
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.written.clear()
        for slot in self.slots:
            slot.arrivals, slot.touched = 0, False

    # What gradients say.

    def measure_anew(self) -> None:
        """norm_squared becomes that of the gradients as they are now: unscaled, say, or clipped. A collective call
        where ranks have parts."""
        if self.owner is None:
            self._gather_strays()
        for bucket, held in zip(self.buckets, self.held(), strict=True):
            # Sums in fp32 take an eighth of the time, and tell whether the reduction's norm is still right.
            if held.is_cuda or not powers(held.split(BLOCK), 2.0).isclose(bucket.squared_norm, _STILL_RIGHT):
                measure(held, bucket)
        if self.buckets:
            self.norm_squared = self._norm_squared()

    def _gather_strays(self) -> None:
        """What was taken away counts as zeros, and what was replaced is moved in."""
        for slot in (slot for bucket in self.buckets for slot in bucket.slots if not slot.into_main_grad):
            gradient = slot.parameter.grad
            if gradient is None:
                slot.place.zero_()
            elif gradient.data_ptr() != slot.address:
                put(gradient, slot)
                slot.parameter.grad = gradient_like(slot.parameter, slot.place.detach())

    def held(self) -> list[torch.Tensor]:
        """What this rank has of each bucket after a reduction: all of it, or its part under a sharded optimizer."""
        return [bucket.flat for bucket in self.buckets] if self.owner is None else self.owner.gradients()

    def nonfinite(self) -> dict[str, list[int]]:
        """Parameters of whose reduced gradient an element is not finite, with the ranks whose own gradient it was."""
        names = [
            name for bucket, held in zip(self.buckets, self.held(), strict=True) for name in self._bad(bucket, held)
        ]
        told: list[tuple[list[str], list[str]]] = self.ranks.all_gather_object((names, self.nonfinite_here))
        found: dict[str, list[int]] = {name: [] for reduced, _ in told for name in reduced}
        for rank, (_, own) in enumerate(told):
            for name in own:
                found.setdefault(name, []).append(rank)
        return found

    def _bad(self, bucket: Bucket, held: torch.Tensor) -> Iterator[str]:
        begin = 0 if self.owner is None else self.ranks.rank * held.numel()
        for slot in bucket.slots:
            start, stop = max(slot.offset - begin, 0), slot.offset + slot.parameter.numel() - begin
            if not held[start : max(stop, 0)].isfinite().all():
                yield slot.name


def _forget_main_grads(slots: Sequence[Slot]) -> None:
    """The package's layers would go on to add gradients to them, and nobody reads them any more."""
    for slot in slots:
        if slot.into_main_grad and getattr(slot.parameter, "main_grad", None) is slot.view:
            del slot.parameter.main_grad  # type: ignore[attr-defined]
