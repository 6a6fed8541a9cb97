"""Attention over a shared sequence is the unsplit attention: every method, layout, mask, ratio of heads and length."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_reference import attention

import weft
from weft.kernels import launch
from weft.kernels.attention_rules import Rules
from weft.ops import attention_chunk, head_groups, kernel_choice
from weft.ops.context_attention import choose
from weft.ops.sequence_layout import SequenceLayout
from weft.testing.ranks import run_ranks

MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=7),
    "documents": dict(causal=True, documents=True),
    "documents, full": dict(documents=True),
    "softcap, sinks": dict(softcap=3.0, sinks=True),
    "dropout": dict(causal=True, dropout=0.2, seed=3),
    "all": dict(causal=True, window=11, documents=True, softcap=5.0, sinks=True, dropout=0.1, seed=7, scale=0.4),
}
METHODS = ["ring", "all_gather", "ulysses", "auto"]


def draw(length, heads, kv_heads, head_dim=8, value_dim=8, keys=None, dtype=torch.float32):
    """q, k, v, dout, whole."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, length, head_dim), (kv_heads, keys or length, head_dim), (kv_heads, keys or length, value_dim)]
    return [torch.randn(2, *s, generator=generator).to(dtype) for s in (*shapes, (heads, length, value_dim))]


def under_autocast(rank, method):
    q, k, v = (x[:, :, :6].clone() for x in draw(13, 4, 2)[:3])
    options = {"causal": True, "softcap": 3.0, "method": method}  # whose products autocast would cast
    with torch.autocast("cpu", torch.bfloat16):
        found = weft.context_attention(q, k, v, **options)
    expected = weft.context_attention(*(x.bfloat16() for x in (q, k, v)), **options)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS[:3])
def test_autocast_casts_as_for_torchs_attention_and_nothing_inside(method):
    run_ranks(under_autocast, 2, method)


