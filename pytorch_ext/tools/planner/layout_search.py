"""The search over layouts: the best of each mesh, and the reasons against the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, isqrt
from typing import Any

from weft.tools.planner.hardware import Hardware, check_count, presets
from weft.tools.planner.job import RECOMPUTE, SCHEDULES, Job, Layout
from weft.tools.planner.model import Model
from weft.tools.planner.start import DIMENSIONS, code, dimensions, init_mesh
from weft.tools.planner.step import Clock, Step
from weft.tools.planner.step_memory import Memory, MemoryModel

# Each further mechanism (a dimension, a ZeRO stage, recomputation, chunks) must make a step faster by this share: the
# model is not more exact, and every mechanism is one more thing to get right.
WORTH = 0.005
_MECHANISMS = 2  # a difference in time below the share of this many mechanisms counts as none
LEANER = 0.95  # a plan below this share of the chosen plan's memory is reported as leaner
MIN_TOKENS = 32  # of a sequence on a context-parallel rank
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_CHUNKS = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Plan:
    """A layout of a job, its memory on the fullest rank and the time of a step."""

    job: Job
    layout: Layout
    memory: Memory
    step: Step

    @property
    def mesh(self) -> dict[str, int]:
        return {name: getattr(self.layout, name) for name in dimensions(self.job.model.experts > 0)}

    @property
    def init_mesh(self) -> str:
        """Call that makes this mesh."""
        return init_mesh(self.layout)

    @property
    def torchrun(self) -> str:
        """Command that starts the ranks; run it once on each node."""
        here = min(self.layout.ranks, self.job.hardware.devices_per_node)
        nodes = -(-self.layout.ranks // here)
        several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500 " if nodes > 1 else ""
        rest = self.layout.ranks % here
        last = f"  # on the last node: --nproc-per-node {rest}" if rest else ""
        return f"torchrun {several}--nproc-per-node {here} train.py{last}"

    @property
    def code(self) -> str:
        """Python code that takes a `model` and defines `step(inputs, targets)`, with all decisions of the plan."""
        return code(self.job, self.layout)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, in bytes and seconds."""
        layout = self.layout
        return {
            **self.mesh,
            "micro_batch": layout.micro_batch,
            "micro_batches": layout.micro_batches(self.job),
            "schedule": layout.schedule if layout.pp > 1 else None,
            "chunks": layout.chunks,
            "recompute": layout.recompute,
            "zero": layout.zero,
            "seconds_per_step": self.step.seconds,
            "tflops_per_gpu": self.step.flops_per_s / 1e12,
            "mfu": self.step.mfu,
            "bubble": self.step.bubble,
            "exposed_communication_s": self.step.exposed_s,
            "memory_bytes": {**self.memory.split(), "total": self.memory.total},
            "torchrun": self.torchrun,
            "init_mesh": self.init_mesh,
            "code": self.code,
        }


@dataclass(frozen=True)
class Rejection:
    """A family of layouts, and one line about why its best layout is not the plan."""

    family: str
    why: str


@dataclass
class Candidates:
    """The result of a search.

    Attributes:
        plans: plans that fit, the best first.
        rejected: the rejections.
        leanest: the layout that takes the least memory, with its memory.
    """

    plans: list[Plan]
    rejected: list[Rejection]
    leanest: tuple[Layout, Memory] | None


def searched(
    model: Any, hardware: Any, gpus: int, recompute: str | None, gpus_per_node: int | None, *batch: Any, **options: Any
) -> tuple[Job, Candidates]:
    """Return the Job of the arguments, as of `weft.plan`, and its candidates; raise ValueError if nothing fits."""
    device = Hardware.of(hardware)
    if gpus_per_node is not None:
        device = device.with_nodes_of(gpus_per_node)
    job = Job(Model.of(model), device, *batch, **options)
    found = search(job, gpus, recompute)
    if not found.plans:
        raise ValueError(too_big(job, gpus, recompute, found))
    return job, found


