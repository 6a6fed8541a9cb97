"""weft bench attention_chunk: attention on a GPU against PyTorch's fastest, forward and backward.

It also measures a step of a ring with its merge inside the kernel against the merge outside.
"""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.table import Row
from weft.kernels.attention import attention_forward
from weft.kernels.attention_rules import Positions, Rules
from weft.ops.attention import attention
from weft.ops.attention_chunk import merge_attention
from weft.testing import cases
from weft.testing.tolerance import assert_close

__all__ = ["LIMIT", "add_arguments", "contests", "run"]

_TOKENS = 32768  # batch times sequence, so that every length fills the device
_CHECKED = 2048  # positions
_LIBRARY = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, choices=(64, 128), help="both by default")
    # compiled: with torch.compile's FlexAttention, which takes half a minute a case.
    parser.set_defaults(attentions=cases.ATTENTIONS, compiled=True)


def run(options) -> list[Row]:
    chosen = [case for case in options.attentions if options.head_dim in (None, case.head_dim)]
    return measure(contests(chosen, options.compiled), options.rounds)


def contests(attentions: Iterable[cases.AttentionCase], compiled: bool = True) -> Iterator[Contest]:
    for case in attentions:
        batch = max(1, _TOKENS // case.sequence)
        yield from both_ways(case, batch, torch.device("cuda"), torch.bfloat16, compiled)
        if not case.causal:
            yield ring_step(case, batch, torch.device("cuda"), torch.bfloat16)


def both_ways(case: cases.AttentionCase, batch: int, device, dtype, compiled: bool = True) -> Iterator[Contest]:
    """Yield forward, and backward alone on a kept graph."""
    heads = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (
        torch.randn(batch, h, case.sequence, case.head_dim, device=device).to(dtype).requires_grad_() for h in heads
    )
    dout = torch.randn_like(q)
    peers = {name: partial(_library, backend, case.causal) for name, backend in _LIBRARY.items()}
    if compiled:
        peers["FlexAttention"] = _flex(case, device)
    ours = partial(attention, causal=case.causal)
    # Two products forward, five backward, over the unmasked pairs (Dao et al. 2022, section 3.1).
    pairs = case.sequence**2 * (0.5 if case.causal else 1.0)
    product = 2.0 * batch * case.heads * pairs * case.head_dim
    size = dtype.itemsize
    moved = size * (2 * q.numel() + 2 * k.numel())

    def with_gradients(function, *tensors):
        *inputs, dout = tensors
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def check():
        # The query heads of one KV head, and as many positions as fp64 has room for.
        queries, keys = (slice(0, 1), slice(0, case.heads // case.kv_heads)), (slice(0, 1), slice(0, 1))
        part = [t[i][:, :, :_CHECKED] for t, i in ((q, queries), (k, keys), (v, keys), (dout, queries))]
        plain = partial(_library, SDPBackend.MATH, case.causal)
        references = with_gradients(plain, *part), with_gradients(plain, *(t.double() for t in part))
        for result, expected, exact in zip(with_gradients(ours, *part), *references, strict=True):
            assert_close(result, expected, exact, str(case))

    def backward(function):
        graph: list[torch.Tensor] = []  # made by the first call, so that a peer that raises is left out

        def call():
            graph.extend([function(q, k, v)] if not graph else [])
            return torch.autograd.grad(graph[0], (q, k, v), dout, retain_graph=True)

        return call

    def forward(function):
        def call():
            with torch.no_grad():
                return function(q, k, v)

        return call

    yield Contest("attention forward", str(case), forward(ours), {n: forward(p) for n, p in peers.items()}, check,
                  2 * product, moved)  # fmt: skip
    yield Contest("attention backward", str(case), backward(ours), {n: backward(p) for n, p in peers.items()}, check,
                  5 * product, 2 * moved + size * q.numel(), eager=["ours", *peers])  # fmt: skip


def ring_step(case: cases.AttentionCase, batch: int, device, dtype) -> Contest:
    """Return a step inside a ring: the kernel continues the state of the earlier keys, or the merge follows it."""
    half = case.sequence // 2
    q = torch.randn(batch, case.heads, half, case.head_dim, device=device).to(dtype)
    k, v = (torch.randn(batch, case.kv_heads, half, case.head_dim, device=device).to(dtype) for _ in range(2))
    late, early, all_seen = Positions(half, half), Positions(0, half), Rules()
    state = attention_forward(q, k, v, all_seen, query_positions=late, key_positions=late, out_dtype=torch.float32)
    options: dict[str, Any] = {"query_positions": late, "key_positions": early, "out_dtype": torch.float32}

    def inside():
        return attention_forward(q, k, v, all_seen, previous=state, **options)

    def outside():
        return merge_attention(*state, *attention_forward(q, k, v, all_seen, **options))

    def check():
        for ours, theirs in zip(inside(), outside(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

    product = 2.0 * batch * case.heads * half**2 * case.head_dim
    moved = dtype.itemsize * (q.numel() + 2 * k.numel()) + 2 * 4 * q.numel()
    return Contest("ring step", str(case), inside, {"merge outside": outside}, check, 2 * product, moved)


def _library(backend, causal, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def _flex(case: cases.AttentionCase, device):
    block_mask = None
    if case.causal:
        block_mask = create_block_mask(
            lambda _batch, _head, query, key: query >= key, None, None, case.sequence, case.sequence, device=device
        )
    torch._dynamo.reset()  # it stops compiling a function for the ninth shape, and then stores all scores
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=block_mask, enable_gqa=case.heads != case.kv_heads)
