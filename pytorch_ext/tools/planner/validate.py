"""Comparison of the planner with published training runs: one prediction a row, and no constant fitted to a row."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from weft.tools.planner.hardware import Hardware
from weft.tools.planner.job import OVERLAP, RECOMPUTE, Job, Layout
from weft.tools.planner.model import Model
from weft.tools.planner.step import Clock
from weft.tools.planner.step_memory import MemoryModel

_REQUIRED = (
    *("source", "hardware", "gpus", "layers", "hidden", "heads", "intermediate", "seq", "vocab"),
    *("tp", "pp", "dp", "global_batch", "recompute", "tflops_per_gpu"),
)
_OLD = ("v100", "a100")  # most published runs on these are from before fused attention
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


@dataclass(frozen=True)
class Comparison:
    """A published figure and the planner's, in the same unit ("TFLOP/s" per GPU or "s" an iteration).

    Attributes:
        layout: as published; values that were not published are those of the fastest layout that fits.
        flops: the operations that the row's figure counts.
    """

    source: str
    parameters: int
    gpus: int
    layout: Layout
    unit: str
    published: float
    predicted: float
    flops: str

    @property
    def error(self) -> float:
        """Signed error, relative to the published figure."""
        return self.predicted / self.published - 1


def validate(path: str | Path, device: Callable[[str], Hardware] = Hardware.of) -> list[Comparison]:
    """Predict every row of a CSV file with the columns of weft/tools/planner/data/published_training_runs.csv.

    Args:
        device: hardware's name -> hardware.

    Raises:
        ValueError: the file or a column is missing, or a value of a row is impossible.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        lacking = [name for name in _REQUIRED if name not in (reader.fieldnames or ())]
        if lacking:
            raise ValueError(f"{path}: lacks the columns {', '.join(lacking)}")
        try:
            rows = [row for row in reader if any(row.values())]
        except csv.Error as error:
            raise ValueError(f"{path}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: has no rows")
    compared = []
    for number, row in enumerate(rows, start=2):
        try:
            compared.append(_compare(row, device))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return compared


def mean_error(compared: list[Comparison]) -> float:
    """Return the mean of the errors' absolute values."""
    return sum(abs(comparison.error) for comparison in compared) / len(compared)


def _compare(row: dict[str, str], device: Callable[[str], Hardware]) -> Comparison:
    job, recompute = _job(row, device), _recompute(row)
    layouts = _layouts(row, job, recompute)
    if _sharded(job, layouts[0]):
        layouts = [replace(layout, zero=3) for layout in layouts]
        if not row.get("overlap"):
            job = replace(job, overlap="some")  # sharded weights are gathered ahead
    fitting = [layout for layout in layouts if MemoryModel(job).memory(layout).total <= job.hardware.memory_bytes]
    clock = Clock(job)
    # A published run did fit, even if the planner computes too much memory.
    layout = min(fitting or layouts, key=lambda layout: clock.step(layout).seconds)
    step = clock.step(layout)
    recomputed = recompute == "full"
    flops = f"{'8' if recomputed else '6'}N + {'causal' if job.fused_attention else 'full'} attention"
    if row["tflops_per_gpu"]:
        counted = job.model.flops_per_token(job.sequence_length, causal=job.fused_attention, recomputed=recomputed)
        predicted = counted * job.sequence_length * job.global_batch / step.seconds / layout.ranks / 1e12
        published, unit = _number(row, "tflops_per_gpu", float), "TFLOP/s"
    else:
        predicted, published, unit = step.seconds, _number(row, "seconds_per_iteration", float), "s"
    source = row["source"]
    return Comparison(source, job.model.parameters, layout.ranks, layout, unit, published, predicted, flops)


def _sharded(job: Job, layout: Layout) -> bool:
    """Return whether the weights must have been sharded over the data-parallel ranks too (ZeRO stage 3, FSDP).

    That is so if there is no pipeline, and weights, gradients and optimizer states exceed a device's memory at stage 1.
    """
    memory = MemoryModel(job).memory(replace(layout, zero=1))
    too_much = memory.weights + memory.gradients + memory.optimizer > job.hardware.memory_bytes
    return layout.pp == 1 and layout.data_ranks > 1 and too_much


