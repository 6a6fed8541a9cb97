"""weft bench attention_chunk: attention on a GPU against PyTorch's fastest, forward and backward.

It also measures a step of a ring with its merge inside the kernel against the merge outside.
"""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from weft.bench import attention_peers
from weft.bench.device_time import LIMIT, Contest, measure
from weft.bench.table import Row
from weft.kernels import attention_tiles, launch
from weft.kernels.attention import attention_forward
from weft.kernels.attention_rules import Positions, Rules
from weft.ops.attention import attention
from weft.ops.attention_chunk import merge_attention
from weft.testing import cases
from weft.testing.tolerance import assert_close

__all__ = ["LIMIT", "add_arguments", "contests", "run"]

_TOKENS = 32768  # batch times sequence, so that every length fills the device
_CHECKED = 2048  # positions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, choices=(64, 128), help="both by default")
    parser.add_argument("--tiles", action="store_true", help="forward alone, by every tile of our kernel")
    # compiled: with torch.compile's FlexAttention, which takes half a minute a case.
    parser.set_defaults(attentions=cases.ATTENTIONS, compiled=True)


def run(options) -> list[Row]:
    chosen = [case for case in options.attentions if options.head_dim in (None, case.head_dim)]
    return measure(contests(chosen, options.compiled, options.tiles), options.rounds)


def contests(attentions: Iterable[cases.AttentionCase], compiled: bool, tiles: bool) -> Iterator[Contest]:
    for case in attentions:
        batch = max(1, _TOKENS // case.sequence)
        given = case, batch, torch.device("cuda"), torch.bfloat16
        if tiles:
            yield by_tiles(*given)
            continue
        yield from both_ways(*given, compiled)
        if not case.causal:
            yield ring_step(*given)


def by_tiles(case: cases.AttentionCase, batch: int, device, dtype) -> Contest:
    """Return forward by each tile that exists, in turn at one state of the clocks, beside the libraries."""
    heads = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (torch.randn(batch, h, case.sequence, case.head_dim, device=device).to(dtype) for h in heads)
    rules = Rules(right=0 if case.causal else None)
    tiles = attention_tiles.listed("forward", launch.architecture_of(device), case.head_dim)
    ours = {f"ours {tile}": partial(attention_forward, q, k, v, rules, config=tile) for tile in tiles}
    peers = {name: partial(peer, q, k, v) for name, peer in attention_peers.functions(case.causal).items()}
    chosen = partial(attention_forward, q, k, v, rules)

    def check():
        expected = chosen()[0].float()
        for name, call in ours.items():
            torch.testing.assert_close(call()[0].float(), expected, rtol=2e-2, atol=2e-2, msg=name)

    pairs = case.sequence**2 * (0.5 if case.causal else 1.0)
    operations = 4.0 * batch * case.heads * pairs * case.head_dim
    moved = dtype.itemsize * (2 * q.numel() + 2 * k.numel())
    return Contest("attention forward, tiles", str(case), chosen, {**ours, **peers}, check, operations, moved)


def both_ways(case: cases.AttentionCase, batch: int, device, dtype, compiled: bool = True) -> Iterator[Contest]:
    """Yield forward, and backward alone on a kept graph: beside peers that add in any order, and in a fixed one."""
    heads = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (
        torch.randn(batch, h, case.sequence, case.head_dim, device=device).to(dtype).requires_grad_() for h in heads
    )
    dout = torch.randn_like(q)
    peers = attention_peers.functions(case.causal)
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
        plain = partial(attention_peers.by_torch, SDPBackend.MATH, case.causal)
        references = with_gradients(plain, *part), with_gradients(plain, *(t.double() for t in part))
        for result, expected, exact in zip(with_gradients(ours, *part), *references, strict=True):
            assert_close(result, expected, exact, str(case))

    def forward(function):
        def call():
            with torch.no_grad():
                return function(q, k, v)

        return call

    operands = q, k, v, dout
    backwards: dict[str, attention_peers.Call] = {
        name: attention_peers.backward_of(peer, *operands) for name, peer in peers.items()
    }
    backwards |= attention_peers.ordered_backwards(case.causal, *operands)
    yield Contest("attention forward", str(case), forward(ours), {n: forward(p) for n, p in peers.items()}, check,
                  2 * product, moved)  # fmt: skip
    yield Contest("attention backward", str(case), attention_peers.backward_of(ours, *operands), backwards, check,
                  5 * product, 2 * moved + size * q.numel(), eager=["ours", *backwards])  # fmt: skip


def ring_step(case: cases.AttentionCase, batch: int, device, dtype) -> Contest:
    """Return a step inside a ring: the kernel continues the state of the earlier keys, or a merge follows a peer's."""
    half = case.sequence // 2
    q = torch.randn(batch, case.heads, half, case.head_dim, device=device).to(dtype)
    k, v = (torch.randn(batch, case.kv_heads, half, case.head_dim, device=device).to(dtype) for _ in range(2))
    late, early, all_seen = Positions(half, half), Positions(0, half), Rules()
    state = attention_forward(q, k, v, all_seen, query_positions=late, key_positions=late, out_dtype=torch.float32)
    options: dict[str, Any] = {"query_positions": late, "key_positions": early, "out_dtype": torch.float32}

    def inside():
        return attention_forward(q, k, v, all_seen, previous=state, **options)

    def outside(function):
        return lambda: merge_attention(*state, *function(q, k, v))

    def check():
        for ours, theirs in zip(inside(), outside(apart)(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

    apart = partial(attention_forward, rules=all_seen, **options)
    peers = {f"{name} and a merge": outside(peer) for name, peer in attention_peers.with_lse().items()}
    peers["ours and a merge"] = outside(apart)

    product = 2.0 * batch * case.heads * half**2 * case.head_dim
    moved = dtype.itemsize * (q.numel() + 2 * k.numel()) + 2 * 4 * q.numel()
    return Contest("ring step", str(case), inside, peers, check, 2 * product, moved)


def _flex(case: cases.AttentionCase, device):
    block_mask = None
    if case.causal:
        block_mask = create_block_mask(
            lambda _batch, _head, query, key: query >= key, None, None, case.sequence, case.sequence, device=device
        )
    torch._dynamo.reset()  # it stops compiling a function for the ninth shape, and then stores all scores
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=block_mask, enable_gqa=case.heads != case.kv_heads)