def search(job: Job, gpus: int, recompute: str | None = None) -> Candidates:
    """Compare all meshes of so many devices.

    Raises:
        ValueError: gpus is not a whole number of at least 1, recompute is unknown, or a sequence is longer than the
            model's table of positions.
    """
    check_count("gpus", gpus)
    if recompute is not None and recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} is not one of {', '.join(RECOMPUTE)}")
    if 0 < job.model.positions < job.sequence_length:
        raise ValueError(
            f"sequence_length={job.sequence_length}: {job.model.name} has learned positions for {job.model.positions} "
            f"tokens; choose a sequence of at most that"
        )
    memories, clock = MemoryModel(job), Clock(job)
    enough = job.hardware.memory_bytes
    levels = RECOMPUTE if recompute is None else (recompute,)
    best: dict[str, Plan] = {}
    lean: dict[str, tuple[Layout, Memory]] = {}
    plans = []
    for mesh in meshes(job, gpus):
        name = family(mesh)
        leanest = _leanest(mesh, levels[-1])
        memory = memories.memory(leanest)
        if name not in lean or memory.total < lean[name][1].total:
            lean[name] = leanest, memory
        if memory.total > enough:
            continue
        plan = min(_fitting(job, mesh, memories, clock, levels), key=_cost)
        plans.append(plan)
        if name not in best or _cost(plan) < _cost(best[name]):
            best[name] = plan
    plans.sort(key=_cost)
    rejected = _rejected(job, gpus, plans[0], best, lean, memories, clock) if plans else []
    return Candidates(plans, rejected, min(lean.values(), key=lambda pair: pair[1].total, default=None))


