"""A kernel file in which everything is wrong that the static gate looks for; what tests/kernels/test_check.py is for."""

import torch
import triton
import triton.language as tl

from weft.kernels import launch


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
def does_not_compile(x, y):
    tl.store(y + tl.arange(0, 3), tl.load(x + tl.arange(0, 3)))


def variants(architecture: str) -> None:
    fp32, bf16 = (torch.empty(16, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    launch.launch(spills, (1,), fp32, fp32, N=128)
    launch.launch(fills_shared_memory, (1,), bf16, fp32, N=128, warps=8, stages=10)
    launch.launch(has_a_small_dot, (1,), bf16, fp32)
    launch.launch(does_not_compile, (1,), fp32, fp32)
