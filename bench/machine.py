"""`weft bench --save FILE`: measure this machine's processor as hardware for the planner.

GPUs are not measured: the planner has presets for them. Everything is measured as training uses it: a rank is a
process with one thread, and as many ranks work at the same time as there are cores.

    peak_tflops        fp32 products of a linear layer (x @ w.T): the fastest shape's rate
    matmul_fraction    the geometric mean of all shapes' rates, over peak_tflops
    attention_*        causal F.scaled_dot_product_attention, forward and backward, at two lengths and two widths of a
                       head: the rate of its products as a share of the mean product's rate, the further time of a
                       score, and the block whose hidden half it computes, which is the loss of short sequences
    memory_gb_s        a copy larger than the caches, counted as read and written
    elementwise_gb_s   products of two tensors of a layer's size, each into new memory that stays, as in a forward
    activation_*_ns    time an element of F.silu of such a tensor, forward and backward
    launch_us          a transformer layer with hardly any arithmetic, over the launches that the planner counts in it
    context_launch_us  the same layer with its sequence shared by two ranks
    turn_us            time that each small all-reduce of pairs adds to the products between, if ranks share cores
    node_*             latency and rate of a link, by least squares over collectives of two ranks, 4 KiB to 16 MiB
    network_*          the same for two ranks that reach each other over loopback, as if on two machines
    memory_gib         memory of the machine, or the control group's limit, over the number of ranks
    reserved_gib       memory that a process takes to import torch and weft
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

import weft
from weft.bench.environment import cores, environment, processor
from weft.bench.measure import Quantiles, alternate, slowest_rank
from weft.bench.report import console
from weft.bench.suites import RefusedError
from weft.comm.registry import communicator
from weft.testing.ranks import on_machines, run_ranks
from weft.tools.planner.hardware import VERSION, Hardware
from weft.tools.planner.step import CAUSAL_BACKWARD, KERNELS_BACKWARD, KERNELS_FORWARD

# m, n, k of [m, k] @ [n, k].T: tokens, outputs and inputs of the layers of small and middle models and of their shards.
SHAPES = [
    *((256, 256, 256), (256, 1024, 256), (256, 256, 1024), (1024, 512, 512), (1024, 2048, 512)),
    *((1024, 512, 2048), (512, 1024, 1024), (512, 4096, 1024), (1024, 1024, 1024)),
]
COPIED_BYTES = 128 << 20  # or an eighth of a rank's share of the memory, if that is less
# Batch, heads, sequence, head_dim. All have the same number of tokens and heads.
ATTENTION = [(4, 8, 256, 32), (4, 8, 256, 128), (1, 8, 1024, 32), (1, 8, 1024, 128)]
BETWEEN = (1024, 512)  # tokens and width of the tensors between products
_PRODUCTS = 16  # products of some milliseconds, with meetings of ranks between them
_KEPT = 16  # elementwise results that stay in memory
MESSAGES = [4096 << shift for shift in range(0, 13, 2)]  # 4 KiB to 16 MiB
NETWORK_MESSAGES = [4096 << shift for shift in range(0, 11, 2)]
_ROUNDS = 7
_CALL_S = 0.02  # least time of a measurement, about
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Link:
    """Link in the planner's model: a gather of b bytes over two ranks takes latency_s + b / 2 / bytes_s."""

    latency_s: float
    bytes_s: float

    def gather_s(self, whole_bytes: float) -> float:
        return self.latency_s + whole_bytes / 2 / self.bytes_s


def save(path: str, ranks: int | None, command: str) -> int:
    """Measure the machine, write the file and print its figures; return the exit code.

    Args:
        path: File to write.
        ranks: Number of ranks that will share the machine; None for one a core.
        command: Command line, kept in the file.

    Raises:
        RefusedError: The times of a link or of attention make no sense.
    """
    found = measure(ranks or cores())
    Path(path).write_text(json.dumps({**found, "command": command}, indent=2) + "\n")
    Hardware.of(path)  # the planner reads it
    to = console()
    for line in summary(found):
        to.print(line, highlight=False, markup=False, soft_wrap=True)
    if torch.cuda.is_available():
        print(
            f"this is of the processor; for the {torch.cuda.get_device_name()}, take a preset of weft plan --hardware"
        )
    print(f"saved to {path}; for example: weft plan gpt2 --gpus {found['devices_per_node']} --hardware {path} ...")
    return 0


