"""weft bench rank_order_sum: the CUDA extension's rank-order sum of W buffers, against torch.sum of a stack."""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from weft import _C
from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.table import Row
from weft.testing import reference

__all__ = ["LIMIT", "add_arguments", "contests", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(worlds=(2, 4, 8))


def run(options: argparse.Namespace) -> list[Row]:
    return measure(contests(options.worlds), options.rounds)


def contests(worlds: Iterable[int], count=64 << 20, dtype=torch.bfloat16) -> Iterator[Contest]:
    """Yield a contest for each number of buffers; the buffers are larger than any cache."""
    for world in worlds:
        stack = torch.randn(world, count, device="cuda").to(dtype)
        out = torch.empty(count, device="cuda", dtype=dtype)
        addresses, name = [part.data_ptr() for part in stack], str(dtype).removeprefix("torch.")

        def ours(addresses=addresses, out=out, name=name):
            stream = torch.cuda.current_stream().cuda_stream
            assert _C.cuda is not None
            _C.cuda.rank_order_sum(addresses, out.data_ptr(), count, name, 1.0, stream)

        def check(ours=ours, out=out, stack=stack, world=world):
            ours()
            expected = reference.reduce([part[: 1 << 20].cpu() for part in stack])
            if not torch.equal(out[: 1 << 20].cpu(), expected):
                raise AssertionError(f"rank_order_sum of {world} buffers is wrong")

        yield Contest(
            "rank_order_sum",
            f"{world} x {count} {name}",
            ours,
            {"torch.sum": partial(torch.sum, stack, 0, out=out)},
            check,
            0,
            (world + 1) * count * dtype.itemsize,
        )
