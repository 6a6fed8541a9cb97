"""Prints which launches of known models the compiled variants of an architecture do not serve: run by test_served.py
where kernels are not interpreted. Nothing is compiled: launches are recorded, and their keys compared."""

import itertools
import sys
from collections.abc import Iterator

import torch

from weft import _C
from weft.bench.grouped_matmul import MIXTURES
from weft.kernels import attention, dispatch, launch, signal, variants
from weft.kernels.activation import gated_backward, gated_forward
from weft.kernels.all_gather_matmul import all_gather_matmul
from weft.kernels.all_reduce import matmul_all_reduce
from weft.kernels.attention_rules import Positions, Rules
from weft.kernels.bucket import PackedBucket, Statistics, reduce
from weft.kernels.chunks import Rows
from weft.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_losses, cross_entropy_statistics
from weft.kernels.grouped_matmul import grouped_matmul, grouped_wgrad
from weft.kernels.matmul import Arrivals, matmul
from weft.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from weft.sharding.sizes import split_sizes
from weft.testing.cases import MODELS, ModelShape

TOKENS = (1, 17, 1000, 4096, 16384)
WORLDS = (1, 2, 3, 8)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def layers(model: ModelShape, world: int) -> Iterator[tuple[str, int, int, str | None]]:
    """The smallest and the largest shard of each layer: name, outputs, inputs, activation ("gated": two products)."""
    for place in {0, world - 1}:
        inner = split_sizes(model.intermediate, world)[place]
        kv_heads = split_sizes(model.kv_heads, world)[place]
        heads = kv_heads * (model.heads // model.kv_heads)
        yield "qkv", (heads + 2 * kv_heads) * model.head_dim, model.hidden, None
        yield "attention out", model.hidden, heads * model.head_dim, None
        yield "rise", inner, model.hidden, "gated" if model.gated else "gelu_tanh"
        yield "fall", model.hidden, inner, None
        yield "head", split_sizes(model.vocabulary, world)[place], model.hidden, None


def linear(model: ModelShape, world: int, tokens: int) -> None:
    for name, n, k, activation in layers(model, world):
        x, w, dy, main_grad = empty(tokens, k), empty(n, k), empty(tokens, n), empty(n, k, dtype=torch.float32)
        bias = None if model.gated or name == "head" else empty(n)
        if activation == "gated":
            _, z = matmul(x, w.t(), b_up=w.t(), activation="silu", keep_z=True)
            gated_forward(z, "silu")
            gated_backward(dy, z, "silu")
        else:
            matmul(x, w.t(), bias=bias, activation=activation, keep_z=activation is not None)
        matmul(dy, w)
        matmul(dy.t(), x)
        matmul(dy.t(), x, addend=main_grad, out=main_grad)


def communicating(model: ModelShape, world: int, tokens: int) -> None:
    if not 1 < world <= tokens:
        return
    peers = signal.unlaunched(0, world)
    for name, n, k, activation in layers(model, world):
        x, w, dy = empty(tokens, k), empty(n, k), empty(tokens, n)
        incoming, outgoing = (Rows.of((tokens, width), 0, split_sizes(tokens, world)) for width in (k, n))
        if name in ("qkv", "rise") and activation != "gated":
            arrivals = Arrivals(peers, incoming, empty(len(incoming.chunks), dtype=torch.int32))
            bias = empty(n) if activation else None
            all_gather_matmul(x, w.t(), arrivals, bias=bias, activation=activation, keep_z=bool(activation))
            matmul_reduce_scatter(dy, w, peers, incoming)
        if name in ("attention out", "fall"):
            matmul_reduce_scatter(x, w.t(), peers, outgoing)
            matmul_all_reduce(x, w.t(), peers, outgoing)


def attention_chunks(model: ModelShape, world: int, tokens: int) -> None:
    """A ring's steps, over an early and a late part of a sequence; batch first, heads or sequence next."""
    rules, early = Rules(right=0), tokens - tokens // 2
    positions = Positions(0, early, tokens, tokens - early)
    for batch, packed, heads_first in itertools.product((1, 3), (False, True), (False, True)):

        def tensor(heads, dtype=torch.bfloat16, batch=batch, heads_first=heads_first):
            if heads_first:
                return empty(batch, heads, tokens, model.head_dim, dtype=dtype)
            return empty(batch, tokens, heads, model.head_dim, dtype=dtype).transpose(1, 2)

        kv_heads = split_sizes(model.kv_heads, world)[0]
        heads = kv_heads * (model.heads // model.kv_heads)
        q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
        lse = empty(batch, heads, tokens, dtype=torch.float32)
        options = {"query_positions": positions, "key_positions": positions}
        if packed:
            ids = empty(1, tokens, dtype=torch.int64).expand(batch, tokens)
            options |= {"query_documents": ids, "key_documents": ids}
        for state, out_dtype in itertools.product((None, (tensor(heads, torch.float32), lse)), (q.dtype, lse.dtype)):
            attention.attention_forward(q, k, v, rules, previous=state, out_dtype=out_dtype, **options)
        attention.attention_delta(q, q)
        attention.attention_backward(q, k, v, q, lse, lse, rules, **options)
        dq, dk, dv = (tensor(t.size(1), torch.float32) for t in (q, k, v))
        attention.attention_backward(q, k, v, q, lse, lse, rules, dq=dq, dk=dk, dv=dv, **options)


def loss(model: ModelShape, world: int, tokens: int) -> None:
    target, of_rows = empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.float32)
    for columns, smoothing in itertools.product(split_sizes(model.vocabulary, world), (0.0, 0.1)):
        logits = empty(tokens, columns)
        common = {"offset": columns, "ignore_index": -100}
        cross_entropy_statistics(logits, target, smoothing=smoothing > 0, **common)
        of_ranks = empty(world, 4, tokens, dtype=torch.float32)
        options = {"vocabulary": 2 * columns, "ignore_index": -100, "smoothing": smoothing}
        for mean in (True, False):
            cross_entropy_losses(of_ranks, target, mean=mean, **options)
        cross_entropy_gradient(
            logits, target, of_rows, of_rows, of_rows, vocabulary=2 * columns, smoothing=smoothing, **common
        )


def bucket(model: ModelShape, world: int, tokens: int) -> None:
    statistics = Statistics("meta")
    for dtype, wire in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        tensors = [empty(*shape, dtype=dtype) for shape in ((3,), (64, 33), (tokens, model.hidden))]
        places = PackedBucket(tensors)
        flat = places.empty(wire)
        for asked in (None, statistics):
            places.pack(tensors, flat, statistics=asked)
            places.unpack(flat, tensors, statistics=asked)
            reduce([empty(tokens, dtype=wire)] * world, empty(tokens, dtype=wire), 0.5, asked)
        reduce([flat] * world, places.empty(dtype), 0.5, statistics)
        reduce([flat], None, statistics=statistics)


def experts(mixture: tuple[int, int, int, int], world: int, tokens: int) -> None:
    """The experts of a rank, with as many rows as even loads give them; and their intermediate dimension shared.

    A part of it that 16 does not divide, beside a hidden size that it does, is left to the compiler.
    """
    number, chosen, hidden, inner = mixture
    for count, width in {(number // world, inner), (number, inner // world // 16 * 16)}:
        rows = max(1, tokens * chosen * count // number)
        offsets = empty(count + 1, dtype=torch.int32)
        x, up, down = empty(rows, hidden), empty(count, 2 * width, hidden), empty(count, hidden, width)
        y, dz = empty(rows, width), empty(rows, 2 * width)
        gate_t, up_t = up.transpose(1, 2).chunk(2, 2)
        grouped_matmul(x, gate_t, offsets, b_up=up_t, activation="silu", keep_z=True)
        grouped_matmul(y, down.transpose(1, 2), offsets)
        grouped_matmul(x, down, offsets)
        grouped_matmul(dz, up, offsets)
        for gradient, operand in ((dz, x), (x, y)):
            grouped_wgrad(gradient, operand, offsets)
            main_grad = empty(count, gradient.size(1), operand.size(1), dtype=torch.float32)
            grouped_wgrad(gradient, operand, offsets, main_grad=main_grad)


def main(architecture: str) -> None:
    launch.use(_C.launch)

    def key(recorded: launch.Launch) -> tuple[str, bytes]:
        constants = recorded.key_constants
        kernel = recorded.kernel
        return dispatch.full_name(kernel), dispatch.dispatcher(kernel).key(recorded.arguments, constants)

    served = {key(recorded) for op in variants.OPS for recorded in variants.record(op, architecture)}
    made = missed = 0
    of_models = (linear, communicating, attention_chunks, loss, bucket)
    sizes = [(name, model, of_models) for name, model in MODELS.items()]
    sizes += [(name, mixture, (experts,)) for name, mixture in MIXTURES.items()]
    for (name, size, all_calls), world, tokens in itertools.product(sizes, WORLDS, TOKENS):
        for calls in all_calls:
            with launch.recording(architecture) as launches:
                calls(size, world, tokens)
            made += len(launches)
            for recorded in launches:
                if key(recorded) not in served:
                    missed += 1
                    print(f"{name}, {world} ranks, {tokens} tokens: {recorded.kernel.__name__} ({recorded})")
    print(f"{made} launches, {missed} not served")


if __name__ == "__main__":
    main(sys.argv[1])
