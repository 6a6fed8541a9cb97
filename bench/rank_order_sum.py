"""The rank-order sum of W buffers on a GPU, beside torch.sum of a stack and the bandwidth of a copy."""

import torch

from weft import _C
from weft.testing import reference


def measure(worlds=(2, 4, 8), count=64 << 20, dtype=torch.bfloat16, rounds=21) -> list[dict]:
    """Medians of CUDA-event times; the buffers are larger than any cache. Correctness is checked before timing."""
    rows = []
    for world in worlds:
        stack = torch.randn(world, count, device="cuda").to(dtype)
        out = torch.empty(count, device="cuda", dtype=dtype)
        addresses = [part.data_ptr() for part in stack]
        name = str(dtype).removeprefix("torch.")

        def ours(addresses=addresses, out=out, name=name):
            stream = torch.cuda.current_stream().cuda_stream
            _C.cuda.rank_order_sum(addresses, out.data_ptr(), count, name, 1.0, stream)

        ours()
        expected = reference.reduce([part[: 1 << 20].cpu() for part in stack])
        if not torch.equal(out[: 1 << 20].cpu(), expected):
            raise AssertionError(f"rank_order_sum of {world} buffers is wrong; not measured")
        copied = torch.empty_like(stack)
        contenders = {
            "ours_us": ours,
            "torch_sum_us": lambda stack=stack, out=out: torch.sum(stack, 0, out=out),
            "copy_us": lambda stack=stack, copied=copied: copied.copy_(stack),
        }
        times = {key: _median_us(call, rounds) for key, call in contenders.items()}
        element_bytes = out.element_size()
        ours_bytes_per_us = (world + 1) * count * element_bytes / times["ours_us"]
        copy_bytes_per_us = 2 * world * count * element_bytes / times["copy_us"]
        share = ours_bytes_per_us / copy_bytes_per_us
        rows.append({"world": world, "count": count, "dtype": name, **times, "share_of_copy_bandwidth": share})
    return rows


def _median_us(call, rounds: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]
