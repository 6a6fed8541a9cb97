"""weft bench attention: a sequence shared by CPU ranks, forward and backward, against one process."""

import argparse
import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
from weft.bench.measure import alternate, slowest_rank
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.bench.traffic import counted
from weft.testing.ranks import run_ranks

METHODS = ("ring", "all_gather", "ulysses")
ALONE = "one process"
TORCH = "torch context_parallel"
LIMIT = (
    "one process and one thread with the whole sequence, by F.scaled_dot_product_attention, over the number of ranks"
)
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 8, 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", action="append", type=positive, help="2048, 4096, 8192 and 16384 by default")


def run(options: argparse.Namespace) -> list[Row]:
    rows = []
    for length in options.length or (2048, 4096, 8192, 16384):
        rounds = max(3, min(options.rounds, 8192 * 21 // length))
        per_rank = run_ranks(_measure, options.world, length, rounds, timeout_s=3600, group_timeout_s=1800)
        times = slowest_rank([samples for samples, *_ in per_rank])
        why = per_rank[0][3]
        peaks_of = run_ranks(_peaks, options.world, length, timeout_s=3600, group_timeout_s=1800)
        for method in METHODS:
            error = max(errors[method] for _, errors, *_ in per_rank)
            if not error < 1e-5:
                raise AssertionError(f"{method} at {length}: the result is off by {error:.1e}; not measured")
            sent = max(of_rank[2][method] for of_rank in per_rank)
            peak = max(of_rank[method] for of_rank in peaks_of)
            compared = {"ours": times[method], **{name: times[name] for name in (ALONE, TORCH) if name in times}}
            facts = {
                "share_of_time": times[method].p50_us / times[ALONE].p50_us,
                "peak_bytes": peak,
                "share_of_memory": peak / peaks_of[0][ALONE],
                "alone_peak_bytes": peaks_of[0][ALONE],
                "sent_bytes": sent,
                "error": error,
            }
            of = {"method": method, "length": length, "world": options.world}
            rows.append(Row(of, compared, ALONE, facts, why and f"{TORCH}: {why}"))
    return rows


def _measure(rank: int, length: int, rounds: int):
    whole, parts = _drawn(length)
    contenders: dict[str, Callable] = {method: _step(_split(method), parts) for method in METHODS}
    alone = _step(_plain, whole)
    contenders[ALONE] = alone if rank == 0 else lambda: None
    theirs, why = _torch(whole)
    if theirs:
        contenders[TORCH] = theirs
    exact = [weft.shard_sequence(x, dim=2) for x in alone()]
    errors, sent = {}, {}
    for method in METHODS:
        dist.barrier()
        sent[method], result = _sent_bytes(contenders[method])
        errors[method] = max(((a - b).norm() / b.norm()).item() for a, b in zip(result, exact, strict=True))
        del result
    del exact
    samples = alternate(contenders, meet=dist.barrier, rounds=rounds, calls=1)
    return samples, errors, sent, why


def _peaks(rank: int, length: int) -> dict[str, int]:
    """Return the peak bytes of each method.

    The ranks are processes of their own with a malloc that returns freed memory at once, so that all resident memory
    is in use.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    whole, parts = _drawn(length)
    calls = {method: _step(_split(method), parts) for method in METHODS} | {ALONE: _step(_plain, whole)}
    peaks = {}
    for name, call in calls.items():
        dist.barrier()
        peaks[name] = _peak_bytes(call) if name != ALONE or rank == 0 else 0
    dist.barrier()
    return peaks


def _drawn(length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return q, k, v and dout: the whole tensors, and this rank's parts."""
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    whole = [torch.randn(BATCH, h, length, HEAD_DIM, generator=generator) for h in heads]
    return whole, [weft.shard_sequence(x, dim=2).contiguous() for x in whole]


def _split(method: str) -> Callable:
    return lambda q, k, v: weft.context_attention(q, k, v, causal=True, method=method)


def _plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=HEADS != KV_HEADS)


def _step(attend: Callable, tensors: list[torch.Tensor]) -> Callable:
    """Return a function for forward and backward, which returns out and the gradients of q, k, v."""
    *inputs, dout = (x.detach() for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]

    def step():
        out = attend(*inputs)
        out.backward(dout)
        results = [out.detach(), *(x.grad for x in inputs)]
        for x in inputs:  # a gradient left over would be missing in the next call's peak
            x.grad = None
        return results

    return step


def _torch(whole: list[torch.Tensor]) -> tuple[Callable | None, str]:
    """Return torch's own method, or None and the reason if it does not run on this machine."""
    try:
        from torch.distributed.tensor.experimental import context_parallel

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

        def shared():
            *inputs, dout = (x.clone() for x in whole)
            inputs = [x.requires_grad_() for x in inputs]
            with context_parallel(mesh, buffers=[*inputs, dout], buffer_seq_dims=[2] * 4):
                out = _plain(*inputs)
                out.backward(dout)

        shared()
    except Exception as error:  # experimental: any error is a reason not to measure it
        return None, f"not measured ({type(error).__name__})"
    return shared, ""


def _sent_bytes(call: Callable) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that this rank sends to others in the call, and the call's result."""
    with counted() as sent:
        result = call()
    return sent.bytes, result


def _peak_bytes(call: Callable) -> int:
    """Return the peak resident memory during the call, beyond that before it (Linux)."""
    call()  # memory that stays from a first call does not count
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
