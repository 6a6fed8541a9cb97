"""A kernel file in which everything is wrong that the static gate looks for; what test_gate.py is for."""

import torch
import triton
import triton.language as tl

from weft.kernels import launch
from weft.kernels.language import TensorDescriptor


@triton.jit
def spills(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = tl.load(x + i[:, None] * N + i[None, :])
    for _ in range(2):
        tile = tl.dot(tile, tile, input_precision="ieee")
    tl.store(y + i[:, None] * N + i[None, :], tile)


@triton.jit
def fills_shared_memory(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    k = tl.arange(0, 128)
    total = tl.zeros((N, N), tl.float32)
    for step in range(64):
        a = tl.load(x + i[:, None] * 8192 + (k + step * 128)[None, :])
        total = tl.dot(a, a.T, total)
    tl.store(y + i[:, None] * N + i[None, :], total)


@triton.jit
def has_a_small_dot(x, y):
    i = tl.arange(0, 16)
    tile = tl.load(x + i[:, None] * 16 + i[None, :])
    tl.store(y + i[:, None] * 16 + i[None, :], tl.dot(tile, tile))


@triton.jit
def serialises_its_products(a, b, out, steps, tiles, N: tl.constexpr):
    """Two sums, which a flattened loop resets by selects."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        left = tl.zeros((N, N), tl.float32)
        right = tl.zeros((N, N), tl.float32)
        for step in range(steps):
            x = a.load([tile * N, step * 64])
            left = tl.dot(x, b.load([step * 64, 0]), left)
            right = tl.dot(x, b.load([step * 64, N]), right)
        i = tl.arange(0, N)
        tl.store(out + i[:, None] * N + i[None, :], left * right)


@triton.jit
def rewrites_registers_of_a_product(a, b, out, steps, N: tl.constexpr):
    """A product's left operand is computed in registers: without serialising, the next turn would rewrite it too early."""
    total = tl.zeros((N, N), tl.float32)
    for step in tl.range(0, steps, num_stages=3):
        x = (a.load([0, step * 64]).to(tl.float32) * 2).to(tl.bfloat16)
        total = tl.dot(x, b.load([step * 64, 0]), total)
    i = tl.arange(0, N)
    tl.store(out + i[:, None] * N + i[None, :], total)


@triton.jit
def adds_in_any_order(x, y):
    tl.atomic_add(y, tl.sum(tl.load(x + tl.program_id(0) * 16 + tl.arange(0, 16)).to(tl.float32)))


@triton.jit
def overtakes(x, y):
    first = tl.load(x)
    i = tl.arange(0, 1024)
    tl.store(y + i, tl.load(x + i) - first)


@triton.jit
def does_not_compile(x, y):
    tl.store(y + tl.arange(0, 3), tl.load(x + tl.arange(0, 3)))


def variants(architecture: str) -> None:
    fp32, bf16 = (torch.empty(16, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    launch.launch(spills, (1,), fp32, fp32, N=128)
    launch.launch(fills_shared_memory, (1,), bf16, fp32, N=128, warps=8, stages=10)
    launch.launch(has_a_small_dot, (1,), bf16, fp32)
    a, b = (
        TensorDescriptor.from_tensor(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), block)
        for block in ([128, 64], [64, 128])
    )
    if architecture == "sm_90":
        launch.launch(serialises_its_products, (1,), a, b, fp32, 64, 64, N=128, warps=8, stages=3)
        launch.launch(rewrites_registers_of_a_product, (1,), a, b, fp32, 64, N=128, warps=8, stages=3)
    launch.launch(adds_in_any_order, (8,), fp32, fp32.clone())  # in memory of its own
    launch.launch(overtakes, (1,), fp32, fp32)
    launch.launch(does_not_compile, (1,), fp32, fp32)