def documents_of(length):
    return torch.stack([torch.arange(length) * 4 // length, torch.arange(length) * 3 // length])


def unsplit(whole, mask):
    """out, dq, dk, dv (and dsinks) in fp64."""
    q, k, v, dout = (t.double().requires_grad_() for t in whole)
    rules = Rules(
        left=mask["window"] - 1 if "window" in mask else None,
        right=0 if mask.get("causal") else None,
        scale=mask.get("scale"),
        softcap=mask.get("softcap"),
        dropout=mask.get("dropout", 0.0),
        seed=mask.get("seed", 0),
    )
    documents = documents_of(q.size(2)) if mask.get("documents") else None
    sinks = torch.linspace(-1, 1, q.size(1)).double().requires_grad_() if mask.get("sinks") else None
    out, _ = attention(q, k, v, rules, query_documents=documents, key_documents=documents, sinks=sinks)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad] + ([sinks.grad] if mask.get("sinks") else [])


def split(whole, mask, method, layout, group=None):
    """The same, each rank with its part; gathered again."""
    q, k, v, dout = (weft.shard_sequence(t, dim=2, layout=layout) for t in whole)
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    options = {name: value for name, value in mask.items() if name not in ("documents", "sinks")}
    if mask.get("documents"):
        options["document_ids"] = weft.shard_sequence(documents_of(whole[0].size(2)), dim=1, layout=layout)
    sinks = torch.linspace(-1, 1, q.size(1)).requires_grad_() if mask.get("sinks") else None
    out = weft.context_attention(q, k, v, sinks=sinks, method=method, layout=layout, group=group, **options)
    out.backward(dout)
    parts = [out.detach(), q.grad, k.grad, v.grad]
    return [weft.unshard_sequence(t, dim=2, layout=layout) for t in parts] + ([sinks.grad] if sinks is not None else [])


def relative_error(result, exact):
    return ((result.double() - exact).norm() / exact.norm().clamp(min=1)).item()


def check(rank, methods, layouts, masks, shapes, dtype, tolerance):
    for shape, name in itertools.product(shapes, masks):
        whole = draw(*shape, dtype=dtype)
        exact = unsplit(whole, MASKS[name])
        for method, layout in itertools.product(methods, layouts):
            for what, result, right in zip(
                ["out", "dq", "dk", "dv", "dsinks"], split(whole, MASKS[name], method, layout), exact, strict=False
            ):
                error = relative_error(result, right)
                assert error < tolerance, (method, layout, name, shape, what, error)


@pytest.mark.parametrize(
    "world", [1, 2, *(pytest.param(world, marks=pytest.mark.slow("pytorch_ext/ops")) for world in (3, 4, 5))]
)
def test_every_method_gives_the_unsplit_attention(world):
    """6:2, 4:4 and 5:1 heads; lengths that divide by nothing; values of another width."""
    shapes = [(37, 6, 2), (64, 4, 4, 8, 4), (29, 5, 1)]
    run_ranks(check, world, METHODS, ["zigzag", "contiguous"], MASKS, shapes, torch.float32, 2e-6, timeout_s=200)


@pytest.mark.parametrize("world", [3, 5])
def test_a_sequence_may_be_shorter_than_the_ranks_are_many(world):
    run_ranks(
        check, world, METHODS, ["zigzag", "contiguous"], ["full", "causal"], [(1, 4, 2), (4, 2, 1)], torch.float32, 2e-6
    )


def by_the_kernel(rank):
    with kernel_choice.prefer("kernel"):
        check(rank, METHODS[:3], ["zigzag"], ["causal"], [(21, 2, 1)], torch.float32, 2e-6)
        check(rank, ["ring"], ["zigzag"], ["all"], [(21, 2, 1)], torch.float32, 2e-6)


@pytest.mark.skipif(not launch.INTERPRETED, reason="the ranks' tensors are on the CPU, where kernels are interpreted")
def test_every_method_is_the_same_by_our_kernel():
    """The code that a GPU runs, but for the device: the chunks are the kernel's."""
    run_ranks(by_the_kernel, 2, timeout_s=200)


@pytest.mark.kernel
def test_a_ring_of_the_kernels_chunks_is_the_unsplit_attention(device):
    """Its ranks are virtual: one after the other, on one device."""
    whole = [t.to(device) for t in draw(53, 2, 1, 16, 16, dtype=torch.bfloat16)]
    with kernel_choice.prefer("kernel"):
        alone = in_a_ring(1, whole, torch.float32)
        for error, unsplit_error in zip(in_a_ring(3, whole, torch.float32), alone, strict=True):
            assert error < 1.5 * unsplit_error < 0.02, (error, unsplit_error)


def against_sdpa(rank, dtype):
    whole = draw(301, 6, 2, 16, 16, dtype=dtype)
    exact = unsplit(whole, MASKS["causal"])
    q, k, v = (t.clone().requires_grad_() for t in whole[:3])
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    plain.backward(whole[3])
    peers = [plain.detach(), q.grad, k.grad, v.grad]
    for method in METHODS:
        for result, peer, right in zip(split(whole, MASKS["causal"], method, "zigzag"), peers, exact, strict=True):
            assert relative_error(result, right) <= 1.5 * relative_error(peer, right), method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_splitting_costs_no_accuracy(dtype):
    run_ranks(against_sdpa, 3, dtype)


def in_a_ring(world, whole, merge):
    """Causal, all of a ring's ranks in this process, their chunks merged by `merge`; relative errors of out and dk."""
    q = whole[0]
    layout = SequenceLayout(q.size(2), world)
    exact = unsplit(whole, MASKS["causal"])
    rules = Rules(right=0)
    parts = [[layout.pick(t, 2, rank) for t in whole] for rank in range(world)]
    positions = [layout.among([rank]).positions for rank in range(world)]
    outs, dks = [], [torch.zeros_like(part[1], dtype=merge) for part in parts]
    for rank, (mine, _, _, dmine) in enumerate(parts):
        state = None
        for step in range(world):
            source = (rank - step) % world
            chunk = attention_chunk.AttentionChunk(rules, positions[rank], positions[source])
            state = attention_chunk.forward(mine, *parts[source][1:3], chunk, state, last=False)
            state = state[0].to(merge).float(), state[1]
        out = state[0].to(q.dtype)
        outs.append(out)
        delta = attention_chunk.row_sums(out, dmine)
        for step in range(world):
            source = (rank - step) % world
            chunk = attention_chunk.AttentionChunk(rules, positions[rank], positions[source])
            sums = [torch.zeros_like(t, dtype=torch.float32) for t in (mine, *parts[source][1:3])]
            attention_chunk.backward([mine, dmine, out, state[1], delta], parts[source][1:3], chunk, sums)
            dks[source] += sums[1].to(merge)
    results = layout.join(outs, 2), layout.join([dk.to(q.dtype) for dk in dks], 2)
    return [relative_error(result, right) for result, right in zip(results, (exact[0], exact[2]), strict=True)]


@pytest.mark.slow("pytorch_ext/ops")
def test_accuracy_does_not_depend_on_the_size_of_the_ring():
    """bf16, causal; the state in fp32. Merging in bf16 would show."""
    whole = draw(1024, 1, 1, 64, 64, dtype=torch.bfloat16)
    alone = in_a_ring(1, whole, torch.float32)
    for world in (4, 16):
        out, dk = in_a_ring(world, whole, torch.float32)
        assert out < 1.05 * alone[0] and dk < 1.5 * alone[1], (world, out, dk, alone)
    out, dk = in_a_ring(16, whole, torch.bfloat16)
    assert out > 1.2 * alone[0] and dk > 1.5 * alone[1], "a merge in bf16 would not be found"


def in_groups_of_heads(whole, masks, methods):
    """All heads at once, and one KV head at a time."""
    for name, method in itertools.product(masks, methods):
        at_once = split(whole, MASKS[name], method, "zigzag")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(head_groups.AT_ONCE_BYTES, "cpu", 1)
            yield name, method, split(whole, MASKS[name], method, "zigzag"), at_once


def close_in_groups(rank):
    whole = draw(37, 6, 3)
    for name, method, results, at_once in in_groups_of_heads(whole, ["causal", "window", "all"], METHODS[:3]):
        for result, right in zip(results, at_once, strict=True):
            assert relative_error(result, right.double()) < 2e-6, (name, method)


@pytest.mark.parametrize("world", [2, 3])
def test_it_does_not_matter_how_many_heads_go_at_a_time(world):
    """But for rounding: the library multiplies several heads in another way than one."""
    run_ranks(close_in_groups, world)


def same_in_groups(rank):
    with kernel_choice.prefer("kernel"):
        for *_, results, at_once in in_groups_of_heads(draw(13, 2, 2), ["all"], ["ring"]):
            assert all(torch.equal(result, right) for result, right in zip(results, at_once, strict=True))


@pytest.mark.skipif(not launch.INTERPRETED, reason="the ranks' tensors are on the CPU, where kernels are interpreted")
def test_our_kernels_bits_do_not_depend_on_how_many_heads_go_at_a_time():
    run_ranks(same_in_groups, 2, timeout_s=120)


def same_bits(rank, method):
    whole = draw(50, 4, 2, dtype=torch.bfloat16)
    results = []
    for seed in range(3):
        dist.group.WORLD.engine.group.inject_faults(seed=seed * 10 + rank, longest_delay_us=3000)
        results.append(split(whole, MASKS["causal"], method, "zigzag"))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_the_bits_do_not_depend_on_who_comes_first(method):
    run_ranks(same_bits, 3, method)


def on_a_mesh(rank, shape):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "heads"))
    for name in ("full", "causal", "documents", "all"):
        whole = draw(41, 6, 2)
        for layout in ("zigzag", "contiguous"):
            found = split(whole, MASKS[name], "auto", layout, group=mesh)
            for what, result, right in zip("oqkvs", found, unsplit(whole, MASKS[name]), strict=False):
                if what == "s":  # each ring has the same heads' sinks
                    continue
                assert relative_error(result, right) < 2e-6, (name, layout, what)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (3, 1), (2, 1)])