def meshes(job: Job, gpus: int) -> Iterator[Layout]:
    """Yield every pp x dp x cp x tp of so many devices that can compute the job, as a Layout with defaults.

    With experts, there is one for each ep. Left out are tensor parallelism over more ranks than heads or over more than
    two nodes, stages without a layer, data-parallel ranks without a whole and equal share of the batch,
    context-parallel ranks with too few tokens, and ranks without an expert.
    """
    experts = job.model.experts
    for tp in _divisors(gpus):
        if tp > min(job.model.heads, 2 * job.hardware.devices_per_node, experts or job.model.heads):
            break
        for pp in _divisors(gpus // tp):
            if pp > job.model.layers:
                break
            for cp in _divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if cp > max(1, job.sequence_length // MIN_TOKENS):
                    break
                if job.global_batch % dp == 0:
                    together = (ep for ep in _divisors(dp) if ep == 1 or ep * tp <= experts)
                    yield from (Layout(pp, dp, cp, tp, ep=ep) for ep in together)


def family(layout: Layout) -> str:
    """Return the names of the dimensions that a layout uses."""
    return " x ".join(name for name in dimensions(True) if getattr(layout, name) > 1) or "one device"


def _leanest(mesh: Layout, recompute: str) -> Layout:
    """Return the mesh's layout of least memory."""
    return replace(mesh, recompute=recompute, zero=_stages(mesh)[-1])


def _fitting(job: Job, mesh: Layout, memories: MemoryModel, clock: Clock, levels: tuple[str, ...]) -> Iterator[Plan]:
    """Yield the mesh's layouts that fit and may be the fastest.

    Left out are more recomputation if less of it fits, ZeRO stages 2 and 3 if stage 1 fits, since they communicate
    more, and layouts that are too slow even before their memory is known.
    """
    share = job.global_batch // mesh.dp
    fastest = inf
    for micro_batch in _MICRO_BATCHES:
        if share % micro_batch:
            break
        for schedule, chunks in _schedules(job, mesh, share // micro_batch):
            for recompute in levels:
                layout = replace(mesh, micro_batch=micro_batch, schedule=schedule, chunks=chunks, recompute=recompute)
                ways = [replace(layout, zero=zero) for zero in _stages(mesh)]
                if clock.step(ways[:2][-1]).seconds > fastest * (1 + WORTH * _MECHANISMS):
                    break  # stage 1 is the fastest of the ZeRO stages
                fits = False
                for way in ways:
                    memory = memories.memory(way)
                    if memory.total <= job.hardware.memory_bytes:
                        plan = Plan(job, way, memory, clock.step(way))
                        fastest = min(fastest, plan.step.seconds)
                        fits = fits or way.zero < 2
                        yield plan
                        if way.zero > 0:
                            break
                if fits:
                    break


def _stages(mesh: Layout) -> range:
    """Return the ZeRO stages that a mesh can have.

    Under a pipeline the optimizer's states are the most that is sharded: gradients and weights would be communicated
    for each micro-batch. With ep, weft.DataParallel alone knows which ranks have the same parameters.
    """
    if mesh.ep > 1:
        return range(1 if mesh.pp > 1 else 2)
    return range(1 if mesh.data_ranks == 1 else 2 if mesh.pp > 1 else 4)


def _schedules(job: Job, mesh: Layout, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield the (schedule, chunks) that can be the best.

    GPipe takes the time of 1F1B and more memory, so it is never the best.
    """
    yield "1f1b", 1
    if mesh.pp == 1:
        return
    yield "zero-bubble", 1
    if micro_batches % mesh.pp == 0:
        yield from (("interleaved", chunks) for chunks in _CHUNKS if job.model.layers % (mesh.pp * chunks) == 0)


def _cost(plan: Plan) -> float:
    layout = plan.layout
    mechanisms = sum(getattr(layout, name) > 1 for name in dimensions(True)) + layout.zero + (layout.schedule != "1f1b")
    mechanisms += RECOMPUTE.index(layout.recompute)
    return plan.step.seconds * (1 + WORTH * mechanisms)


def _rejected(
    job: Job,
    gpus: int,
    chosen: Plan,
    best: dict[str, Plan],
    lean: dict[str, tuple[Layout, Memory]],
    memories: MemoryModel,
    clock: Clock,
) -> list[Rejection]:
    """Return a line for each other combination of dimensions, and for each other way to run the chosen mesh."""
    rejected = []
    named = dimensions(job.model.experts > 0)
    for count in range(1, len(named) + 1):
        for names in combinations(named, count):
            name = " x ".join(names)
            if name == family(chosen.layout) or gpus == 1 or ("ep" in names and "dp" not in names):
                continue
            if name in best:
                rejected.append(Rejection(name, _slower(best[name], chosen)))
            elif name in lean:
                rejected.append(Rejection(name, _too_big(*lean[name], job)))
            else:
                rejected.append(Rejection(name, _impossible(job, gpus, names)))
    for text, layout in _other_ways(chosen):
        memory = memories.memory(layout)
        if memory.total > job.hardware.memory_bytes:
            rejected.append(Rejection(text, _too_big(layout, memory, job)))
        else:
            rejected.append(Rejection(text, _slower(Plan(job, layout, memory, clock.step(layout)), chosen)))
    return rejected


def _other_ways(chosen: Plan) -> Iterator[tuple[str, Layout]]:
    layout = chosen.layout
    if layout.pp > 1:
        for schedule in SCHEDULES:
            if schedule not in (layout.schedule, "interleaved"):  # interleaved: its chunks are tried already
                yield f"schedule {schedule}", replace(layout, schedule=schedule, chunks=1)
    yield from (
        (f"recompute {recompute}", replace(layout, recompute=recompute))
        for recompute in RECOMPUTE
        if recompute != layout.recompute
    )
    if layout.data_ranks > 1:
        other = (zero for zero in _stages(layout) if zero != layout.zero)
        yield from ((f"ZeRO stage {zero}", replace(layout, zero=zero)) for zero in other)


def _slower(plan: Plan, chosen: Plan) -> str:
    """Return how much slower a plan is, and where it spends more of its time than the chosen plan."""
    theirs, ours = plan.step, chosen.step
    where = f"[{describe(plan.layout)}]"
    if theirs.seconds <= ours.seconds * (1 + WORTH * _MECHANISMS):
        memory = plan.memory.total / chosen.memory.total
        comparison = f"{theirs.seconds / ours.seconds:.3f}x the time, {memory:.2f}x the memory"
        if memory < LEANER:
            return f"leaner ({comparison}): take it where memory is short {where}"
        return f"no faster ({comparison}) {where}"
    spent = {
        "waits for communication": (theirs.exposed_s / theirs.seconds, ours.exposed_s / ours.seconds),
        "fills and drains the pipeline": (theirs.bubble, ours.bubble),
        "waits for the slowest stage": (theirs.uneven, ours.uneven),
    }
    name, (share, against) = max(spent.items(), key=lambda item: item[1][0] - item[1][1])
    if RECOMPUTE.index(plan.layout.recompute) > RECOMPUTE.index(chosen.layout.recompute):
        why = f"it recomputes more ({plan.layout.recompute}; chosen: {chosen.layout.recompute})"
    elif share - against > 0.02:
        why = f"{share:.0%} of it {name} (chosen: {against:.0%})"
    elif plan.layout == replace(chosen.layout, zero=plan.layout.zero):
        more = plan.layout.zero > chosen.layout.zero
        why = "it communicates more" if more else "every rank updates all that it holds"
    else:
        why = "its products are smaller and run further from the peak"
    return f"{theirs.seconds / ours.seconds:.2f}x the time: {why} {where}"


def _too_big(layout: Layout, memory: Memory, job: Job) -> str:
    name, most = max(memory.split().items(), key=lambda item: item[1])
    return (
        f"does not fit: {_gib(memory.total)} of {_gib(job.hardware.memory_bytes)}, {_gib(most)} of it {name} "
        f"[{describe(layout)}]"
    )


def _impossible(job: Job, gpus: int, names: tuple[str, ...]) -> str:
    if names == ("dp",):
        return f"a batch of {job.global_batch} sequences does not divide over {gpus} ranks"
    sizes = len(names) - ("ep" in names)  # ep is folded out of dp
    if _factors(gpus) < sizes:
        return f"{gpus} is no product of {sizes} sizes above 1"
    return _limits(job, gpus, names)


def _limits(job: Job, gpus: int, names: tuple[str, ...]) -> str:
    limits = {
        "pp": f"pp <= {job.model.layers} layers",
        "dp": f"dp divides a batch of {job.global_batch}",
        "cp": f"cp <= {max(1, job.sequence_length // MIN_TOKENS)} ({MIN_TOKENS} tokens a rank)",
        "tp": f"tp <= {min(job.model.heads, 2 * job.hardware.devices_per_node)} (heads; two nodes)",
        "ep": f"ep divides dp, and ep x tp <= {job.model.experts} experts",
    }
    return f"no such mesh of {gpus}: {', '.join(limits[name] for name in names)}"


def too_big(job: Job, gpus: int, recompute: str | None, found: Candidates) -> str:
    """Return a text that says by how much nothing fits, and which changes would make it fit."""
    if found.leanest is None:
        return (
            f"{job.model.name} on {gpus} devices: no mesh is possible: "
            f"{_limits(job, gpus, DIMENSIONS)}. Choose a global batch that shares a factor with {gpus}."
        )
    layout, memory = found.leanest
    over = memory.total - job.hardware.memory_bytes
    text = (
        f"{job.model.name} does not fit on {gpus} x {job.hardware.name}: the leanest layout [{describe(layout)}] takes "
        f"{_gib(memory.total)} on a rank, {_gib(over)} more than the {_gib(job.hardware.memory_bytes)} there are"
    )
    remedies = []
    level = RECOMPUTE[-1] if recompute is None else recompute
    for factor in (2, 3, 4, 6, 8, 16, 32, 64):
        if _fits(job, gpus * factor, level):
            remedies.append(f"{gpus * factor} devices")
            break
    for device in sorted(presets().values(), key=lambda device: device.memory_bytes):
        usable = job.precision in device.peak_flops and device.memory_bytes > job.hardware.memory_bytes
        if usable and _fits(replace(job, hardware=device), gpus, level):
            remedies.append(f"{device.name} ({_gib(device.memory_bytes)})")
            break
    if recompute not in (None, "full") and _fits(job, gpus, "full"):
        remedies.append("recompute full")
    if job.optimizer != "sgd" and _fits(replace(job, optimizer="sgd"), gpus, level):
        remedies.append("an optimizer without states (sgd)")
    shorter = job.sequence_length // 2
    while shorter >= MIN_TOKENS and not _fits(replace(job, sequence_length=shorter), gpus, level):
        shorter //= 2
    if shorter >= MIN_TOKENS:
        remedies.append(f"a sequence of {shorter}")
    return f"{text}. It would fit with {' or '.join(remedies) if remedies else 'a smaller model only'}."


def _fits(job: Job, gpus: int, recompute: str) -> bool:
    memory = MemoryModel(job).memory
    return any(memory(_leanest(mesh, recompute)).total <= job.hardware.memory_bytes for mesh in meshes(job, gpus))


def describe(layout: Layout) -> str:
    """Return a layout in a few words."""
    parts = [f"{name}={getattr(layout, name)}" for name in dimensions(True) if getattr(layout, name) > 1]
    parts.append(f"micro-batch {layout.micro_batch}")
    if layout.pp > 1:
        parts.append(layout.schedule + (f" of {layout.chunks}" if layout.chunks > 1 else ""))
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.zero:
        parts.append(f"ZeRO {layout.zero}")
    return ", ".join(parts)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _factors(n: int) -> int:
    """Return the number of prime factors of n."""
    divisor = next((d for d in range(2, isqrt(n) + 1) if n % d == 0), n)
    return 1 + _factors(n // divisor) if n > 1 else 0


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
