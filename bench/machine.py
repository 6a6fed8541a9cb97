"""`weft bench --save FILE`: this machine's processor as hardware for the planner, by measuring it. GPUs are not
measured: the planner has presets of them.

Everything is measured as training uses it: a rank is a process with one thread, and as many of them work at the same
time as there are cores.

    peak_tflops        fp32 products of a linear layer (x @ w.T): the fastest shape's rate
    matmul_fraction    the geometric mean over all shapes, of that
    attention_fraction causal F.scaled_dot_product_attention, forward and backward, of the mean product's rate
    memory_gb_s        a copy that no cache holds, counted as read and written
    launch_us          a transformer layer of next to no arithmetic, over the launches that the planner counts in it
    node_*             latency and rate of a link, by least squares over collectives of two ranks, 4 KiB to 16 MiB
    network_*          the same of two ranks that reach each other over loopback as if they were on two machines
    memory_gib         what there is (of the control group, where it has a limit), shared by the ranks
    reserved_gib       what a process has taken for itself once it has imported torch and weft
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.bench.environment import cores, environment, processor
from weft.bench.measure import Quantiles, alternate, slowest_rank
from weft.bench.report import console
from weft.bench.suites import RefusedError
from weft.comm.communicator import communicator
from weft.planner.hardware import VERSION, Hardware
from weft.planner.step import CAUSAL_BACKWARD, KERNELS_BACKWARD, KERNELS_FORWARD
from weft.testing.ranks import on_machines, run_ranks

# m, n, k of [m, k] @ [n, k].T: tokens, outputs and inputs of small and middle models' layers and of their shards.
SHAPES = [
    *((256, 256, 256), (256, 1024, 256), (256, 256, 1024), (1024, 512, 512), (1024, 2048, 512)),
    *((1024, 512, 2048), (512, 1024, 1024), (512, 4096, 1024), (1024, 1024, 1024)),
]
COPIED_BYTES = 128 << 20  # or an eighth of a rank's share of the memory, where that is less
ATTENTION = (1, 8, 1024, 64)  # batch, heads, sequence, head_dim
MESSAGES = [4096 << shift for shift in range(0, 13, 2)]  # 4 KiB to 16 MiB
NETWORK_MESSAGES = [4096 << shift for shift in range(0, 11, 2)]
_ROUNDS = 7
_CALL_S = 0.02  # what a measurement takes at least, about
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Link:
    """A link as the planner counts it: a gather of b bytes over two ranks takes latency_s + b / 2 / bytes_s."""

    latency_s: float
    bytes_s: float

    def gather_s(self, whole_bytes: float) -> float:
        return self.latency_s + whole_bytes / 2 / self.bytes_s


def save(path: str, ranks: int | None, command: str) -> int:
    """Measures, writes the file and says what is in it.

    Args:
        ranks: how many are to share the machine; None for one a core.

    Raises:
        RefusedError: the links' times make no sense.
    """
    found = measure(ranks or cores())
    Path(path).write_text(json.dumps({**found, "command": command}, indent=2) + "\n")
    Hardware.of(path)  # the planner reads it
    to = console()
    for line in told(found):
        to.print(line, highlight=False, markup=False, soft_wrap=True)
    if torch.cuda.is_available():
        print(
            f"this is of the processor; for the {torch.cuda.get_device_name()}, take a preset of weft plan --hardware"
        )
    print(f"saved to {path}; for example: weft plan gpt2 --gpus {found['devices_per_node']} --hardware {path} ...")
    return 0


def measure(ranks: int) -> dict[str, Any]:
    """The file's contents: what the planner reads, and under "measured" what that was computed from."""
    at_once = min(ranks, cores())
    copied = min(COPIED_BYTES, memory_bytes() // at_once // 8)
    arithmetic = slowest_rank(run_ranks(_arithmetic, at_once, copied, timeout_s=_TIMEOUT_S))
    node, node_points = _link(MESSAGES)
    network, network_points = _link(NETWORK_MESSAGES, before=on_machines("ab"))
    rates = {shape: 2 * math.prod(shape) / arithmetic[_name(shape)].p50_us * 1e6 for shape in SHAPES}
    peak = max(rates.values())
    mean = math.exp(sum(map(math.log, rates.values())) / len(rates))
    attention = _attention_flops() / arithmetic["attention"].p50_us * 1e6
    return {
        "weft_hardware": VERSION,
        "name": f"{processor()}, {cores()} cores",
        "memory_gib": memory_bytes() / ranks / 2**30,
        "peak_tflops": {"fp32": peak / 1e12},
        "matmul_fraction": mean / peak,
        "attention_fraction": attention / mean,
        "memory_gb_s": 2 * copied / arithmetic["copy"].p50_us * 1e6 / 1e9,
        "node_gb_s": node.bytes_s / 1e9,
        "node_latency_us": node.latency_s * 1e6,
        "network_gb_s": network.bytes_s / 1e9,
        "network_latency_us": network.latency_s * 1e6,
        "devices_per_node": ranks,
        "full_speed_ranks": cores(),
        "launch_us": arithmetic["layer"].p50_us / (KERNELS_FORWARD + KERNELS_BACKWARD),
        "reserved_gib": reserved_bytes() / 2**30,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "measured": {
            "ranks_at_once": at_once,
            "copied_bytes": copied,
            "times": {name: asdict(times) for name, times in arithmetic.items()},
            "tflops_by_shape": {_name(shape): rate / 1e12 for shape, rate in rates.items()},
            "node": node_points,
            "network": network_points,
        },
    }


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _arithmetic(rank: int, copied_bytes: int) -> dict[str, list[float]]:
    """Microseconds of each product, of a copy, of attention and of a layer without arithmetic, ranks side by side."""
    generator = torch.Generator().manual_seed(rank)
    samples: dict[str, list[float]] = {}
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
        samples |= _timed({_name((m, n, k)): partial(F.linear, x, w)})
    samples |= _timed({"copy": _copy(copied_bytes)})
    samples |= _timed({"attention": _attention(generator), "layer": _small_layer()})
    return samples


def _copy(copied_bytes: int) -> Callable[[], object]:
    source = torch.ones(copied_bytes // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _timed(calls: Mapping[str, Callable[[], object]], rounds: int = _ROUNDS) -> dict[str, list[float]]:
    """As `alternate`, with as many calls a measurement as the slowest needs for it to last; the same on every rank."""
    samples: dict[str, list[float]] = {}
    for name, call in calls.items():
        first = alternate({name: call}, meet=dist.barrier, rounds=2, calls=1)[name]
        slowest = torch.tensor(min(first))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        count = max(1, min(1000, int(_CALL_S * 1e6 / slowest.item())))
        samples |= alternate({name: call}, meet=dist.barrier, rounds=rounds, calls=count)
    return samples


def _attention(generator: torch.Generator) -> Callable[[], object]:
    q, k, v = (torch.randn(ATTENTION, generator=generator, requires_grad=True) for _ in range(3))
    gradient = torch.ones(ATTENTION)

    def step() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return step


def _attention_flops() -> float:
    """Of the causal half, forward and backward, as the planner counts them."""
    batch, heads, sequence, head_dim = ATTENTION
    return 4 * batch * heads * sequence**2 * head_dim / 2 * (1 + CAUSAL_BACKWARD)


class _Layer(nn.Module):
    """A transformer layer, pre-norm, with attention and an MLP; so narrow that its operators' start is all it costs."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, width]
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _small_layer() -> Callable[[], object]:
    layer, x = _Layer(), torch.ones(1, 2, 8, requires_grad=True)
    leaves, gradient = (x, *layer.parameters()), torch.ones(1, 2, 8)
    return lambda: torch.autograd.grad(layer(x), leaves, gradient)


def _link(sizes: Sequence[int], before: Callable[[int], object] | None = None) -> tuple[Link, list[dict[str, Any]]]:
    """The link between two ranks, and every point that it was fitted to beside what it predicts."""
    times = slowest_rank(run_ranks(_collectives, 2, sizes, timeout_s=_TIMEOUT_S, before=before))
    # An all-reduce is two gathers, so half of it is a point of one.
    halves = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    named = [(name, size, times[f"{name} {size}"]) for name in halves for size in sizes]
    link = fit([(size, each.p50_us / 1e6 / halves[name]) for name, size, each in named])
    points = [
        {"op": name, "bytes": size, **asdict(each), "fitted_us": halves[name] * link.gather_s(size) * 1e6}
        for name, size, each in named
    ]
    return link, points


def _collectives(rank: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """As layers call them, without torch.distributed around them."""
    ranks = communicator(None)
    samples: dict[str, list[float]] = {}
    for size in sizes:
        whole = torch.zeros(size // 4)
        parts = list(whole.chunk(2))
        shard = torch.zeros_like(parts[rank])
        calls: dict[str, Callable[[], object]] = {
            f"all_gather {size}": partial(ranks.gather_parts, shard, parts),
            f"reduce_scatter {size}": partial(ranks.scatter_sum, parts, shard),
            f"all_reduce {size}": partial(ranks.all_reduce_, whole),
        }
        samples |= _timed(calls)
    return samples


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """Latency and rate from (bytes, seconds) of gathers over two ranks: least squares of the relative error, so that a
    small message counts as much as a large one. No latency below zero."""
    rows = [(1 / seconds, size / 2 / seconds) for size, seconds in points]  # both times (latency, 1 / rate) make 1
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:
        latency, inverse = 0.0, b / bb
    if inverse <= 0:
        raise RefusedError("larger messages were not slower than small ones; measure again on a quiet machine")
    return Link(latency, 1 / inverse)


def memory_bytes() -> int:
    """Of the machine, or of the control group that this process may use."""
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    told = [path.read_text().strip() for path in limits if path.is_file()]
    return min([total, *(int(text) for text in told if text.isdecimal())])


def reserved_bytes() -> int:
    """Anonymous memory of a new process that has imported torch and weft's layers."""
    code = (
        "import torch, weft; weft.ParallelLinear\n"
        "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('Anonymous')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def told(found: Mapping[str, Any]) -> list[str]:
    """What is in the file, a line each."""
    times, cells = found["measured"]["times"], found["measured"]["tflops_by_shape"]
    copy, copied_mib = Quantiles(**times["copy"]), found["measured"]["copied_bytes"] >> 20
    return [
        f"{found['name']}, shared by {found['devices_per_node']} ranks; {found['measured']['ranks_at_once']} at once",
        *(f"  fp32 product {shape:<16} {rate * 1e3:8.1f} GFLOP/s a rank" for shape, rate in cells.items()),
        f"  attention, of the mean product's rate {found['attention_fraction']:.0%}",
        f"  memory {found['memory_gb_s']:.1f} GB/s a rank ({copy.spread()} us for {copied_mib} MiB)",
        f"  start of an operator {found['launch_us']:.1f} us",
        f"  link {found['node_latency_us']:.1f} us + {found['node_gb_s']:.2f} GB/s, fitted to "
        f"{_misfit(found['measured']['node']):.0%} (median)",
        f"  loopback {found['network_latency_us']:.0f} us + {found['network_gb_s']:.2f} GB/s, fitted to "
        f"{_misfit(found['measured']['network']):.0%} (median)",
        f"  memory of a rank {found['memory_gib']:.1f} GiB, of which {found['reserved_gib']:.2f} are gone at the start",
    ]


def _misfit(points: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(abs(point["fitted_us"] / point["p50_us"] - 1) for point in points)
