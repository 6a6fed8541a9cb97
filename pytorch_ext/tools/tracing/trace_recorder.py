"""Record when a program's modules, collectives and optimizers run: `weft.trace`, on every rank.

The program is anybody's. Calls are seen as `weft.compare` sees them; collectives are recorded by the engine of weft's
groups. A program that asks for gloo's groups gets those with WEFT_AS_GLOO=1 (`weft trace --run` sets it).
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data.dataloader
from torch import nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profiler
from torch.utils.weak import WeakTensorKeyDictionary

import weft.clip_grad
from weft.comm.backend import WeftProcessGroup
from weft.comm.engine import Pending
from weft.comm.inter_host import Later, Message
from weft.comm.multi_host import SpanningEngine
from weft.comm.wait_record import name_of
from weft.context_parallel.shared_sequence import parts_here
from weft.data_parallel.reducer import Reducer
from weft.tools.called_modules import CalledModules, Changes, holder_of, names_of, outermost
from weft.tools.numbers import numbers_of
from weft.tools.tracing.rank_trace import BACKWARD_PASS
from weft.tools.tracing.trace_file import write_part

_KEPT = 1 << 20  # calls of each group
_MEMORY_EVERY_NS = 1_000_000
_SHORTEST_WAIT_NS = 2_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_now = time.monotonic_ns
_STAGE_KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

_traced = False  # this process


class TraceRecorder:
    """Recording of this process.

    Args:
        path: the file of all ranks.
        steps: numbers of the steps to keep, from 0; None: all.
    """

    def __init__(self, path: Path, steps: Sequence[int] | None):
        self.path, self.steps, self.step = path.absolute(), None if steps is None else set(steps), 0
        self.on = self.steps is None or 0 in self.steps
        self._roots: list[nn.Module] = []
        self._called = CalledModules(self._roots)
        self._holder: nn.Module | None = None
        self._searched = 0  # models in it that were known when it was searched for
        # Of modules: the module's number, the calling one's, again, begin, end, marks of its outputs and of its inputs.
        self._calls: list[tuple] = []
        self._marks: list[int] = []  # times
        self._numbers: dict[int, int] = {}  # of modules, by id
        self._modules: list[nn.Module] = []
        self._running = threading.local()
        self._spans: list[tuple[str, str, int, int]] = []  # kind, name, begin, end
        self._begins: list[int] = []  # when recording began again
        self._backward_ends: list[int] = []  # when the gradients of a backward were there, before its callbacks
        self._memory: list[tuple[int, int]] = []
        self._sampled = 0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._marks_of_leaves = WeakTensorKeyDictionary()
        self._on_cuda = False
        self._task = -1
        self._stepped = False
        self._step_began = 0
        self._groups: dict[Any, dict[str, Any]] = {}  # engine to what is known of its group
        self._profiled: list[tuple] = []
        self._changes = Changes()
        self._saved = False
        self._began = time.time_ns()
        self._process = os.getpid()
        self._in_group = False
        self._rank = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    # Hooks

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: another trace runs in this process.
        """
        global _traced
        if _traced:
            raise RuntimeError("weft.trace: another trace runs in this process, of weft.trace or WEFT_TRACE")
        _traced = True
        self._on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._changes.put(nn.Module, "__call__", self._calling(nn.Module.__call__))
        self._spanned(torch.autograd, "backward", BACKWARD_PASS, "")
        for home in (nn.utils, nn.utils.clip_grad, weft, weft.clip_grad):
            self._spanned(home, "clip_grad_norm_", "optimizer", "clip_grad_norm_")
        self._spanned(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data", "next batch")
        self._spanned(torch.utils.data.DataLoader, "__iter__", "data", "workers")
        for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
            self._spanned(schedule, "step", "schedule", schedule.__name__)
        for name, kind in _STAGE_KINDS.items():
            self._changes.put(_PipelineStageBase, name, self._acting(kind, getattr(_PipelineStageBase, name)))
        for waiting in (Pending, Later, Message):
            self._changes.put(waiting, "wait", self._waiting(waiting.wait))
        self._changes.put(SpanningEngine, "_execute", self._executing(SpanningEngine._execute))
        self._changes.put(Reducer, "_launch_full", self._launching(Reducer._launch_full))
        self._changes.put(WeftProcessGroup, "create", self._creating(WeftProcessGroup.create))
        self._changes.put(profiler._KinetoProfile, "stop_trace", self._profiling(profiler._KinetoProfile.stop_trace))
        self._changes.at_end(register_optimizer_step_pre_hook(self._before_step).remove)
        self._changes.at_end(register_optimizer_step_post_hook(self._after_step).remove)
        for group in list(distributed_c10d._world.pg_map):
            self._record_group(group, dist.get_process_group_ranks(group))

    def stop(self) -> None:
        self.leave()
        for facts in self._groups.values():
            _take_calls(facts)

    def leave(self) -> None:
        """Let go of torch, as a process does that is no rank."""
        global _traced
        _traced = False
        self._saved = True
        self._changes.undo()
        os.close(self._statm)

    def _spanned(self, home: Any, name: str, kind: str, label: str) -> None:
        before = getattr(home, name)

        def spanned(*args, **kwargs):
            if not self.on:
                return before(*args, **kwargs)
            begin = _now()
            try:
                return before(*args, **kwargs)
            finally:
                self._spans.append((kind, label, begin, _now()))

        self._changes.put(home, name, spanned)

    # Modules

    def _calling(self, call: Callable) -> Callable:
        called, calls, running, is_compiling = self._called, self._calls, self._running, torch.compiler.is_compiling

        def calling(module, *args, **kwargs):
            stack = called.stack
            if is_compiling() or not (stack or called.counts(module)):
                return call(module, *args, **kwargs)
            if len(stack) < 2:
                self._enter(module, stack)
            caller = running.number if stack else -1
            number = running.number = len(calls)
            if self.on:
                calls.append(())  # those inside have larger numbers
            stack.append(module)
            begin = _now()
            try:
                output = call(module, *args, **kwargs)
            finally:
                now = _now()
                stack.pop()
                running.number = caller
                if number < len(calls):
                    again = torch._C._current_graph_task_id() != -1
                    calls[number] = facts = (self._number_of(module), caller, again, begin, now)
            if number < len(calls):
                if torch.is_grad_enabled():
                    calls[number] = facts + self._follow_backward(output, args, kwargs)
                if now - self._sampled > _MEMORY_EVERY_NS:
                    self._sample(now)
            return output

        return calling

    def _enter(self, module: nn.Module, stack: list[nn.Module]) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed
            return
        if self._stepped and not stack:
            self.step, self._stepped = self.step + 1, False
            self._turn(self.steps is None or self.step in self.steps)
            if self.steps and self.step > max(self.steps):
                self.save()  # now, since a long program may be killed
        if dist.is_initialized() and not stack:
            self._rank, self._in_group = (dist.get_rank(), dist.get_world_size()), True
        if self.on and self._called.is_root(module) and self._called.enter_root(module):
            self._on_cuda = any(x.is_cuda for x in module.parameters())

    def _turn(self, on: bool) -> None:
        for facts in self._groups.values() if on != self.on else ():
            (_keep_calls if on else _take_calls)(facts)
        if on and not self.on:
            self._begins.append(_now())
        self.on = on

    def _number_of(self, module: nn.Module) -> int:
        number = self._numbers.get(id(module))
        if number is None:
            number = self._numbers[id(module)] = len(self._modules)
            self._modules.append(module)
        return number

    def _follow_backward(self, output: Any, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of marks that get the times at which gradients of outputs and of inputs come."""
        with torch._C.DisableTorchFunction():
            made = self._marks_of((output,))
            return made, (self._marks_of(args) or self._marks_of(kwargs.values())) if made else ()

    def _marks_of(self, tree: Iterable[Any]) -> tuple[int, ...]:
        # Tuples of numbers, since Python's garbage collector does not look into these again and again.
        found: tuple[int, ...] = ()
        for x in tree:
            if type(x) is torch.Tensor:
                if x.requires_grad:
                    found += (self._mark_of(x),)
            elif isinstance(x, torch.Tensor):
                if type(x) is not nn.Parameter:
                    found += tuple(self._mark_of(part) for _, part in parts_here(x) if part.requires_grad)
            elif isinstance(x, tuple | list):
                found += self._marks_of(x)
            elif isinstance(x, dict):
                found += self._marks_of(x.values())
        return found

    def _mark_of(self, x: torch.Tensor) -> int:
        # Not an attribute of x, which would be saved with it and be there in the next trace.
        node: Any = x.grad_fn
        known: Any
        known, key = (self._marks_of_leaves, x) if node is None else (node.metadata, self)
        mark = known.get(key)
        if mark is None:
            mark = known[key] = len(self._marks)
            self._marks.append(0)
            if node is None:
                self._changes.at_end(x.register_hook(partial(self._came, mark)).remove)
            else:
                node.register_prehook(partial(self._came, mark))
        return mark

    def _came(self, mark: int, _: Any) -> None:
        self._marks[mark] = _now()
        if torch._C._current_graph_task_id() != self._task:
            self._follow_end()

    def _follow_end(self) -> None:
        """Note the time when the backward under way has its gradients: what is left then waits for other ranks."""
        self._task = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(lambda: self._backward_ends.append(_now()))  # type: ignore[attr-defined]

    def _sample(self, now: int) -> None:
        self._sampled = now
        if self._on_cuda:
            self._memory.append((now, torch.cuda.memory_allocated()))
        else:
            self._memory.append((now, int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE))

    # Steps, stages, buckets

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step_began = _now()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.on:
            self._spans.append(("step", type(optimizer).__name__, self._step_began, _now()))
        if self.on and not self._stepped and len(models := outermost(self._roots)) != self._searched:
            self._searched = len(models)
            self._holder = holder_of(models) if len(models) > 1 else None  # takes 0.1 s
        self._stepped = True

    def _acting(self, kind: str, act: Callable) -> Callable:
        def acting(stage, microbatch, *args, **kwargs):
            begin = _now()
            result = act(stage, microbatch, *args, **kwargs)
            if self.on:
                done = kind if kwargs.get("full_backward", True) else "I"  # of the inputs, as in Timeline
                self._spans.append(("stage", f"{stage.stage_index}{done}{microbatch}", begin, _now()))
            return result

        return acting

    def _launching(self, launch: Callable) -> Callable:
        def launching(reducer):
            first = len(reducer._waits)
            launch(reducer)
            now = _now()
            for bucket in reducer.buckets[first : len(reducer._waits)] if self.on else ():
                size = bucket.flat.numel() * bucket.flat.element_size()
                self._spans.append(("bucket", f"{size / 1e6:.3g} MB from {bucket.slots[0].name}", now, now))

        return launching

    # Collectives

    def _waiting(self, wait: Callable) -> Callable:
        def waiting(pending, *args, **kwargs):
            begin = _now()
            done = wait(pending, *args, **kwargs)
            end = _now()
            if self.on and end - begin > _SHORTEST_WAIT_NS:
                self._spans.append(("wait", "", begin, end))
            return done

        return waiting

    def _creating(self, create: Callable) -> Callable:
        def creating(options):
            group = create(options)
            self._record_group(group, list(options.global_ranks_in_group) or list(range(options.group_size)))
            return group

        return staticmethod(creating)

    def _record_group(self, group: Any, ranks: list[int]) -> None:
        engine = getattr(group, "engine", None)
        if engine is None or engine in self._groups:
            return
        again = sum(facts["group"].group_name == group.group_name for facts in self._groups.values())
        key = f"{group.group_name}.{again}"  # a group that is made again gets the name of the one before
        facts = self._groups[engine] = {"group": group, "key": key, "ranks": ranks, "calls": [], "messages": []}
        self._in_group = True
        if self.on:
            _keep_calls(facts)

    def _executing(self, execute: Callable) -> Callable:
        def executing(engine, text, body):
            begin = _now()
            execute(engine, text, body)
            beside = begin if threading.current_thread() is not threading.main_thread() else 0
            if self.on and engine in self._groups:
                calls = self._groups[engine]["calls"]
                calls.append((engine._calls, text, "", 0, beside, begin, 0, _now()))

        return executing

    def _profiling(self, stop: Callable) -> Callable:
        def stopping(profile):
            stop(profile)
            results = profile.profiler.kineto_results if profile.profiler is not None else None
            for event in results.events() if results is not None else ():
                times = event.start_ns(), event.start_ns() + event.duration_ns()
                track = f"device {event.device_index()} stream {event.device_resource_id()}"
                on_cpu = event.device_type() == torch.autograd.DeviceType.CPU
                self._profiled.append((event.name(), *times, f"thread {event.start_thread_id()}" if on_cpu else track))

        return stopping

    # The result

    def _facts_of(self, call: tuple) -> tuple:
        """Return a call with the times at which its backward began and ended; 0 without one."""
        times = [[self._marks[mark] for mark in marks] for marks in call[5:]] or [[], []]
        return *call[:5], min(filter(None, times[0]), default=0), max(times[1], default=0)

    def save(self) -> None:
        """Write this rank's part; the last rank to do so writes the file of all."""
        if self._saved or self._process != os.getpid():
            return
        self.stop()
        if not self._is_rank():
            return
        names = names_of(self._roots, self._holder)
        rank, world = self._rank
        part = {
            "rank": rank,
            "world": world,
            "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "host": socket.gethostname(),
            "began": self._began,
            "ended": time.time_ns(),
            "wall": time.time_ns() - _now(),
            "modules": [[names.get(id(module), ""), type(module).__name__] for module in self._modules],
            "calls": [self._facts_of(call) for call in self._calls],
            "spans": self._spans,
            "begins": self._begins,
            "backward_ends": self._backward_ends,
            "groups": [_group_facts(facts) for facts in self._groups.values()],
            "memory": self._memory,
            "memory_of": "CUDA tensors" if self._on_cuda else "process",
            "profiled": self._profiled,
        }
        with _without_interrupts():
            write_part(self.path, part)

    def _is_rank(self) -> bool:
        if self._in_group:
            return True
        if not self._calls or multiprocessing.parent_process() is not None:  # a data worker, or it only starts ranks
            return False
        return not self.path.exists() or self.path.stat().st_mtime_ns < self._began  # else of ranks that it started


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back: a launcher sends them to ranks that end already."""
    came: list[int] = []
    here = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for again in came:
            signal.raise_signal(again)


def _keep_calls(facts: dict[str, Any]) -> None:
    here = facts["group"].group_here
    if here is not None:
        facts["kept"] = here.record_calls(_KEPT)


def _take_calls(facts: dict[str, Any]) -> None:
    if "kept" in facts:
        here = facts["group"].group_here
        facts["calls"] += here.last_calls()
        facts["messages"] += here.last_messages()
        here.record_calls(facts.pop("kept"))


def _group_facts(facts: dict[str, Any]) -> dict[str, Any]:
    group = facts.pop("group")
    return {"name": name_of(group), **facts}


@contextmanager
def trace(path: str | Path, *, steps: Sequence[int] | None = None) -> Iterator[None]:
    """Write what each rank does inside, and when, to one file for ui.perfetto.dev. On every rank.

    The file has modules, forward and backward, each group's collectives with the time that was waiting for other ranks
    and the time that was moving data, stages and micro-batches, buckets, and memory. Collectives are those of weft's
    groups of CPU tensors; of others the program's own torch.profiler shows more, if it runs inside. `weft trace FILE`
    reports where the time goes.

    Args:
        path: the file. The last rank to leave the context writes it; ranks on machines without a common file system
            leave parts.
        steps: numbers of the steps to keep, from 0; None: all. A step ends with the optimizers' steps.

    Raises:
        RuntimeError: another trace runs in this process.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> with weft.trace(f"{path}/run.json"):
        ...     model(torch.ones(3, 4)).sum().backward()
    """
    recorder = TraceRecorder(Path(path), steps)
    recorder.start()
    try:
        yield
    finally:
        recorder.save()


def trace_by_environment() -> None:
    """Trace this process, if WEFT_TRACE names a file. WEFT_TRACE_STEPS names the steps, "0-9" by default.

    Raises:
        ValueError: WEFT_TRACE_STEPS is anything else.
    """
    path = os.environ.get("WEFT_TRACE")
    if not path:
        return
    recorder = TraceRecorder(Path(path), numbers_of(os.environ.get("WEFT_TRACE_STEPS", "0-9")))
    recorder.start()
    atexit.register(recorder.save)
    multiprocessing.util.Finalize(None, recorder.save, exitpriority=1)  # of a process that ends without atexit
    multiprocessing.util.register_after_fork(recorder, _in_child)


def _in_child(recorder: TraceRecorder) -> None:
    """Trace a forked process by itself, unless a rank forked it, as it does data workers."""
    if not recorder._saved:
        recorder.leave()
        if not dist.is_initialized():
            trace_by_environment()
