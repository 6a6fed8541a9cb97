"""A replayed call launches what the op itself would launch, on the memory of that call."""

import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from weft import ops  # noqa: F401 it gives the kernels their launcher
from weft.kernels import dispatch, launch
from weft.kernels.activation import gated_forward
from weft.kernels.attention import attention_backward, attention_delta, attention_forward
from weft.kernels.attention_rules import Positions, Rules
from weft.kernels.cross_entropy import _write_gradient, cross_entropy_gradient, cross_entropy_statistics
from weft.kernels.matmul import matmul
from weft.kernels.replay import _Replay, replayed

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs the interpreter")


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def products(seed):
    a, w, b = draw(33, 20, seed=seed), draw(17, 20, seed=seed + 1), draw(17, seed=seed + 2)
    main_grad = draw(33, 17, seed=seed + 3)
    yield matmul(a, w.t(), bias=b, activation="gelu", keep_z=True)
    yield matmul(a, w.t(), addend=main_grad, out=main_grad)
    yield matmul(a, w.t(), addend=main_grad)


def attentions(seed):
    q, k, v = (draw(1, 2, 19, 16, seed=seed + i) for i in range(3))
    rules = Rules(right=0)
    out, lse = attention_forward(q, k, v, rules)
    yield out, lse
    yield attention_forward(q, k, v, rules, previous=(None, lse), key_positions=Positions(19, 19))
    yield attention_forward(q, k, v, Rules(scale=-1.0))
    delta = attention_delta(out, out)
    yield (delta,)
    yield attention_backward(q, k, v, out, lse, delta, rules)


def streams(seed):
    z = draw(7, 26, seed=seed)
    yield (gated_forward(z, "silu"),)
    yield (gated_forward(z[:, :24], "silu"),)
    target = torch.arange(7)
    options = {"offset": 0, "ignore_index": -100, "smoothing": False}
    yield (cross_entropy_statistics(z, target, **options),)
    highest, log_sum, dlosses = (draw(7, seed=seed + i).abs() for i in range(3))
    yield (gradient(z, target, highest, log_sum, dlosses),)
    copy = z.clone()
    yield (gradient(copy, target, highest, log_sum, dlosses, out=copy),)


gradient = partial(cross_entropy_gradient, offset=0, vocabulary=26, ignore_index=-100, smoothing=0.0)


OPS = {
    products: [matmul],
    attentions: [attention_forward, attention_delta, attention_backward],
    streams: [gated_forward, cross_entropy_statistics, _write_gradient],
}


def forget(calls):
    for op in OPS[calls]:
        op.kinds.clear()


@pytest.mark.parametrize("calls", OPS)
def test_a_replayed_call_has_the_bits_of_the_op_itself(calls):
    expected = []
    for seed in range(4):
        forget(calls)  # the first call of a kind is the op's own
        expected.append(list(calls(seed)))
    forget(calls)
    for seed in range(4):  # the op, the op observed, two replays
        for ours, its in zip(calls(seed), expected[seed], strict=True):
            assert len(ours) == len(its)
            assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(ours, its, strict=True))
    assert sum(isinstance(kind, _Replay) for op in OPS[calls] for kind in op.kinds.values()) >= 3


def test_a_gradient_over_a_part_of_its_logits_is_refused_where_calls_are_replayed():
    """A replay compares which tensors are the same memory, and not where others begin."""
    wide, of_rows = draw(8, 8, seed=1), [draw(4, seed=2).abs() for _ in range(3)]
    _write_gradient.kinds.clear()
    for _ in range(3):
        gradient(wide[:4], torch.arange(4), *of_rows, out=wide[4:])
    assert any(isinstance(kind, _Replay) for kind in _write_gradient.kinds.values())
    with pytest.raises(ValueError, match="out overlaps logits_shard"):
        gradient(wide[:4], torch.arange(4), *of_rows, out=wide[2:6])


@dataclass(frozen=True)
class Record:
    a: float
    b: object = None


class Elsewhere(torch.Tensor):
    pass


def kind_of(*arguments, **options):
    tensors = []
    return dispatch.kind(arguments, options, tensors), tensors


