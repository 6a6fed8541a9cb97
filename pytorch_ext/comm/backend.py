"""The "weft" backend of torch.distributed: a ProcessGroup that works over shared memory.

It subclasses torch's ProcessGroup in Python. That costs a few microseconds a call, and links against no libtorch: one
build serves every torch. A call with async_op=True runs on a thread of the engine; every other call completes before
it returns.
"""

# torch declares these methods with overloads, and some of them twice, under an old name and a new one.
# mypy: disable-error-code="override, assignment, call-arg"

import functools
import re
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft import _C
from weft.comm import flight_record, rank_report
from weft.comm.communicator import Communicator, backends_of
from weft.comm.dtypes import op_code
from weft.comm.engine import Engine, Pending, promise
from weft.comm.inter_host import Message
from weft.comm.multi_host import SpanningEngine
from weft.comm.profile_events import EVENTS, ProfileEvent, profiling
from weft.comm.rendezvous import join
from weft.comm.sparse import all_reduce_sparse

_DEVICE_TYPE = "cuda"  # the device of the other half of "cpu:weft,cuda:nccl"

Tensors = list[torch.Tensor]


class WeftProcessGroup(dist.ProcessGroup):
    """Process group for CPU tensors: over shared memory inside a machine, over gloo between machines.

    Collectives of CUDA tensors go to the group's backend for CUDA ("cpu:weft,cuda:nccl"). torch normally picks a
    backend by device type, but it sends every call here because this backend is itself a process group.
    """

    engine: Engine | SpanningEngine
    timeout: timedelta
    communicator: Communicator | None = None  # set by `comm.registry`; the ops use it
    backend_name = "weft"  # "gloo" where the group is in its place
    _cuda_half: dist.ProcessGroup | None = None
    group_here: _C.Group | None = None  # all ranks, if they are on this machine

    @classmethod
    def create(cls, options) -> "WeftProcessGroup":
        """Return the group for c10d's DistributedBackendOptions; init_process_group and new_group call this."""
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
            members=options.global_ranks_in_group,
        )
        if isinstance(group.engine, Engine):
            group.group_here = group.engine.group
            flight_record.enable(group.group_here)
            rank_report.enter()
        group._name, group._desc = str(options.group_id), "undefined"
        group.timeout = options.timeout
        return group

    # Properties that torch reads from a backend.

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "weft"  # in gloo's place too: DDP's C++ would take this group for a ProcessGroupGloo

    def name(self) -> str:
        return self.backend_name

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

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.engine.set_timeout(timeout)
        self.timeout = timeout

    set_timeout = _set_default_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        # From 2.15 on torch asks while it makes the group, to attach its flight recorder, which needs a C++ backend.
        if self not in distributed_c10d._world.pg_map:
            return []
        return [torch.device(device) for device in backends_of(self)]

    def _get_backend(self, device: torch.device):
        return _CpuBackend(self) if device.type == "cpu" else self.cuda_half()._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives so far."""
        return self.group_here.calls if self.group_here is not None else 0

    def cuda_half(self) -> dist.ProcessGroup:
        """Return the group of the same ranks for CUDA tensors.

        torch makes no second backend for "cpu:weft,cuda:nccl", because this backend is a process group and gets every
        call. This method makes it. Every rank must take part in the first call. The group ends with the default group.

        Raises:
            TypeError: the group was started without a backend for CUDA.
        """
        backend = backends_of(self).get("cuda")
        if backend is None:
            raise TypeError(
                "the weft backend takes CPU tensors, got one on a GPU; for both start the group with the backend "
                '"cpu:weft,cuda:nccl"'
            )
        if self._cuda_half is None:
            ranks = dist.get_process_group_ranks(self)
            self._cuda_half, _ = distributed_c10d._new_process_group_helper(
                self.size(),
                self.rank(),
                ranks,
                f"{_DEVICE_TYPE}:{backend}",
                distributed_c10d._get_process_group_store(self),
                distributed_c10d.GroupName(f"{self.group_name}/cuda"),
                timeout=self.timeout,
                group_desc=f"{self.group_desc}/cuda",
            )
            distributed_c10d._world.pg_group_ranks[self._cuda_half] = {rank: at for at, rank in enumerate(ranks)}
        return self._cuda_half

    def shutdown(self) -> None:
        flight_record.write()
        try:
            if self.communicator is not None:
                self.communicator.drain()
        finally:
            self.communicator = self._cuda_half = None  # both refer to this group and would keep it alive
            self.engine.leave()
            if getattr(self, "group_here", None) is not None:
                rank_report.leave()

    def abort(self) -> None:
        self.engine.abort()

    # Collectives.

    def allreduce(self, tensors: Tensors, opts=None) -> dist.Work:
        self._check_parts("all_reduce", tensors)
        opts = opts or dist.AllreduceOptions()
        op, wait, pending = op_code(opts.reduceOp), not opts.asyncOp, []
        for x in _as_list(tensors):
            if x.layout is torch.sparse_coo:
                all_reduce_sparse(self.engine, x, op)
            else:
                pending.append(self.engine.all_reduce(x, op, wait))
        return _Work(pending, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts=None) -> dist.Work:
        self._check_parts("reduce", tensors)
        opts = opts or dist.ReduceOptions()
        op, wait = op_code(opts.reduceOp), not opts.asyncOp
        return _Work([self.engine.reduce(x, opts.rootRank, op, wait) for x in _as_list(tensors)], tensors)

    def broadcast(self, tensors: Tensors, opts=None) -> dist.Work:
        self._check_parts("broadcast", tensors)
        opts = opts or dist.BroadcastOptions()
        return _Work([self.engine.broadcast(x, opts.rootRank, not opts.asyncOp) for x in _as_list(tensors)], tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts=None) -> dist.Work:
        wait = _waits(opts)
        pending = []
        for parts, x in zip(outputs, inputs, strict=True):
            self._check_one_each("all_gather", "output", parts)
            _check_same_size("all_gather", parts[self.rank()], "this rank's output", x, "its input")
            pending.append(self.engine.all_gather(x, parts, wait))
        return _Work(pending, outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts=None) -> dist.Work:
        """Set outputs[r][i] to rank r's inputs[i]; `outputs` has one list per rank, in allgather one per tensor."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts=None) -> "_Work":
        if output.numel() != x.numel() * self.size():
            raise ValueError(
                f"all_gather_into_tensor: the output has {output.numel()} elements; {self.size()} ranks with an input "
                f"of {x.numel()} need {x.numel() * self.size()}"
            )
        return _Work([self.engine.all_gather(x, _flat_parts(output, self.size()), _waits(opts))], [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> dist.Work:
        works = [self.all_gather_single(output, x, opts) for output, x in zip(outputs, inputs, strict=True)]
        return _Work.all_of(works, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts=None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        op, pending = op_code(opts.reduceOp), []
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_one_each("reduce_scatter", "input", parts)
            _check_same_size("reduce_scatter", output, "the output", parts[self.rank()], "this rank's input")
            pending.append(self.engine.reduce_scatter(parts, output, op, not opts.asyncOp))
        return _Work(pending, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts=None) -> "_Work":
        opts = opts or dist.ReduceScatterOptions()
        if x.numel() != output.numel() * self.size():
            raise ValueError(
                f"reduce_scatter_tensor: the input has {x.numel()} elements; {self.size()} ranks with an output of "
                f"{output.numel()} need {output.numel() * self.size()}"
            )
        parts = _flat_parts(x.contiguous(), self.size())
        return _Work([self.engine.reduce_scatter(parts, output, op_code(opts.reduceOp), not opts.asyncOp)], [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> dist.Work:
        works = [self.reduce_scatter_single(output, x, opts) for output, x in zip(outputs, inputs, strict=True)]
        return _Work.all_of(works, outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts=None) -> dist.Work:
        opts = opts or dist.GatherOptions()
        (x,), parts = inputs, outputs[0] if outputs else []
        if self.rank() == opts.rootRank:
            self._check_one_each("gather", "output", parts)
            for part in parts:
                _check_same_size("gather", part, "an output", x, "the input")
        return _Work([self.engine.gather(x, parts, opts.rootRank, not opts.asyncOp)], outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts=None) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        (output,), parts = outputs, inputs[0] if inputs else []
        if self.rank() == opts.rootRank:
            self._check_one_each("scatter", "input", parts)
            for part in parts:
                _check_same_size("scatter", part, "an input", output, "the output")
        return _Work([self.engine.scatter(parts, output, opts.rootRank, not opts.asyncOp)], outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts=None) -> dist.Work:
        self._check_one_each("all_to_all", "input", inputs)
        self._check_one_each("all_to_all", "output", outputs)
        return _Work([self.engine.all_to_all(inputs, outputs, _waits(opts))], outputs)

    def all_to_all_single(self, output, x, output_sizes, input_sizes, opts=None) -> dist.Work:
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        inputs = self._rows("all_to_all_single", x.contiguous(), input_sizes)
        outputs = self._rows("all_to_all_single", whole, output_sizes)
        wait = _waits(opts) or whole is not output
        pending = self.engine.all_to_all(inputs, outputs, wait)
        if whole is not output:
            output.detach().copy_(whole)
        return _Work([pending], [output])

    def barrier(self, opts=None) -> dist.Work:
        return _Work([self.engine.barrier(_waits(opts))], [])

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work:
        (x,) = tensors
        return _Work([self.engine.send(x, destination, tag)], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        (x,) = tensors
        return _Work([self.engine.receive(x, source, tag)], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        (x,) = tensors
        return _Work([self.engine.receive(x, None, tag)], tensors)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; an error names every late rank, as in each barrier of this group, and as gloo does.

        Call it as a method: torch.distributed.monitored_barrier refuses every backend that is not called gloo.
        """
        limit = self.timeout if timeout is None else timeout
        limit = limit if isinstance(limit, timedelta) else timedelta(seconds=limit)
        self.engine.set_timeout(max(limit, timedelta(milliseconds=1)))
        try:
            self.engine.barrier()
        except _C.CollectiveTimeoutError as error:
            raise _C.CollectiveTimeoutError(
                f"{self._gloos_words(limit, str(error), wait_all_ranks)}: {error}"
            ) from None
        finally:
            self.engine.set_timeout(self.timeout)

    def _gloos_words(self, limit: timedelta, text: str, wait_all_ranks: bool) -> str:
        """Return what gloo's monitored_barrier says of a timeout, for programs that read it."""
        if self.rank() != 0:
            reached = f"Rank {self.rank()} successfully reached monitoredBarrier"
            return f"{reached}, but received errors while waiting for send/recv from rank 0"
        after_ms = round(1000 * limit.total_seconds())
        if after_ms <= 0:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {after_ms} ms"
        late = re.findall(r"\d+", text.partition(" did not arrive")[0])
        those = f"Ranks {', '.join(late)}" if wait_all_ranks and len(late) > 1 else f"Rank {late[0]}"
        return f"[Rank 0]: {those} failed to pass monitoredBarrier in {after_ms} ms"

    def _check_parts(self, operation: str, tensors: Tensors) -> None:
        """Raise for a gradient that must not be summed because each rank holds a different part of it."""
        for x in tensors:
            if hasattr(type(x), "refuse_to_join"):
                x.refuse_to_join(operation, dist.get_process_group_ranks(self))  # type: ignore[attr-defined]

    def _check_one_each(self, operation: str, kind: str, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{operation}: expected {self.size()} {kind} tensors, one per rank, got {len(tensors)}")

    def _rows(self, operation: str, x: torch.Tensor, sizes: list[int]) -> Tensors:
        """Return x cut along its first dimension, into equal parts if `sizes` is empty."""
        if not sizes:
            if x.size(0) % self.size():
                raise ValueError(
                    f"{operation}: {x.size(0)} rows do not divide by {self.size()} ranks; pass the sizes of the splits"
                )
            return list(x.split(x.size(0) // self.size())) if x.size(0) else [x] * self.size()
        if len(sizes) != self.size() or sum(sizes) != x.size(0):
            raise ValueError(f"{operation}: splits {sizes} must be {self.size()} sizes that add up to {x.size(0)} rows")
        return list(x.split(sizes))


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _first_tensor(arguments) -> torch.Tensor | None:
    for argument in arguments:
        if isinstance(argument, list):
            argument = _first_tensor(argument)
        if isinstance(argument, torch.Tensor):
            return argument
    return None


def _by_device(name: str, on_cpu: Callable) -> Callable:
    """Return a method that calls `on_cpu` for CPU tensors and the CUDA half's method `name` for CUDA tensors.

    A profiler sees calls of `on_cpu`.
    """
    event, inputs = EVENTS.get(name, (None, 0))

    @functools.wraps(on_cpu)
    def method(self, *arguments, **options):
        x = _first_tensor(arguments)
        if x is not None and _on_gpu(x):
            return getattr(self.cuda_half(), name)(*arguments, **options)
        if event is None or not profiling():
            return on_cpu(self, *arguments, **options)
        in_gloos_place = self.backend_name == "gloo"
        profiled = ProfileEvent(f"{self.backend_name}:{event}", arguments[inputs : inputs + 1], in_gloos_place)
        try:
            return on_cpu(self, *arguments, **options).profiled_as(profiled)
        except BaseException:
            profiled.end()
            raise

    return method


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced", "gather"),
    *("all_gather_single", "all_gather_single_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "alltoall", "all_to_all_single", "alltoall_base"),
    *("send", "recv", "recv_anysource", "barrier"),
):
    setattr(WeftProcessGroup, _name, _by_device(_name, getattr(WeftProcessGroup, _name)))


class _CpuBackend:
    """The backend of a group for CPU tensors, which is the group: what torch asks of it.

    It says that it is a ProcessGroupGloo, since torch sets timeouts only of that and of NCCL's.
    """

    __class__ = dist.ProcessGroupGloo

    def __init__(self, group: WeftProcessGroup):
        self._group = group

    def __getattr__(self, name: str):
        return getattr(self._group, name)


class _Work(dist.Work):
    """Handle that torch waits for; it holds the operations that are not done yet."""

    def __init__(self, pending: Sequence[Pending | Message | None], result):
        super().__init__()
        self._pending = [operation for operation in pending if operation is not None]
        self._result = result
        self._event: ProfileEvent | None = None

    def profiled_as(self, event: ProfileEvent) -> "_Work":
        """Return this handle, which ends the event when the operations are done."""
        self._event = event
        if not self._pending:
            event.end()
        return self

    @classmethod
    def all_of(cls, works: list["_Work"], result) -> "_Work":
        return cls([operation for work in works for operation in work._pending], result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = timeout.total_seconds() if timeout else None
        for operation in self._pending:
            if not operation.wait(limit_s):
                raise TimeoutError(f"the operation is not done after {limit_s:.3g} s; it goes on")
        if self._event is not None:
            self._event.end()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return all(operation.done() for operation in self._pending)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self):
        try:
            if self.is_completed():
                self.wait()
        except RuntimeError as error:
            return error
        return None

    def result(self):
        return self._result

    def _source_rank(self) -> int:
        return self._pending[0].source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future:
        future, complete = promise()
        left = len(self._pending)

        def one_is_done(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if left <= 0 and self._event is not None:
                self._event.end()
            if future.done():
                return
            if error is not None:
                complete(error)
            elif left <= 0:
                complete(self._result)

        if not self._pending:
            one_is_done(None)
        for operation in self._pending:
            operation.then(one_is_done)
        return future


class _Done(_Work):
    """Handle of every call that was done when it returned."""

    def get_future(self) -> torch.futures.Future:
        raise RuntimeError("a call with async_op=False has no future")


_DONE = _Done([], None)
_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = "all_gather_single", "reduce_scatter_single", "all_to_all_single"
for _name, _called in {
    **{name: name for name in ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall")},
    **{name: name for name in (_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, "barrier")},
    "_allgather_base": _ALL_GATHER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "alltoall_base": _ALL_TO_ALL,
}.items():
    setattr(WeftProcessGroup, _name, _C.process_group_method(_called, getattr(WeftProcessGroup, _name), _DONE))


def _lost_members(members: list[int]) -> list[int]:
    """Return the ranks of a new group that the default group has lost; `members` are the global ranks of the group."""
    default = dist.group.WORLD
    if not isinstance(default, WeftProcessGroup):
        return []
    return [members.index(rank) for rank in default.engine.lost_ranks() if rank in members]


def _as_list(tensors) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _waits(opts) -> bool:
    return opts is None or not opts.asyncOp


def _flat_parts(x: torch.Tensor, world: int) -> Tensors:
    """Return equal parts of x, one per rank: in memory order if x is contiguous, else equal numbers of rows."""
    if x.is_contiguous():
        flat = x.view(-1)
        return list(flat.split(flat.numel() // world)) if flat.numel() else [flat] * world
    if x.size(0) % world:
        raise ValueError(f"a strided output of shape {tuple(x.shape)} cannot be cut into {world} equal parts of rows")
    return list(x.split(x.size(0) // world))  # the engine copies into each at the end


def _check_same_size(operation: str, a: torch.Tensor, a_name: str, b: torch.Tensor, b_name: str) -> None:
    if a.numel() != b.numel() or a.dtype != b.dtype:
        raise ValueError(
            f"{operation}: {a_name} is {a.dtype} with {a.numel()} elements, {b_name} {b.dtype} with {b.numel()}; "
            "both must be the same"
        )