def _number(row: dict[str, str], name: str, kind=int, default=None):
    text = (row.get(name) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number") from None
    if not 0 < value < inf:
        raise ValueError(f"{name}={text} must be more than 0")
    return value


def _recompute(row: dict[str, str]) -> str:
    level = (row["recompute"] or "none").strip().lower()
    if level not in RECOMPUTE:
        raise ValueError(f"recompute={level!r} is not one of {', '.join(RECOMPUTE)}")
    return level


def _job(row: dict[str, str], device: Callable[[str], Hardware]) -> Job:
    """Return the row's model with the software of its time.

    A row says which part was recomputed, which dates it. Full recomputation on a V100 or an A100 is from before
    sequence parallelism and before communication at the same time as arithmetic. Selective recomputation (Korthikanti
    et al. 2022) came with both, but still kept the scores in memory, so there was something to recompute. Everything
    else has fused attention.

    A column "overlap" (none, some, all) overrides this for the communication. A column "network_gb_s" gives the
    datasheet's rate between nodes, per device and direction.
    """
    hardware = device(row["hardware"] or "")
    if row.get("network_gb_s"):
        hardware = hardware.with_network_of(_number(row, "network_gb_s", float))
    recompute = _recompute(row)
    old = hardware.name.startswith(_OLD)
    fused = not old or recompute == "none"
    overlap = row.get("overlap") or ("none" if old and recompute == "full" else "some")
    if overlap not in OVERLAP:
        raise ValueError(f"overlap={overlap!r} is not one of {', '.join(OVERLAP)}")
    gated = (row.get("gated_mlp") or "false").strip().lower() == "true"
    sequence, heads = _number(row, "seq"), _number(row, "heads")
    model = Model(
        layers=_number(row, "layers"),
        hidden=_number(row, "hidden"),
        intermediate=_number(row, "intermediate"),
        heads=heads,
        vocab=_number(row, "vocab"),
        kv_heads=_number(row, "kv_heads", default=heads),
        gated_mlp=gated,
        # Models with a gate have rotated positions, no biases, no dropout and a separate output layer.
        tied_embeddings=not gated,
        bias=not gated,
        dropout=not gated,
        positions=0 if gated else sequence,
    )
    return Job(
        model,
        hardware,
        sequence,
        _number(row, "global_batch"),
        precision="bf16" if "bf16" in hardware.peak_flops else "fp16",
        fused_attention=fused,
        sequence_parallel=not (old and recompute == "full"),
        overlap=overlap,
        by_weft=False,  # the runs are of Megatron-LM and its descendants
    )


def _layouts(row: dict[str, str], job: Job, recompute: str) -> list[Layout]:
    """Return the published layout; a blank micro-batch or interleaving stands for each possible value."""
    pp, dp, tp = (_number(row, name) for name in ("pp", "dp", "tp"))
    cp = _number(row, "cp", default=1)
    if pp * dp * cp * tp != _number(row, "gpus"):
        raise ValueError(f"pp={pp} x dp={dp} x cp={cp} x tp={tp} is not gpus={row['gpus']}")
    per_rank = max(1, job.global_batch // dp)
    small = [size for size in (1, 2, 4, 8, 16) if per_rank % size == 0]
    micro = [_number(row, "micro_batch")] if row.get("micro_batch") else small
    depth = -(-job.model.layers // pp)
    chunks = [c for c in _CHUNKS if depth % c == 0 and (c == 1 or pp > 1)]
    if row.get("interleave"):
        chunks = [_number(row, "interleave")]
    zero = 1 if job.overlap != "none" and dp * cp > 1 else 0
    return [
        Layout(
            pp, dp, cp, tp, size, "interleaved" if count > 1 else "1f1b", count, recompute, zero if dp * cp > 1 else 0
        )
        for size in micro
        for count in chunks
    ]