def test_heads_inside_and_the_ring_outside(shape):
    run_ranks(on_a_mesh, shape[0] * shape[1], shape, timeout_s=120)


def crosses(rank):
    whole = draw(23, 4, 2, keys=37)
    exact = unsplit(whole, MASKS["full"])
    for method in METHODS:
        for result, right in zip(split(whole, MASKS["full"], method, "zigzag"), exact, strict=True):
            assert relative_error(result, right) < 2e-6


def test_queries_and_keys_may_be_of_different_sequences():
    run_ranks(crosses, 3)


def counts_messages(rank):
    engine, sent = dist.group.WORLD.engine, []
    send = engine.send
    engine.send = lambda x, to, tag: sent.append(tuple(x.shape)) or send(x, to, tag)
    q, k, v, _ = (weft.shard_sequence(t, dim=2, layout="contiguous") for t in draw(40, 2, 1))
    for window, ranks_on in ((1, 0), (2, 1), (11, 1), (12, 2), (None, 3)):  # each rank has 10 positions
        sent.clear()
        weft.context_attention(q, k, v, causal=True, window=window, method="ring", layout="contiguous")
        chunks = min(rank + 1, ranks_on) if rank < 3 else 0  # behind the last rank nobody needs any
        assert len(sent) == chunks, (window, sent)  # keys and values together


