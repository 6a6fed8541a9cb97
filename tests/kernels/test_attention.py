"""The attention kernels against plain attention in fp64: chunks, positions, masks, states, gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_reference import attention, expand_positions

from weft.kernels import launch
from weft.kernels.attention import attention_backward, attention_delta, attention_forward
from weft.kernels.attention_rules import Positions, Rules
from weft.kernels.attention_tiles import listed
from weft.kernels.config import AttentionConfig
from weft.ops.dropout import philox
from weft.testing.tolerance import assert_close, error_in_tolerances

pytestmark = pytest.mark.kernel

DTYPES = [*([torch.float32] if launch.INTERPRETED else []), torch.bfloat16, torch.float16]
DEFAULT = DTYPES[0]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def chunk(device, *, batch=1, heads=2, kv_heads=1, queries=37, keys=53, head_dim=16, value_dim=None, dtype=DEFAULT):
    """q, k, v and the gradient of out."""
    value_dim = value_dim or head_dim
    shapes = [(batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim), (batch, kv_heads, keys, value_dim),
              (batch, heads, queries, value_dim)]  # fmt: skip
    return [draw(device, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def by_kernel(q, k, v, dout, rules, **places):
    """out, lse and the three gradients."""
    out, lse = attention_forward(q, k, v, rules, **places)
    delta = attention_delta(out, dout)
    return out, lse, *attention_backward(q, k, v, dout, lse, delta, rules, **places)


def by_plain(q, k, v, dout, rules, dtype, **places):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, rules, **places)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


FREE = Rules()
NAMES = ("out", "lse", "dq", "dk", "dv")


def check(tensors, rules=FREE, **places):
    """All five against fp64, each as close as the plain attention in its own type comes."""
    dtype = tensors[0].dtype
    references = by_plain(*tensors, rules, dtype, **places), by_plain(*tensors, rules, torch.float64, **places)
    for name, result, plain, exact in zip(NAMES, by_kernel(*tensors, rules, **places), *references, strict=True):
        seen = exact.isfinite()
        assert torch.equal(result.isfinite(), seen), f"{name}: {rules}"
        assert torch.equal(result[~seen].double(), exact[~seen]), f"{name}: {rules}"
        error = error_in_tolerances(result.where(seen, 0), plain.where(seen, 0), exact.where(seen, 0))
        # Backward computes P again, from scores and a log-sum-exp that is rounded once more than softmax's own sum.
        assert error <= (2 if name.startswith("d") else 1), f"{name}: {rules}: off by {error} tolerances"


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (80, 80), (192, 128)])
def test_forward_and_gradients_at_every_kind_of_head(device, head_dim, value_dim, dtype):
    tensors = chunk(device, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    check(tensors, Rules(right=0), query_positions=Positions(16, 37))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (5, 1), (3, 3)])
def test_grouped_and_multi_query_heads(device, heads, kv_heads):
    check(chunk(device, batch=2, heads=heads, kv_heads=kv_heads, queries=19, keys=23))


@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (1, 67), (33, 2), (16, 32), (17, 33), (65, 67), (0, 5), (5, 0)])
def test_chunks_of_any_length(device, queries, keys):
    check(
        chunk(device, queries=queries, keys=keys),
        Rules(right=0),
        query_positions=Positions(max(0, keys - queries), queries),
    )


def test_a_single_key_gives_its_value(device):
    q, k, v, dout = chunk(device, queries=3, keys=1)
    out, _, dq, dk, dv = by_kernel(q, k, v, dout, Rules())
    assert torch.equal(out, v.expand_as(out))
    torch.testing.assert_close(dv[0, 0, 0], dout.sum((0, 1, 2)))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


RULES = [
    Rules(),
    Rules(right=0),
    Rules(left=6, right=0),
    Rules(left=6, right=6),
    Rules(left=1, right=0),
    Rules(right=-4),
    Rules(left=40),
    Rules(left=-2, right=9),
    Rules(scale=0.9, softcap=2.0),
    Rules(right=0, scale=-0.3),
    Rules(scale=0.0),
]
PLACES = [
    {},
    {"query_positions": Positions(11, 37)},
    {"query_positions": Positions(10, 18, 70, 19), "key_positions": Positions(0, 30, 60, 23)},  # two runs each
]


# Every rule where both sides have two runs; one with both edges of a window at each of the other places.
@pytest.mark.parametrize(
    ("rules", "places"),
    [*((rules, PLACES[-1]) for rules in RULES), (RULES[3], PLACES[0]), (RULES[3], PLACES[1])],
    ids=str,
)
def test_every_rule_and_every_place(device, rules, places):
    check(chunk(device), rules, **places)


@pytest.mark.parametrize(("number", "places"), [(torch.int32, PLACES[0]), (torch.int64, PLACES[-1])], ids=str)
def test_documents_see_themselves_only(device, number, places):
    tensors = chunk(device, batch=2, heads=1)
    documents = {
        "query_documents": (torch.arange(37, device=device) // 9).expand(2, -1).to(number),
        "key_documents": torch.stack([torch.arange(53) // 20, torch.arange(53) % 4]).to(device, number),
    }
    check(tensors, Rules(), **documents, **places)
    check(tensors, Rules(right=0), **documents, **places)


@pytest.mark.parametrize("seed", [0, 1, -(1 << 40), (1 << 63) - 1])
def test_dropout_is_the_one_that_seed_and_positions_say(device, seed):
    places = {"query_positions": Positions(10, 9, 70, 8), "key_positions": Positions(0, 15, 60, 10)}
    check(chunk(device, batch=2, queries=17, keys=25), Rules(dropout=0.4, seed=seed, head_start=3), **places)


def test_the_random_numbers_are_philox():
    """The published known answers of Philox 4x32 with 10 rounds (Random123, kat_vectors), for counter and key of zeros
    and of ones."""
    for word, expected in [(0, 0x6627E8D5), (0xFFFFFFFF, 0x408F276D)]:
        counters = [torch.tensor([word]) for _ in range(4)]
        assert philox(counters, word | word << 32, rounds=10).item() == expected


def test_dropout_does_not_depend_on_how_the_heads_are_split(device):
    q, k, v, _ = chunk(device, heads=4, kv_heads=4)
    rules = Rules(dropout=0.5, seed=3)
    whole, _ = attention_forward(q, k, v, rules)
    late, _ = attention_forward(q[:, 2:], k[:, 2:], v[:, 2:], replace(rules, head_start=2))
    assert torch.equal(whole[:, 2:], late)


LAYOUTS = {
    "sequence before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim first": lambda t: t.movedim(3, 0).contiguous().movedim(0, 3),
    "every second row": lambda t: torch.stack([t, t + 9], 3).flatten(2, 3)[:, :, ::2],
    "an odd offset": lambda t: torch.cat([t[..., :1] + 9, t], 3)[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_and_offsets(device, layout):
    check([LAYOUTS[layout](t) for t in chunk(device, batch=2, heads=2, kv_heads=2)], Rules(right=0))


def ring(tensors, rules, parts, dtype):
    """Run attention chunk by chunk over the keys, as ranks in a ring do, passing states and gradients on in fp32."""
    q, k, v, dout = tensors
    out, lse, start = None, None, 0
    chunks = []
    for size in parts:
        place = {"key_positions": Positions(start, size)}
        chunks.append((k[:, :, start : start + size], v[:, :, start : start + size], place))
        start += size
    for number, (k_part, v_part, place) in enumerate(chunks):
        last = number == len(chunks) - 1
        previous = (out, lse) if number else None
        reuse = {"out": out} if number and not last else {"out_dtype": dtype if last else torch.float32}
        out, lse = attention_forward(q, k_part, v_part, rules, previous=previous, **reuse, **place)
    delta = attention_delta(out, dout)
    dq = torch.zeros(q.shape, device=q.device)
    dkv = []
    for k_part, v_part, place in chunks:
        dk, dv = (torch.full(t.shape, 0.5, device=q.device) for t in (k_part, v_part))
        found = attention_backward(q, k_part, v_part, dout, lse, delta, rules, dq=dq, dk=dk, dv=dv, **place)
        assert all(a is b for a, b in zip(found, (dq, dk, dv), strict=True))
        dkv.append((dk - 0.5, dv - 0.5))
    return out, lse, dq, *(torch.cat(parts, 2) for parts in zip(*dkv, strict=True))


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "rules", [Rules(right=0), Rules(left=20, right=0, softcap=3.0), Rules(dropout=0.3, seed=5)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_ring_of_chunks_is_the_unsplit_attention(device, dtype, rules):
    tensors = chunk(device, queries=53, dtype=dtype)
    references = by_plain(*tensors, rules, dtype), by_plain(*tensors, rules, torch.float64)
    for name, result, *expected in zip(NAMES, ring(tensors, rules, (17, 1, 35), dtype), *references, strict=True):
        assert_close(result.to(expected[0].dtype) if name != "lse" else result, *expected, what=name)


def test_the_zigzag_places_of_two_ranks_make_the_unsplit_attention(device):
    q, k, v, _ = tensors = chunk(device, queries=53)
    exact = by_plain(*tensors, Rules(right=0), torch.float64)
    plain = by_plain(*tensors, Rules(right=0), DEFAULT)
    early_and_late = Positions(0, 14, 40, 13), Positions(14, 13, 27, 13)
    for mine in early_and_late:
        rows = expand_positions(mine, device)
        out, lse = None, None
        for theirs in early_and_late:
            columns = expand_positions(theirs, device)
            out, lse = attention_forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], Rules(right=0), query_positions=mine,
                key_positions=theirs, previous=(out, lse) if out is not None else None, out_dtype=torch.float32,
            )  # fmt: skip
        assert_close(out.to(DEFAULT), plain[0][:, :, rows], exact[0][:, :, rows])
        assert_close(lse, plain[1][:, :, rows], exact[1][:, :, rows])


def test_positions_may_lie_far_out(device):
    far = (1 << 29) - 60
    check(chunk(device), Rules(right=0), query_positions=Positions(far, 37), key_positions=Positions(far - 20, 53))


def test_rows_that_see_nothing_are_zeros_with_no_gradient(device):
    q, k, v, dout = chunk(device)
    rules, place = Rules(right=0), {"key_positions": Positions(100, 53)}
    out, lse, *gradients = by_kernel(q, k, v, dout, rules, **place)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((gradient == 0).all() for gradient in gradients)
    state = draw(device, *out.shape), draw(device, *lse.shape)
    kept = attention_forward(q, k, v, rules, previous=state, **place)
    torch.testing.assert_close(kept[0], state[0].to(DEFAULT))
    torch.testing.assert_close(kept[1], state[1])


def test_a_sink_is_a_state_without_a_value(device):
    q, k, v, dout = chunk(device)
    sinks = torch.tensor([0.5, -1.0], device=device)
    rules = Rules(right=0)

    def plain(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v, sinks)]
        out, lse = attention(*leaves[:3], rules, sinks=leaves[3])
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    previous = None, sinks.view(1, 2, 1).expand(1, 2, 37)
    out, lse = attention_forward(q, k, v, rules, previous=previous)
    delta = attention_delta(out, dout)
    gradients = attention_backward(q, k, v, dout, lse, delta, rules)
    dsinks = -(torch.exp(sinks.view(1, 2, 1) - lse) * delta).sum((0, 2))
    for result, *expected in zip(
        (out, lse, *gradients, dsinks.to(DEFAULT)), plain(DEFAULT), plain(torch.float64), strict=True
    ):
        assert_close(result, *expected)


def test_every_configuration_gives_the_same_attention(device):
    q, k, v, dout = tensors = chunk(device, head_dim=64, dtype=torch.bfloat16)
    rules = Rules(left=30, right=0)
    plain, exact = (by_plain(*tensors, rules, dtype) for dtype in (torch.bfloat16, torch.float64))
    architecture = launch.architecture_of(device)
    for config in listed("forward", architecture, 64):
        out, lse = attention_forward(q, k, v, rules, config=config)
        assert_close(out, plain[0], exact[0], str(config))
    delta = attention_delta(out, dout)
    for kind, numbers in (("dkdv", (1, 2)), ("dq", (0,))):
        for config in listed(kind, architecture, 64):
            found = attention_backward(q, k, v, dout, lse, delta, rules, **{f"{kind}_config": config})
            for number in numbers:
                assert_close(found[number], plain[2 + number], exact[2 + number], f"{kind} {config}")


TILES = 1 if launch.INTERPRETED else 8  # a GPU's tiles have so many times the interpreter's rows
LATE = {"query_positions": Positions(53 * TILES, 17 * TILES)}
SPLIT = {
    "query_positions": Positions(30 * TILES, 9 * TILES, 80 * TILES, 8 * TILES),
    "key_positions": Positions(0, 37 * TILES, 60 * TILES, 33 * TILES),
}
AHEAD = {
    "all keys": (Rules(), {}),
    "causal": (Rules(right=0), LATE),
    "a window": (Rules(left=50 * TILES, right=9 * TILES), LATE),
    "a window over two runs": (Rules(left=70 * TILES, right=0), SPLIT),
    "no whole tile": (Rules(left=3, right=3), SPLIT),
    "no tile": (Rules(right=0), {"key_positions": Positions(500 * TILES, 70 * TILES)}),
    "softcap": (Rules(scale=0.9, softcap=2.0), SPLIT),
    "dropout": (Rules(right=0, dropout=0.4, seed=5, head_start=3), SPLIT),
    "documents": (Rules(right=0), LATE),
}


def calls_ahead(device, case):
    """Yield forward with and without `ahead`, by each tile that has both, loaded by descriptors and by pointers."""
    rules, places = AHEAD[case]
    heads = {"heads": 4, "kv_heads": 2} if case == "all keys" else {}
    q, k, v, dout = chunk(device, **heads, queries=17 * TILES, keys=70 * TILES, value_dim=32)
    documents = {
        "query_documents": torch.ones(1, 17 * TILES, dtype=torch.int64, device=device),
        "key_documents": torch.arange(70 * TILES, device=device)[None] // (40 * TILES),
    }
    state = {"previous": (dout.float(), draw(device, *dout.shape[:3], seed=4))}
    for number, load in enumerate((torch.clone, LAYOUTS["an odd offset"])):
        given = [load(t) for t in (q, k, v)]
        assert all(map(launch.describable, given)) == (load is torch.clone)
        for continues in (False, True):
            uses = {"dropout": rules.dropout, "documents": case == "documents", "state": continues,
                    "softcap": rules.softcap}  # fmt: skip
            tiles = listed("forward", launch.architecture_of(device), 64, [name for name, used in uses.items() if used])
            pairs = [(after, replace(after, ahead=True)) for after in tiles if replace(after, ahead=True) in tiles]
            options = {**places, **(documents if case == "documents" else {}), **(state if continues else {})}
            for pair in pairs if not launch.INTERPRETED else pairs[(number + continues) % 2 :][:1]:
                yield [partial(attention_forward, *given, rules, config=tile, **options) for tile in pair]


@pytest.fixture
def addresses(monkeypatch):
    """The addresses that kernels load from, in the interpreter; on a GPU none."""
    found = []
    if launch.INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        load = InterpreterBuilder.create_masked_load

        def listed_load(self, pointers, mask, *options, **more):
            found.extend(pointers.data[mask.data].tolist())
            return load(self, pointers, mask, *options, **more)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", listed_load)
    return found


@pytest.mark.parametrize("case", AHEAD)
def test_a_product_ahead_changes_no_bit_and_loads_no_more(device, case, addresses):
    every = list(calls_ahead(device, case))
    assert len(every) == 4 or not launch.INTERPRETED
    if not every:
        pytest.skip("no tile of this device has a product ahead")
    for calls in every:
        results, loads = [], []
        for call in calls:
            addresses.clear()
            results.append(call())
            loads.append(sorted(addresses))
        for after, ahead in zip(*results, strict=True):
            assert torch.equal(after, ahead), calls[1].keywords["config"]
        assert loads[0] == loads[1], calls[1].keywords["config"]


def test_the_same_call_gives_the_same_bits(device):
    tensors = chunk(device, dtype=torch.bfloat16)
    first = by_kernel(*tensors, Rules(right=0))
    for _ in range(1 if launch.INTERPRETED else 50):
        assert all(torch.equal(a, b) for a, b in zip(first, by_kernel(*tensors, Rules(right=0)), strict=True))


def test_the_tolerance_would_catch_a_window_that_is_off_by_one(device):
    q, k, v, _ = chunk(device)
    plain, exact = (
        attention(*(t.to(d) for t in (q, k, v)), Rules(left=6, right=0))[0] for d in (q.dtype, torch.float64)
    )
    for wrong in (Rules(left=7, right=0), Rules(left=6, right=1), Rules(right=0)):
        assert error_in_tolerances(attention_forward(q, k, v, wrong)[0], plain, exact) > 10


def test_bad_input_is_refused_with_the_value_and_the_way_out(device):
    other = torch.float16  # than that of the others
    q, k, v, dout = chunk(device)
    lse = draw(device, 1, 2, 37)
    documents = torch.zeros(1, 37, dtype=torch.int32, device=device)
    free = Rules()
    for error, text, call in [
        (ValueError, r"q \(2, 37, 16\) must be \[batch, heads, sequence, head_dim\]", lambda: attention_forward(q[0], k, v, free)),
        (ValueError, "head_dim 257; it must be 1 to 256", lambda: attention_forward(*(draw(device, 1, 1, 3, 257, dtype=DEFAULT) for _ in "qkv"), free)),
        (ValueError, "3 query heads cannot share 2 KV heads", lambda: attention_forward(draw(device, 1, 3, 4, 8, dtype=DEFAULT), *(draw(device, 1, 2, 4, 8, dtype=DEFAULT) for _ in "kv"), free)),
        (ValueError, r"k has shape \(1, 1, 53, 15\); it must be \(1, 1, 53, 16\)", lambda: attention_forward(q, k[..., 1:], v, free)),
        (TypeError, "q is torch.float64", lambda: attention_forward(q.double(), k.double(), v.double(), free)),
        (TypeError, "v is torch.float16", lambda: attention_forward(q, k, v.to(other), free)),
        (ValueError, "one device", lambda: attention_forward(q, k.to("meta"), v, free)),
        (ValueError, "must be of 37 rows in all", lambda: attention_forward(q, k, v, free, query_positions=Positions(0, 36))),
        (ValueError, "none of its numbers negative", lambda: attention_forward(q, k, v, free, query_positions=Positions(-1, 37))),
        (ValueError, "passes position", lambda: attention_forward(q, k, v, free, query_positions=Positions(1 << 29, 37))),
        (ValueError, "softcap=0.0 must be positive", lambda: attention_forward(q, k, v, Rules(softcap=0.0))),
        (ValueError, "dropout=1.0 must be at least 0 and less than 1", lambda: attention_forward(q, k, v, Rules(dropout=1.0))),
        (ValueError, "scale=inf must be finite", lambda: attention_forward(q, k, v, Rules(scale=float("inf")))),
        (ValueError, "left=1073741824", lambda: attention_forward(q, k, v, Rules(left=1 << 30))),
        (ValueError, "seed=9223372036854775808 must fit 64 bits", lambda: attention_forward(q, k, v, Rules(seed=1 << 63))),
        (ValueError, "or neither", lambda: attention_forward(q, k, v, free, query_documents=documents)),
        (ValueError, r"key_documents has shape \(1, 37\)", lambda: attention_forward(q, k, v, free, query_documents=documents, key_documents=documents)),
        (TypeError, "query_documents is torch.float32", lambda: attention_forward(q, q, q, free, query_documents=documents.float(), key_documents=documents.float())),
        (ValueError, "does not exist", lambda: attention_forward(q, k, v, free, config=AttentionConfig(48, 48, 4, 1))),
        (TypeError, "previous_out is torch.float16", lambda: attention_forward(q, k, v, free, previous=(dout.to(other), lse))),
        (ValueError, "only out may be None", lambda: attention_forward(q, k, v, free, previous=(dout, None))),
        (ValueError, "give one of them", lambda: attention_forward(q, k, v, free, out=dout, out_dtype=other)),
        (ValueError, "previous_lse has shape", lambda: attention_forward(q, k, v, free, previous=(dout, lse[..., 1:]))),
        (ValueError, "delta has shape", lambda: attention_backward(q, k, v, dout, lse, lse[..., 1:], free)),
        (TypeError, "dq is torch.float16", lambda: attention_backward(q, k, v, dout, lse, lse, free, dq=q.to(other))),
        (ValueError, "its elements share memory", lambda: attention_forward(q, k, v, free, out=dout[:, :, :1].expand_as(dout))),
        (ValueError, "the last two must be below 4194304: copy it", lambda: attention_forward(torch.empty(1, device=device, dtype=DEFAULT).as_strided((1, 1, 1, 16), (1, 1, 1 << 22, 0)), k, v, free)),
        (ValueError, "both or neither", lambda: attention_backward(q, k, v, dout, lse, lse, free, dk=k.float())),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()
