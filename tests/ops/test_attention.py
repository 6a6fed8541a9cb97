"""Attention on one device: against torch's, with all gradients, as an operator and under torch.compile."""

import pytest
import torch
import torch.nn.functional as F

from weft.kernels import launch
from weft.ops import kernel_choice
from weft.ops.attention import attention
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

DTYPES = [*([torch.float32] if launch.INTERPRETED else []), torch.bfloat16]


@pytest.fixture(autouse=True)
def our_kernels():
    with kernel_choice.prefer("kernel"):
        yield


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def chunk(device, heads=2, kv_heads=2, sequence=21, head_dim=16, dtype=DTYPES[0]):
    shapes = [(2, h, sequence, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [draw(device, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def plain(q, k, v, *, visible=None, sinks=None, scale=None, softcap=None):
    """In the inputs' own type; visible [.., Sq, Sk] says who sees whom."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.size(-1) ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    return weights[..., : k.size(2)] @ v


def with_gradients(function, inputs, dtype=None):
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    out = function(*leaves)
    dout = draw(out.device, *out.shape, seed=9).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def compare(ours, reference, inputs):
    expected = with_gradients(reference, inputs), with_gradients(reference, inputs, torch.float64)
    for number, (result, *references) in enumerate(zip(with_gradients(ours, inputs), *expected, strict=True)):
        assert_close(result, *references, what=f"result {number}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_torchs_attention_with_all_gradients(device, dtype, causal):
    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    compare(lambda *t: attention(*t, causal=causal), reference, chunk(device, heads=4, kv_heads=2, dtype=dtype))


def test_symmetric_memorys_documents_caps_and_scales_are_all_kept(device):
    position = torch.arange(21, device=device)
    ahead = position[None, :] - position[:, None]
    documents = (position // 8).expand(2, -1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    for options, visible in [
        ({"window": 4, "causal": True}, (ahead <= 0) & (ahead > -4)),
        ({"window": 4}, ahead.abs() < 4),
        ({"causal": True, "document_ids": documents}, (ahead <= 0) & same),
        ({"softcap": 1.5, "scale": 0.7}, None),
    ]:
        kept = {name: options[name] for name in ("softcap", "scale") if name in options}
        compare(
            lambda *t, options=options: attention(*t, **options),
            lambda *t, visible=visible, kept=kept: plain(*t, visible=visible, **kept),
            chunk(device),
        )


def test_sinks_take_part_in_the_sum_and_are_learned(device):
    inputs = [*chunk(device, heads=4), draw(device, 4, seed=5)]
    position = torch.arange(21, device=device)
    visible = position[None, :] <= position[:, None]
    compare(
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, causal=True),
        lambda q, k, v, sinks: plain(q, k, v, sinks=sinks, visible=visible),
        inputs,
    )


def test_dropout_is_the_same_for_the_same_seed_and_keeps_the_mean(device):
    q, k, _ = chunk(device, sequence=40)
    v = torch.ones_like(k)
    kept = attention(q, k, v, dropout=0.25, seed=1)
    assert torch.equal(kept, attention(q, k, v, dropout=0.25, seed=1))
    assert not torch.equal(kept, attention(q, k, v, dropout=0.25, seed=2))
    assert abs(kept.mean().item() - 1) < 0.05


@pytest.mark.parametrize("keys", ["own", "expanded"])
def test_the_copy_engine_reads_every_operand_whatever_is_expanded(device, keys):
    """The gradient of a sum has strides of 0, which no tensor descriptor may have."""
    q, k, v = (t.requires_grad_() for t in chunk(device, dtype=torch.bfloat16))
    k_given, v_given = (k, v) if keys == "own" else (t[:, :1].expand(-1, 2, -1, -1) for t in (k, v))
    with launch.observing() as observed:
        attention(q, k_given, v_given, causal=True).sum().backward()
    engines = [made.constants["DESCRIPTORS"] for made in observed.launches if "DESCRIPTORS" in made.constants]
    assert len(engines) == 3 and all(flag == launch.has_copy_engine(q.device) for flag in engines)
    expected = [t.grad for t in (q, k, v)]
    out = attention(q, k_given.clone(), v_given.clone(), causal=True)
    for gradient, want in zip(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), expected, strict=True):
        assert torch.equal(gradient, want)


def test_results_lie_in_memory_as_their_inputs(device):
    """Models make heads of the features last: [batch, sequence, heads, head_dim] in memory."""
    q, k, v = (draw(device, 2, 21, 2, 16, dtype=DTYPES[0], seed=seed).transpose(1, 2) for seed in range(3))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*inputs, causal=True)
    gradients = torch.autograd.grad(out, inputs, draw(device, *out.shape, dtype=out.dtype))
    assert all(t.transpose(1, 2).is_contiguous() for t in (out, *gradients))
    values = v.detach()[..., :8].contiguous()
    assert attention(q.detach(), k.detach(), values).transpose(1, 2).is_contiguous()
    assert attention(values, values, values).is_contiguous()


@pytest.mark.parametrize("how", ["aligned", "misaligned", "odd head_dim", "heads expanded", "batch expanded", "turned"])
def test_the_operators_results_lie_as_torch_compile_expects(device, how):
    """Expanded, misaligned and turned operands are copied on the way."""
    head_dim = 20 if how == "odd head_dim" else 16
    wide = draw(device, 2 * 21 * 2 * head_dim + 1, dtype=torch.bfloat16)
    first = int(how == "misaligned")
    q = wide[first : first + 2 * 21 * 2 * head_dim].view(2, 21, 2, head_dim).transpose(1, 2)
    if how == "heads expanded":
        q = q[:, :1].expand(-1, 2, -1, -1)
    elif how == "batch expanded":
        q = q[:1].expand(2, -1, -1, -1)
    elif how == "turned":
        q = q.contiguous().transpose(2, 3).contiguous().transpose(2, 3)
    rules = (None, 0, 0.25, None, 0.0, 0)
    out, lse = torch.ops.weft.attention_forward(q, q, q, None, None, *rules)
    calls = [
        (torch.ops.weft.attention_forward.default, (q, q, q, None, None, *rules)),
        (torch.ops.weft.attention_backward.default, (q, q, q, q, None, out, lse, *rules)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        for real, fake in zip(operator(*arguments), fakes, strict=True):
            assert real.stride() == fake.stride()


def test_autocast_casts_as_for_torchs_attention(device):
    q, k, v = (draw(device, 2, 2, 21, 16, seed=seed) for seed in range(3))
    with torch.autocast(device.type, torch.bfloat16):
        found = attention(q, k, v.bfloat16(), causal=True)
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert torch.equal(found, attention(*(t.bfloat16() for t in (q, k, v)), causal=True))


def test_compile_traces_it_whole(device):
    inputs = [t.requires_grad_() for t in chunk(device)]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(attention(*inputs, causal=True).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs, causal=True).square().sum(), inputs)
    for result, want in zip(found, expected, strict=True):
        torch.testing.assert_close(result, want)


def test_the_operators_pass_opcheck(device):
    q, k, v = chunk(device)
    documents = torch.zeros(2, 21, dtype=torch.int32, device=device)
    rules = (None, 0, 0.25, None, 0.0, 0)
    for arguments in [(q, k, v, None, None, *rules), (q, k, v, q[0, :, 0, 0], documents, *rules)]:
        torch.library.opcheck(torch.ops.weft.attention_forward.default, arguments)
    out, lse = torch.ops.weft.attention_forward(q, k, v, None, None, *rules)
    torch.library.opcheck(torch.ops.weft.attention_backward.default, (q, q, k, v, None, out, lse, *rules))


def test_bad_input_is_refused(device):
    q, k, v = chunk(device)
    for error, text, options in [
        (ValueError, "window=0 must be at least 1", {"window": 0}),
        (ValueError, r"sinks has shape \(3,\); it must be \[heads\]", {"sinks": torch.zeros(3, device=device)}),
        (ValueError, "softcap", {"softcap": -1.0}),
        (ValueError, "dropout", {"dropout": 1.0}),
    ]:
        with pytest.raises(error, match=text):
            attention(q, k, v, **options)