def test_chunks_out_of_the_window_do_not_travel():
    run_ranks(counts_messages, 4)


def test_causal_work_is_the_same_on_every_rank():
    for world in (2, 3, 4, 8):
        for length in (4096, 5001):
            layout = SequenceLayout(length, world)
            runs = [layout.among([rank]).runs for rank in range(world)]
            work = [sum(start + i + 1 for start, count in of_rank for i in range(count)) for of_rank in runs]
            assert max(work) / (sum(work) / world) < 1.02, (world, length)


def refuses(rank):
    q, k, v, _ = (weft.shard_sequence(t, dim=2) for t in draw(16, 4, 2))
    wide = torch.randn(2, 4, 9, 8)

    def refused(error, text, *arguments, **options):
        with pytest.raises(error, match=text):
            weft.context_attention(*(arguments or (q, k, v)), **options)

    refused(ValueError, "window=4 counts back from the query: at least 1, and with causal=True", window=4)
    refused(ValueError, "window=0", window=0, causal=True)
    refused(ValueError, "method='rings' is not one of", method="rings")
    refused(ValueError, "layout='zagzig' is not one of", layout="zagzig")
    refused(ValueError, "4 query heads are not a multiple of 3 KV heads", q, *[torch.randn(2, 3, 8, 8)] * 2)
    refused(ValueError, "do not go together", q, k, v[:, :1])
    refused(TypeError, "q is torch.float32 on cpu, k is torch.float64", q, k.double(), v.double())
    refused(TypeError, "torch.float64 is not one of", q.double(), k.double(), v.double())
    refused(ValueError, "softcap=-1.0 must be positive", softcap=-1.0)
    refused(ValueError, "dropout=1.0 must be", dropout=1.0)
    refused(ValueError, "sinks has shape .3,.; it must be .heads., .4.", sinks=torch.zeros(3))
    refused(ValueError, "document_ids torch.float32", document_ids=torch.zeros(8))
    refused(
        ValueError,
        "of one sequence, got 8",
        q,
        *[torch.randn(2, 2, 9, 8)] * 2,
        document_ids=torch.zeros(8).long(),
    )
    refused(ValueError, "document_ids decrease", document_ids=torch.full((8,), 1 - rank), layout="contiguous")
    refused(
        ValueError, r"the ranks bring \[8, 9\] queries; zigzag shards of 17 are \[9, 8\]", *[wide[:, :, : 8 + rank]] * 3
    )
    refused(ValueError, "the ranks bring .4, 2. as heads", q[:, : 4 - 2 * rank], k, v)
    refused(ValueError, "do not agree in type and options", causal=bool(rank))
    refused(ValueError, "do not agree in type and options", method=["ring", "ulysses"][rank])
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "heads"))
    refused(ValueError, "method='ring' with a mesh of two dimensions", method="ring", group=mesh)
    out = weft.context_attention(q, k, v, causal=True)
    assert out.shape == q.shape, "nothing is left behind by what was refused"