def measure(ranks: int) -> dict[str, Any]:
    """Return the file's contents: the figures for the planner, and under "measured" their sources."""
    at_once = min(ranks, cores())
    copied = min(COPIED_BYTES, memory_bytes() // at_once // 8)
    arithmetic = slowest_rank(run_ranks(_arithmetic, at_once, copied, timeout_s=_TIMEOUT_S))
    node, node_points = _link(MESSAGES)
    network, network_points = _link(NETWORK_MESSAGES, before=on_machines("ab"))
    rates = {shape: 2 * math.prod(shape) / arithmetic[_name(shape)].p50_us * 1e6 for shape in SHAPES}
    peak = max(rates.values())
    mean = math.exp(sum(map(math.log, rates.values())) / len(rates))
    attention = fit_attention({shape: arithmetic[f"attention {_name(shape)}"].p50_us / 1e6 for shape in ATTENTION})
    elements = math.prod(BETWEEN)
    shared = slowest_rank(run_ranks(_shared_layer, 2, timeout_s=_TIMEOUT_S))["layer"]
    turn_us = turn(run_ranks(_taking_turns, ranks, timeout_s=_TIMEOUT_S)) if ranks > cores() and ranks % 2 == 0 else 0.0
    launches = KERNELS_FORWARD + KERNELS_BACKWARD
    return {
        "weft_hardware": VERSION,
        "name": f"{processor()}, {cores()} cores",
        "memory_gib": memory_bytes() / ranks / 2**30,
        "peak_tflops": {"fp32": peak / 1e12},
        "matmul_fraction": mean / peak,
        "attention_fraction": 4 / attention.product_s / mean,
        "attention_score_ns": attention.score_s * 1e9,
        "attention_block": attention.block,
        "activation_forward_ns": arithmetic["activation"].p50_us * 1e3 / elements,
        "activation_backward_ns": arithmetic["activation backward"].p50_us * 1e3 / elements,
        "elementwise_gb_s": 12 * elements * _KEPT / arithmetic["elementwise"].p50_us * 1e6 / 1e9,
        "memory_gb_s": 2 * copied / arithmetic["copy"].p50_us * 1e6 / 1e9,
        "node_gb_s": node.bytes_s / 1e9,
        "node_latency_us": node.latency_s * 1e6,
        "network_gb_s": network.bytes_s / 1e9,
        "network_latency_us": network.latency_s * 1e6,
        "devices_per_node": ranks,
        "full_speed_ranks": cores(),
        "turn_us": turn_us,
        "launch_us": arithmetic["layer"].p50_us / launches,
        "context_launch_us": shared.p50_us / launches,
        "reserved_gib": reserved_bytes() / 2**30,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "measured": {
            "ranks_at_once": at_once,
            "copied_bytes": copied,
            "times": {name: asdict(times) for name, times in (arithmetic | {"layer, shared sequence": shared}).items()},
            "tflops_by_shape": {_name(shape): rate / 1e12 for shape, rate in rates.items()},
            "node": node_points,
            "network": network_points,
        },
    }


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _arithmetic(rank: int, copied_bytes: int) -> dict[str, list[float]]:
    """Return the microseconds of products, a copy, attention and a small layer, with ranks side by side."""
    generator = torch.Generator().manual_seed(rank)
    samples: dict[str, list[float]] = {}
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
        samples |= _timed({_name((m, n, k)): partial(F.linear, x, w)})
    samples |= _timed({"copy": _copy(copied_bytes)})
    for shape in ATTENTION:
        samples |= _timed({f"attention {_name(shape)}": _attention(shape, generator)})
    return samples | _timed(_between(generator)) | _timed({"layer": _small_layer()})


def _copy(copied_bytes: int) -> Callable[[], object]:
    source = torch.ones(copied_bytes // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _timed(calls: Mapping[str, Callable[[], object]], rounds: int = _ROUNDS) -> dict[str, list[float]]:
    """Return the samples of `alternate`, with enough calls a measurement to last _CALL_S; every rank makes as many."""
    samples: dict[str, list[float]] = {}
    for name, call in calls.items():
        first = alternate({name: call}, meet=dist.barrier, rounds=2, calls=1)[name]
        slowest = torch.tensor(min(first))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        count = max(1, min(1000, int(_CALL_S * 1e6 / slowest.item())))
        samples |= alternate({name: call}, meet=dist.barrier, rounds=rounds, calls=count)
    return samples


def _attention(shape: Sequence[int], generator: torch.Generator) -> Callable[[], object]:
    q, k, v = (torch.randn(*shape, generator=generator, requires_grad=True) for _ in range(3))
    gradient = torch.ones(*shape)

    def step() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return step


@dataclass(frozen=True)
class Attention:
    """Causal attention in the planner's model.

    Each row has (keys + block) / 2 scores. A score takes score_s, and product_s for every element of a head. Backward
    takes CAUSAL_BACKWARD times as long as forward.
    """

    product_s: float
    score_s: float
    block: float


def fit_attention(times: Mapping[Sequence[int], float]) -> Attention:
    """Fit `Attention` to the seconds of forward and backward of ATTENTION's shapes.

    Raises:
        RefusedError: Wider heads took no longer.
    """
    (short, long), (narrow, wide) = (sorted({shape[axis] for shape in times}) for axis in (2, 3))

    def of_a_key(sequence: int, head_dim: int) -> float:
        """Return the seconds of a row's forward, over half the keys."""
        ((shape, seconds),) = ((s, t) for s, t in times.items() if s[2:] == (sequence, head_dim))
        return seconds / math.prod(shape[:3]) / (1 + CAUSAL_BACKWARD) / (sequence / 2)

    # A short row takes (1 + block / short) / (1 + block / long) times as long a key.
    ratio = math.sqrt(math.prod(of_a_key(short, width) / of_a_key(long, width) for width in (narrow, wide)))
    block = max(0.0, (ratio - 1) / (1 / short - ratio / long)) if ratio < long / short else short
    block = min(block, short)  # no block is longer than the short sequence
    a_score = [of_a_key(long, width) / (1 + block / long) for width in (narrow, wide)]
    product = (a_score[1] - a_score[0]) / (wide - narrow)
    if product <= 0:
        raise RefusedError("attention of wider heads took no longer; measure again on a quiet machine")
    return Attention(product, max(0.0, a_score[0] - narrow * product), block)


def _between(generator: torch.Generator) -> dict[str, Callable[[], object]]:
    x, y = (torch.randn(*BETWEEN, generator=generator) for _ in range(2))
    gradient = torch.ones_like(x)
    return {
        "elementwise": lambda: [x * y for _ in range(_KEPT)],
        "activation": lambda: F.silu(x),
        "activation backward": lambda: torch.ops.aten.silu_backward(gradient, x),
    }


class _MeasuredLayer(nn.Module):
    """Pre-norm transformer layer with attention and an MLP, so narrow that it only costs its operators' start."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, width]
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _shared_layer(rank: int) -> dict[str, list[float]]:
    """Return the microseconds of such a layer with its sequence shared by two ranks."""
    layer = weft.parallelize(_MeasuredLayer(), weft.init_mesh(cp=2, device_type="cpu")["cp"], context={"parts": True})
    x, gradient = torch.ones(1, 4, 8, requires_grad=True), torch.ones(1, 4, 8)
    return _timed({"layer": lambda: layer(x).backward(gradient)})


def _taking_turns(rank: int) -> dict[str, list[float]]:
    """Return the microseconds of products on all ranks, with an all-reduce of a pair after each or after the last."""
    pair = communicator(weft.init_mesh(dp=dist.get_world_size() // 2, tp=2, device_type="cpu")["tp"])
    generator = torch.Generator().manual_seed(rank)
    x, w, small = (
        torch.randn(1024, 512, generator=generator),
        torch.randn(512, 512, generator=generator),
        torch.zeros(1024),
    )

    def products(meetings: int) -> None:
        for number in range(_PRODUCTS):
            F.linear(x, w)
            if number >= _PRODUCTS - meetings:
                pair.all_reduce_(small)

    ways = {"each": partial(products, _PRODUCTS), "last": partial(products, 1)}
    return alternate(ways, meet=dist.barrier, rounds=_ROUNDS, calls=1)


def turn(of_ranks: Sequence[Mapping[str, list[float]]]) -> float:
    """Return the microseconds that a meeting adds, on the slowest rank."""
    times = slowest_rank(of_ranks)
    return max(0.0, times["each"].p50_us - times["last"].p50_us) / (_PRODUCTS - 1)


def _small_layer() -> Callable[[], object]:
    layer, x = _MeasuredLayer(), torch.ones(1, 2, 8, requires_grad=True)
    leaves, gradient = (x, *layer.parameters()), torch.ones(1, 2, 8)
    return lambda: torch.autograd.grad(layer(x), leaves, gradient)


def _link(sizes: Sequence[int], before: Callable[[int], object] | None = None) -> tuple[Link, list[dict[str, Any]]]:
    """Return the link between two ranks, and the points of the fit with the fitted times."""
    times = slowest_rank(run_ranks(_collectives, 2, sizes, timeout_s=_TIMEOUT_S, before=before))
    # An all-reduce is two gathers, so half its time is a point of a gather.
    halves = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    named = [(name, size, times[f"{name} {size}"]) for name in halves for size in sizes]
    link = fit([(size, each.p50_us / 1e6 / halves[name]) for name, size, each in named])
    points = [
        {"op": name, "bytes": size, **asdict(each), "fitted_us": halves[name] * link.gather_s(size) * 1e6}
        for name, size, each in named
    ]
    return link, points


def _collectives(rank: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the times of collectives as layers call them, without torch.distributed around them."""
    ranks = communicator(None)
    samples: dict[str, list[float]] = {}
    for size in sizes:
        whole = torch.zeros(size // 4)
        parts = list(whole.chunk(2))
        shard = torch.zeros_like(parts[rank])
        calls: dict[str, Callable[[], object]] = {
            f"all_gather {size}": partial(ranks.all_gather_into, shard, parts),
            f"reduce_scatter {size}": partial(ranks.reduce_scatter_into, parts, shard),
            f"all_reduce {size}": partial(ranks.all_reduce_, whole),
        }
        samples |= _timed(calls)
    return samples


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """Fit latency and rate to (bytes, seconds) of gathers over two ranks.

    The fit is least squares of the relative error, so that a small message counts as much as a large one. The latency
    is at least zero.

    Raises:
        RefusedError: Larger messages were not slower.
    """
    rows = torch.tensor([(1 / s, size / 2 / s) for size, s in points], dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)  # each row times (latency, 1 / rate)
    latency, inverse = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    if latency < 0:
        latency, inverse = 0.0, torch.linalg.lstsq(rows[:, 1:], ones).solution.item()
    if inverse <= 0:
        raise RefusedError("larger messages were not slower than small ones; measure again on a quiet machine")
    return Link(latency, 1 / inverse)


def memory_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's control group if that is less."""
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdecimal())])


