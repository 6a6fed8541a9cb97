"""weft bench bucket: a decoder's gradients to one flat buffer and back, and the sum of ranks' buffers, on a GPU."""

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.suites import positive
from weft.bench.table import Row
from weft.kernels.bucket import PackedBucket, Statistics, reduce
from weft.testing import cases, reference

__all__ = ["LIMIT", "add_arguments", "contests", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=4, help="decoder layers of Llama 3 8B (default 4)")


def run(options) -> list[Row]:
    return measure(contests(torch.device("cuda"), gradient_shapes(options.layers)), options.rounds)


def gradient_shapes(layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of `layers` layers of Llama 3 8B, split over 8 ranks: matrices, and two norms a layer."""
    model = cases.MODELS["llama-3-8b"]
    products = cases.linear_layers(model, tp=8)
    matrices: list[tuple[int, ...]] = [(layer.n * (2 if layer.gated else 1), layer.k) for layer in products]
    return [*matrices, (model.hidden,), (model.hidden,)] * layers


def contests(device: torch.device, shapes: list[tuple[int, ...]], worlds=(2, 8)) -> Iterator[Contest]:
    """Yield contests: bf16 gradients averaged into fp32 and bf16 buffers (with and without norm), back, and sums."""
    gradients = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    bucket, statistics = PackedBucket(gradients), Statistics(device)
    count = sum(gradient.numel() for gradient in gradients)
    for dtype in (torch.float32, torch.bfloat16):
        flat = bucket.empty(dtype)
        spans = [(slot.offset, slot.offset + slot.count) for slot in bucket.slots]
        views = [flat[a:b].view(shape) for (a, b), shape in zip(spans, shapes, strict=True)]
        shape = f"{len(shapes)} tensors, {count} bfloat16 to {str(dtype).removeprefix('torch.')}"
        moved = count * (2 + dtype.itemsize)

        def plain_pack(flat=flat, views=views):
            torch._foreach_copy_(views, gradients)
            flat.div_(8)

        def plain_pack_and_norm(flat=flat, plain_pack=plain_pack):
            plain_pack()
            return torch.linalg.vector_norm(flat)

        def check_pack(flat=flat, views=views):
            flat.fill_(torch.nan)
            bucket.pack(gradients, flat, 1 / 8, statistics)
            for view, gradient in zip(views, gradients, strict=True):
                assert torch.equal(view, (gradient.float() / 8).to(flat.dtype)), "pack"
            exact = sum(view.double().square().sum() for view in views)
            torch.testing.assert_close(statistics.squared_norm, exact, rtol=1e-12, atol=0)

        def check_unpack(views=views, flat=flat):
            for view in views:
                view.copy_(torch.randn_like(view))
            bucket.unpack(flat, gradients)
            assert all(torch.equal(g, v.bfloat16()) for g, v in zip(gradients, views, strict=True)), "unpack"

        name = "_foreach_copy_ + div_"
        yield Contest("bucket pack", shape, partial(bucket.pack, gradients, flat, 1 / 8),
                      {name: plain_pack}, check_pack, 0, moved)  # fmt: skip
        yield Contest("bucket pack and norm", shape,
                      partial(bucket.pack, gradients, flat, 1 / 8, statistics),
                      {f"{name} + vector_norm": plain_pack_and_norm}, check_pack, 0, moved)  # fmt: skip
        yield Contest("bucket unpack", shape, partial(bucket.unpack, flat, gradients),
                      {"_foreach_copy_": partial(torch._foreach_copy_, gradients, views)},
                      check_unpack, 0, moved)  # fmt: skip
    for world in worlds:
        yield _sum(device, world, count)


def _sum(device: torch.device, world: int, count: int) -> Contest:
    stack = torch.randn(world, count, device=device).bfloat16()
    buffers, out = list(stack), torch.empty(count, dtype=torch.bfloat16, device=device)

    def check():
        out.fill_(torch.nan)
        reduce(buffers, out)
        some = slice(0, 1 << 20)
        expected = reference.reduce([buffer[some].cpu() for buffer in buffers])
        assert torch.equal(out[some].cpu(), expected), "reduce"

    peer = {"torch.sum": lambda: torch.sum(stack, 0, out=out)}
    shape = f"{world} x {count} bfloat16"
    return Contest("bucket reduce", shape, lambda: reduce(buffers, out), peer, check, 0, (world + 1) * count * 2)
