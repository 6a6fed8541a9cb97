"""The "weft" backend of torch.distributed: a ProcessGroup whose ranks share memory.

A subclass in Python of torch's ProcessGroup: it costs a few microseconds a call and links against no libtorch, so one
build serves every torch. Collectives complete before they return; the Work they hand back is done.
"""

# torch declares these methods with overloads, and some of them twice, under an old name and a new one.
# mypy: disable-error-code="override, assignment, call-arg"

import torch
import torch.distributed as dist

from weft import _C
from weft.comm.dtypes import check_cpu, movable, reducible, reduction
from weft.comm.rendezvous import join

Tensors = list[torch.Tensor]


class WeftProcessGroup(dist.ProcessGroup):
    """Collectives over shared memory between the processes of one machine, on CPU tensors."""

    engine: _C.Group

    @classmethod
    def create(cls, options) -> "WeftProcessGroup":
        """From c10d's DistributedBackendOptions; called by init_process_group and new_group."""
        ranks_on_machine = dist.get_world_size() if dist.is_initialized() else options.group_size
        group = cls(options.group_rank, options.group_size)
        group.engine = join(
            options.store,
            options.group_rank,
            options.group_size,
            name=str(options.group_id),
            timeout=options.timeout,
            ranks_on_machine=ranks_on_machine,
            lost_ranks=lambda: _lost_members(options.global_ranks_in_group),
        )
        group._name, group._desc = str(options.group_id), "undefined"
        return group

    # What torch asks a backend for.

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "weft"

    # torch keeps a group's name and description in a C++ backend, which this group does not have.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if desc and desc != "undefined":
            self.engine.rename(desc)

    group_name = property(getGroupName)
    group_desc = property(lambda self: self._desc)

    def _set_default_timeout(self, timeout) -> None:
        self.engine.set_timeout(timeout.total_seconds())

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        self.engine.leave()

    abort = shutdown

    # Collectives.

    def allreduce(self, tensors: Tensors, opts=None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        for x in _as_list(tensors):
            check_cpu(x)
            whole = x if x.is_contiguous() else x.contiguous()
            address = whole.data_ptr()
            self.engine.all_reduce(address, address, whole.numel(), reducible(whole), reduction(opts.reduceOp))
            if whole is not x:
                x.copy_(whole)
        return _Done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts=None) -> dist.Work:
        root = opts.rootRank if opts is not None else 0
        for x in _as_list(tensors):
            check_cpu(x)
            whole = x if x.is_contiguous() else x.contiguous()
            code, scale = movable(x)
            self.engine.broadcast(whole.data_ptr(), whole.numel() * scale, code, root)
            if whole is not x:
                x.copy_(whole)
        return _Done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts=None) -> dist.Work:
        for parts, x in zip(outputs, inputs, strict=True):
            if len(parts) != self.size():
                raise ValueError(f"all_gather: expected {self.size()} output tensors, one per rank, got {len(parts)}")
            _check_same(parts[self.rank()], x, "all_gather", "this rank's output", "its input")
            whole_parts = [part if part.is_contiguous() else torch.empty(part.shape, dtype=x.dtype) for part in parts]
            self._gather(x, whole_parts)
            for part, whole in zip(parts, whole_parts, strict=True):
                if part is not whole:
                    part.copy_(whole)
        return _Done(outputs)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts=None) -> dist.Work:
        if output.numel() != x.numel() * self.size():
            raise ValueError(
                f"all_gather_into_tensor: the output has {output.numel()} elements; {self.size()} ranks with an input "
                f"of {x.numel()} need {x.numel() * self.size()}"
            )
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        self._gather(x, list(whole.view(-1).split(x.numel())) if x.numel() else [whole] * self.size())
        if whole is not output:
            output.copy_(whole)
        return _Done([output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> dist.Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, x, opts)
        return _Done(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts=None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != self.size():
                raise ValueError(
                    f"reduce_scatter: expected {self.size()} input tensors, one per rank, got {len(parts)}"
                )
            _check_same(output, parts[self.rank()], "reduce_scatter", "the output", "this rank's input")
            self._reduce_scatter(output, [part.contiguous() for part in parts], opts.reduceOp)
        return _Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts=None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if x.numel() != output.numel() * self.size():
            raise ValueError(
                f"reduce_scatter_tensor: the input has {x.numel()} elements; {self.size()} ranks with an output of "
                f"{output.numel()} need {output.numel() * self.size()}"
            )
        whole = x.contiguous().view(-1)
        self._reduce_scatter(
            output, list(whole.split(output.numel())) if len(whole) else [whole] * self.size(), opts.reduceOp
        )
        return _Done([output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> dist.Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, x, opts)
        return _Done(outputs)

    def barrier(self, opts=None) -> dist.Work:
        self.engine.barrier()
        return _Done([])

    # The names that torch used before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _gather(self, x: torch.Tensor, parts: Tensors) -> None:
        for tensor in (x, *parts):
            check_cpu(tensor)
            if tensor.dtype != x.dtype:
                raise TypeError(f"all_gather: the input is {x.dtype}, an output {tensor.dtype}; they must be the same")
        code, scale = movable(x)
        counts = [part.numel() * scale for part in parts]
        self.engine.all_gather(x.contiguous().data_ptr(), [part.data_ptr() for part in parts], counts, code)

    def _reduce_scatter(self, output: torch.Tensor, parts: Tensors, op) -> None:
        for tensor in (output, *parts):
            check_cpu(tensor)
            if tensor.dtype != output.dtype:
                raise TypeError(
                    f"reduce_scatter: the output is {output.dtype}, an input {tensor.dtype}; they must be the same"
                )
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        addresses, counts = [part.data_ptr() for part in parts], [part.numel() for part in parts]
        self.engine.reduce_scatter(addresses, whole.data_ptr(), counts, reducible(output), reduction(op))
        if whole is not output:
            output.copy_(whole)


class _Done(dist.Work):
    """The Work of a collective that completed before it returned."""

    def __init__(self, result):
        super().__init__()
        self._result = result

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self):
        return self._result

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


def _lost_members(members: list[int]) -> list[int]:
    """Which of a group in the making, given by global ranks, the default group has already lost."""
    default = dist.group.WORLD
    if not isinstance(default, WeftProcessGroup):
        return []
    return [members.index(rank) for rank in default.engine.lost_ranks() if rank in members]


def _as_list(tensors) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _check_same(a: torch.Tensor, b: torch.Tensor, what: str, a_name: str, b_name: str) -> None:
    if a.numel() != b.numel() or a.dtype != b.dtype:
        raise ValueError(
            f"{what}: {a_name} is {a.dtype} with {a.numel()} elements, {b_name} {b.dtype} with {b.numel()}; "
            "they must be alike"
        )


def _not_there(operation: str):
    def raise_not_implemented(self, *args, **kwargs):
        raise NotImplementedError(
            f"the weft backend has no {operation} yet; for this operation use a group of the gloo backend "
            '(torch.distributed.new_group(backend="gloo"))'
        )

    return raise_not_implemented


for _operation in (
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "allgather_coalesced",
    "send",
    "recv",
    "recv_anysource",
    "monitored_barrier",
):
    setattr(WeftProcessGroup, _operation, _not_there(_operation))