def test_what_cannot_be_done_is_refused_by_name_on_every_rank():
    run_ranks(refuses, 2)


def test_auto_moves_the_fewest_bytes_and_says_so():
    from weft.ops.context_attention import AttentionCall

    def call(world, heads, kv_heads, length=4096):
        layout = SequenceLayout(length, world)
        return AttentionCall(layout, layout, 1, heads, kv_heads, 64, 64, 2, world, 1)

    causal, windowed = Rules(right=0), Rules(left=63, right=0)
    assert choose(call(8, 32, 32), causal, False).method == "ulysses"
    assert choose(call(2, 32, 2), causal, False).method == "ring", "few KV heads are cheaper to pass on"
    assert choose(call(2, 32, 2), causal, True).method == "all_gather", "packed documents do not go round a ring"
    assert choose(call(8, 4, 4), causal, False).method == "ring", "fewer heads than ranks"
    message = str(choose(call(4, 32, 8), windowed, False))
    assert message.startswith("ring: MiB that a rank sends forward: ring ") or "ulysses" in message
    assert choose(call(1, 4, 4), causal, False).reason == "there is one rank"
    assert choose(call(4, 4, 4), causal, False, "ulysses").reason == 'method="ulysses"'


def test_merging_nothing_with_nothing_is_nothing():
    nothing = torch.zeros(3, 4), torch.full((3,), -torch.inf)
    some = torch.randn(3, 4), torch.randn(3)
    out, lse = weft.merge_attention(*nothing, *nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()
    for pair in ((nothing, some), (some, nothing)):
        out, lse = weft.merge_attention(*pair[0], *pair[1])
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])
    other = torch.randn(3, 4).double(), torch.randn(3).double()
    out, lse = weft.merge_attention(*some, *other)
    weights = torch.softmax(torch.stack([some[1].double(), other[1]]), 0).unsqueeze(-1)
    torch.testing.assert_close(
        out.double(), weights[0] * some[0].double() + weights[1] * other[0], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(lse.double(), torch.logaddexp(some[1].double(), other[1]), rtol=1e-6, atol=1e-6)


def test_a_merged_row_has_the_same_bits_whatever_rows_are_beside_it():
    """torch.logaddexp has other bits in a vector than behind the last whole one."""
    generator = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(301, 4, generator=generator), torch.randn(301, generator=generator) * 3) for _ in range(2))
    together = weft.merge_attention(*a, *b)
    for row in range(301):
        alone = weft.merge_attention(*(part[row : row + 1] for part in (*a, *b)))
        assert all(torch.equal(one[0], whole[row]) for one, whole in zip(alone, together, strict=True)), row


def round_trip(rank):
    for layout in ("zigzag", "contiguous"):
        for length in (1, 5, 12, 13):
            x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
            part = weft.shard_sequence(x, dim=1, layout=layout)
            positions = weft.shard_sequence(torch.arange(length), dim=0, layout=layout)
            assert torch.equal(part, x[:, positions])
            whole = weft.unshard_sequence(part, dim=1, layout=layout)
            assert torch.equal(whole, x)
            dy = torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            whole.backward(dy)
            assert torch.equal(x.grad, dy)
    with pytest.raises(ValueError, match=r"the ranks have \[3, 3, 5\] positions; zigzag shards of 11 have"):
        weft.unshard_sequence(torch.zeros(5 if rank == 2 else 3), dim=0)


def test_what_is_sharded_comes_back():
    run_ranks(round_trip, 3)