x, y = torch.zeros(4, 6), torch.ones(4, 6)
DIFFERENT = [
    (None,),
    (),
    (1,),
    (1.0,),
    (True,),
    (False,),
    (-0.0,),
    (2**40,),
    ("1",),
    ("",),
    (1, 2),
    ((1, 2),),
    ((1,), 2),
    ("ab", "c"),
    ("a", "bc"),
    (torch.float16,),
    (torch.bfloat16,),
    (Record(1.0),),
    (Record(2.0),),
    (Record(1.0, 3),),
    (Rules(1),),
    (Rules(right=1),),
    (x,),
    (x.t(),),
    (x[:2],),
    (x[:1].as_strided((1, 6), (100, 1)),),
    (x[:1],),
    (x.bfloat16(),),
    (x.half(),),
    (x.double(),),
    (x.long(),),
    (x.view(-1)[1:7].view(1, 6),),  # 16 does not divide its address
    (x, x),
    (x, y),
    (x, y, x),
    (x, y, y),
]


def test_calls_that_differ_in_more_than_addresses_have_different_kinds():
    kinds = [kind_of(*arguments)[0] for arguments in DIFFERENT]
    kinds += [kind_of(a=1)[0], kind_of(b=1)[0], kind_of(a=1, b=2)[0], kind_of(1, b=2)[0]]
    assert None not in kinds and len(set(kinds)) == len(kinds)


def test_calls_that_differ_in_addresses_alone_have_one_kind():
    tensors = [x, y, torch.nn.Parameter(x.clone()), x.clone().requires_grad_()]
    kinds = [kind_of(tensor, (tensor, 3), rules=Rules(0.5), bias=None) for tensor in tensors]
    assert len({kind for kind, _ in kinds}) == 1
    assert all(found[0] is found[1] is tensor for (_, found), tensor in zip(kinds, tensors, strict=True))


@pytest.mark.parametrize(
    "argument",
    [[1], {}, object(), 2**70, torch.zeros(0), torch.zeros(3, device="meta"), x.as_subclass(Elsewhere), x.to_sparse()],
)
def test_what_is_not_described_has_no_kind(argument):
    assert kind_of(1, argument)[0] is None
    assert kind_of(a=(argument,))[0] is None


def test_describing_a_call_keeps_no_reference():
    name, value, record = "name" * 3, 1e300, Record(2.5, "text" * 9)
    objects = [x, name, value, record, vars(record), record.b]
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(10):
        kind_of(x, name, (value,), record, name=record)
    assert [sys.getrefcount(one) for one in objects] == before


def test_memory_that_is_given_twice_is_another_kind_of_call():
    """An accumulated product and one with an addend of its own are two kinds."""
    matmul.kinds.clear()
    a, b = draw(4, 6, seed=0), draw(6, 5, seed=1)
    for step in range(4):
        total, other = draw(4, 5, seed=2 + step), draw(4, 5, seed=9 + step)
        before = total.clone()
        matmul(a, b, addend=total, out=total)
        assert torch.allclose(total, before + a @ b, atol=1e-5)
        matmul(a, b, addend=other, out=total)
        assert torch.allclose(total, other + a @ b, atol=1e-5)


def test_memory_that_the_op_makes_by_itself_is_not_replayed():
    @replayed
    def negative(x):
        y = launch.empty(x.shape, x.dtype, x.device)
        gated_forward(torch.cat([-x, x], 1), "relu")
        return y

    x = draw(3, 4, seed=0)
    for _ in range(3):
        negative(x)
    assert [kind for kind in negative.kinds.values() if isinstance(kind, _Replay)] == []


def test_refusals_stay():
    for _ in range(3):
        with pytest.raises(ValueError, match="must be"):
            matmul(draw(4, 6, seed=0), draw(5, 6, seed=1))


def test_as_many_kinds_are_kept_as_said(monkeypatch):
    monkeypatch.setattr("weft.kernels.replay._MOST", 2)
    gated_forward.kinds.clear()
    for rows in range(1, 6):
        gated_forward(draw(rows, 4, seed=rows), "silu")
    assert len(gated_forward.kinds) == 2