def reserved_bytes() -> int:
    """Return the anonymous memory of a new process after importing torch and weft's layers, in bytes."""
    code = (
        "import torch, weft; weft.ParallelLinear\n"
        "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('Anonymous')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def summary(found: Mapping[str, Any]) -> list[str]:
    """Return the file's figures as lines for the terminal."""
    times, cells = found["measured"]["times"], found["measured"]["tflops_by_shape"]
    copy, copied_mib = Quantiles(**times["copy"]), found["measured"]["copied_bytes"] >> 20
    return [
        f"{found['name']}, shared by {found['devices_per_node']} ranks; {found['measured']['ranks_at_once']} at once",
        *(f"  fp32 product {shape:<16} {rate * 1e3:8.1f} GFLOP/s a rank" for shape, rate in cells.items()),
        f"  attention's products, of the mean product's rate {found['attention_fraction']:.0%}; a score also takes "
        f"{found['attention_score_ns']:.2f} ns; blocks of {found['attention_block']:.0f}",
        f"  between products {found['elementwise_gb_s']:.1f} GB/s; an activation's element "
        f"{found['activation_forward_ns']:.2f} ns, backward {found['activation_backward_ns']:.2f} ns",
        f"  memory {found['memory_gb_s']:.1f} GB/s a rank ({copy.spread()} us for {copied_mib} MiB)",
        f"  start of an operator {found['launch_us']:.1f} us, of a shared sequence {found['context_launch_us']:.1f} us",
        f"  a meeting of ranks that share cores {found['turn_us']:.0f} us",
        f"  link {found['node_latency_us']:.1f} us + {found['node_gb_s']:.2f} GB/s, fitted to "
        f"{_misfit(found['measured']['node']):.0%} (median)",
        f"  loopback {found['network_latency_us']:.0f} us + {found['network_gb_s']:.2f} GB/s, fitted to "
        f"{_misfit(found['measured']['network']):.0%} (median)",
        f"  memory of a rank {found['memory_gib']:.1f} GiB; {found['reserved_gib']:.2f} are in use at the start",
    ]


def _misfit(points: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(abs(point["fitted_us"] / point["p50_us"] - 1) for point in points)
