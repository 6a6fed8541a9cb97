"""Attention of a chunk by torch's functions: where they may be taken, and that they get the right rows and keys.

They run on GPUs only. Elsewhere functions with their contracts stand in their place: a causal mask whose last row sees
all keys (flash attention) or whose first row sees one (cuDNN's).
"""

import contextlib
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from attention_reference import attention
from torch.nn.attention import SDPBackend

import weft
from weft.kernels import config, launch
from weft.kernels.attention_rules import Positions, Rules
from weft.kernels.attention_tiles import AttentionProblem, listed
from weft.kernels.config import Entry
from weft.ops import attention_blocks, attention_chunk, kernel_choice, library_attention
from weft.ops.attention_blocks import AttentionChunk
from weft.ops.unit_attention import unit_attention
from weft.testing.models import Llama
from weft.testing.ranks import run_ranks
from weft.testing.tolerance import assert_close

calls: list[str] = []


def scores(q, k, v, visible, scale):
    """out and lse in fp64, keys and values of each KV head for all its query heads."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    s = (q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)).masked_fill(~visible, -torch.inf)
    return (s.softmax(-1) @ v), s.logsumexp(-1)


def gradients(dout, q, k, v, lse, out, visible, scale):
    """By the formulas that take lse and out from outside, as all flash attentions do."""
    q64, k64, v64, dout, out, lse = (t.detach().double() for t in (q, k, v, dout, out, lse))
    scale = q.size(-1) ** -0.5 if scale is None else scale
    group = q.size(1) // k.size(1)
    k64, v64 = (t.repeat_interleave(group, 1) for t in (k64, v64))
    p = torch.exp((q64 @ k64.mT * scale).masked_fill(~visible, -torch.inf) - lse.unsqueeze(-1))
    ds = p * (dout @ v64.mT - (dout * out).sum(-1, keepdim=True)) * scale
    of_keys = (x.unflatten(1, (k.size(1), group)).sum(2) for x in (ds.mT @ q64, p.mT @ dout))
    return [x.to(q.dtype) for x in (ds @ k64, *of_keys)]


def band(rows, keys, causal, left, first):
    """The visible keys of each row, whose first row has the position `first`."""
    ahead = torch.arange(keys)[None, :] - (first + torch.arange(rows))[:, None]
    visible = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return visible & (ahead >= -left) if left >= 0 else visible


def flash(
    q, k, v, no_q, no_k, rows, keys, dropout, causal, mask, scale=None, window_size_left=-1, window_size_right=-1
):
    assert (no_q, no_k, dropout, mask) == (None, None, 0.0, False) and (window_size_left < 0 or window_size_right == 0)
    assert all(map(launch.describable, (q, k, v)))
    assert (q.size(1), k.size(1)) == (rows, keys) and all(t.stride(3) == 1 for t in (q, k, v))
    calls.append("flash")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = scores(q, k, v, band(rows, keys, causal, window_size_left, keys - rows), scale)
    nothing = torch.empty(0)
    return out.to(q.dtype).transpose(1, 2).contiguous(), lse.float(), nothing, nothing.clone(), nothing.clone()


def flash_backward(
    dout, q, k, v, out, lse, no_q, no_k, rows, keys, dropout, causal, seed, offset, scale=None, window_size_left=-1,
    window_size_right=-1,
):  # fmt: skip
    assert lse.is_contiguous() and (no_q, no_k, dropout) == (None, None, 0.0)
    calls.append("flash backward" + " deterministic" * torch.are_deterministic_algorithms_enabled())
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    visible = band(rows, keys, causal, window_size_left, keys - rows)
    return tuple(t.transpose(1, 2) for t in gradients(dout, q, k, v, lse, out, visible, scale))


def cudnn(q, k, v, bias, with_lse, dropout=0.0, causal=False, mask=False, scale=None):
    assert bias is None and with_lse and not dropout and not mask
    calls.append("cudnn")
    out, lse = scores(q, k, v, band(q.size(2), k.size(2), causal, -1, 0), scale)
    nothing = torch.empty(0)
    return out.to(q.dtype), lse.float().unsqueeze(-1), None, None, q.size(2), k.size(2), nothing, nothing.clone(), None


@contextlib.contextmanager
def on_a_gpu(prefers_cudnn=False):
    """Let tensors on the CPU take torch's functions as on a GPU, and record their calls."""
    calls.clear()
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in {
            "_flash_attention_forward": flash,
            "_flash_attention_backward": flash_backward,
            "_scaled_dot_product_cudnn_attention": cudnn,
        }.items():
            library.impl(name, function, "CPU")
        patch.setattr(library_attention, "_on_gpu", lambda q: True)
        patch.setattr(library_attention, "can_use_flash_attention", lambda parameters: True)
        choice = SDPBackend.CUDNN_ATTENTION if prefers_cudnn else SDPBackend.FLASH_ATTENTION
        patch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: choice.value)
        yield


def draw(*shape, seed=0, dtype=torch.bfloat16, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


CHUNKS = {  # rules, positions of the queries, number of keys
    "full": (Rules(), Positions(0, 21), 33),
    "causal": (Rules(right=0), Positions(0, 21), 21),
    "causal, the last rows": (Rules(right=0), Positions(12, 9), 21),
    "causal, rows in the middle": (Rules(right=0), Positions(5, 9), 21),
    "causal, two runs": (Rules(right=0, scale=0.3), Positions(3, 5, 13, 6), 21),
    "window": (Rules(right=0, left=4), Positions(0, 21), 21),
    "window, two runs": (Rules(right=0, left=4), Positions(3, 5, 13, 6), 21),
}


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["deterministic", "any"])
@pytest.mark.parametrize("name", CHUNKS)
def test_a_gpus_functions_keep_their_contract(name, library):
    """On the device itself: nothing stands in."""
    follows_the_contract(name, library, torch.device("cuda"))


@pytest.mark.parametrize("library", ["deterministic", "any"])
@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_is_the_attention_of_its_rows_and_keys(name, library):
    with on_a_gpu(prefers_cudnn=True):
        follows_the_contract(name, library, torch.device("cpu"))
        square = library == "any" and name in ("full", "causal")  # what cuDNN can mask; its backward is not called
        runs = 2 if "two runs" in name else 1
        backward = "flash backward" + " deterministic" * (library == "deterministic")
        assert calls == ["cudnn" if square else "flash"] * runs + [backward] * runs
    assert not torch.are_deterministic_algorithms_enabled()


def follows_the_contract(name, library, device):
    rules, positions, keys = CHUNKS[name]
    rows = positions.length + positions.second_length
    q, k, v, dout = (
        draw(2, heads, length, 16, seed=seed, device=device)
        for seed, (heads, length) in enumerate([(24, rows), (12, keys), (12, keys), (24, rows)])
    )  # many: the deterministic backward holds sums of few
    chunk = AttentionChunk(rules, positions, Positions(0, keys), library=library)

    def plain(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out, lse = attention(*leaves, rules, query_positions=positions, key_positions=Positions(0, keys))
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    parts, _ = library_attention.choose("forward", q, k, v, chunk)
    assert parts and parts == library_attention.choose("backward", q, k, v, chunk)[0]
    out, lse = library_attention.forward(q, k, v, chunk, parts)
    found = [torch.zeros(t.shape, device=device) for t in (q, k, v)]
    library_attention.backward((q, dout, out, lse), (k, v), chunk, parts, found)
    found = [out, lse, *(t.to(q.dtype) for t in found)]
    for what, *results in zip(
        ("out", "lse", "dq", "dk", "dv"), found, plain(q.dtype), plain(torch.float64), strict=True
    ):
        assert_close(*results, what=what)


@pytest.mark.parametrize(
    "what, change",
    [
        ("the same bits", {"library": ""}),
        ("documents", {"query_documents": torch.zeros(2, 9, dtype=torch.int64)}),
        ("softcap", {"rules": Rules(softcap=2.0)}),
        ("dropout", {"rules": Rules(dropout=0.5)}),
        ("both sides", {"rules": Rules(left=2, right=2)}),
        ("a key of their position", {"query_positions": Positions(17, 9), "rules": Rules(right=0)}),
        ("one run of keys", {"key_positions": Positions(0, 20, 30, 1)}),
        ("positive scale", {"rules": Rules(scale=-1.0)}),
        ("heads of 16 and 8", {"v": draw(2, 2, 21, 8)}),
        ("float32", {"q": draw(2, 4, 9, 16, dtype=torch.float32)}),
    ],
)
def test_what_they_cannot_do_is_named_and_stays_here(what, change):
    tensors = {"q": draw(2, 4, 9, 16), "k": draw(2, 2, 21, 16), "v": draw(2, 2, 21, 16)}
    arguments = {
        "rules": Rules(), "query_positions": Positions(0, 9), "key_positions": Positions(0, 21), "library": "any"
    }  # fmt: skip
    q, k, v = (change.get(name, tensor) for name, tensor in tensors.items())
    chunk = AttentionChunk(**arguments | {name: value for name, value in change.items() if name not in tensors})
    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "on_kernel", lambda device: True)
        parts, reason = library_attention.choose("forward", q, k, v, chunk)
    assert not parts and what in reason


def test_the_deterministic_backward_is_left_where_it_would_hold_many_sums(monkeypatch):
    """It has a sum of dq for each multiprocessor: 132 of them for one head of one sequence."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel_choice, "on_kernel", lambda device: True)
    for heads, library, parts in ((1, "deterministic", False), (33, "deterministic", True), (1, "any", True)):
        q, k = draw(1, heads, 9, 16), draw(1, 1, 9, 16)
        chunk = AttentionChunk(Rules(), Positions(0, 9), Positions(0, 9), library=library)
        with on_a_gpu():
            assert library_attention.choose("forward", q, k, k, chunk)[0]
            found, reason = library_attention.choose("backward", q, k, k, chunk)
        assert bool(found) == parts and (parts or "132 sums of dq" in reason)


def test_rows_that_do_not_lie_at_16_bytes_are_copied():
    wide = draw(2, 21, 4 * 16 + 1)
    q, k = wide[..., 1:].unflatten(-1, (4, 16)).transpose(1, 2), draw(2, 4, 21, 16)
    chunk = AttentionChunk(Rules(right=0), Positions(0, 21), Positions(0, 21), library="any")
    with on_a_gpu():
        parts, _ = library_attention.choose("forward", q, k, k, chunk)
        found, _ = library_attention.forward(q, k, k, chunk, parts)
        expected, _ = library_attention.forward(q.contiguous(), k, k, chunk, parts)
    assert torch.equal(found, expected)


def test_deterministic_mode_is_the_processs_and_ends_whatever_happens():
    """Also of the threads of autograd that two GPUs have."""
    inside, ends = threading.Barrier(2, timeout=20), []

    def one():
        inside.wait()
        for _ in range(50):
            with library_attention.same_in_every_run():
                assert torch.are_deterministic_algorithms_enabled()
        ends.append(True)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [True, True] and not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), library_attention.same_in_every_run():
        _ = 1 / 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_measurement_on_this_device_decides():
    q, k, v = draw(1, 2, 512, 64), draw(1, 2, 512, 64), draw(1, 2, 512, 64)
    rules = Rules(right=0)
    chunk = AttentionChunk(rules, Positions(0, 512), Positions(0, 512), library="deterministic")
    key = AttentionProblem.of(q, k, v, rules).key()
    (tile, *_) = listed("forward", "interpreter", 64)
    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "on_kernel", lambda device: kernel_choice._preference != "library")
        try:
            assert library_attention.choose("forward", q, k, v, chunk)[0]
            config.add_entries("attention_forward", "interpreter", [Entry(key, tile, 10.0, 12.5)])
            config.add_entries("attention_dkdv", "interpreter", [Entry(key, tile, 10.0, 8.0)])
            kernel_choice.forget_choices()
            parts, reason = library_attention.choose("forward", q, k, v, chunk)
            assert not parts and "1.25 times" in reason and "512x512" in reason
            parts, reason = library_attention.choose("backward", q, k, v, chunk)
            assert parts and "0.80 times" in reason
            faster = replace(chunk, library="any")
            assert library_attention.choose("forward", q, k, v, faster)[0], "the table's peer is another function"
            with kernel_choice.prefer("library"):
                assert library_attention.choose("forward", q, k, v, chunk)[0]
            with kernel_choice.prefer("kernel"):
                assert not library_attention.choose("backward", q, k, v, chunk)[0]
        finally:
            config._added.clear()
            kernel_choice.forget_choices()


def of_every_method(rank, method, layout, causal, deterministic):
    """A call takes torch's functions where a rank's queries meet all their keys at once, and gives the same."""
    whole = [draw(2, heads, 45, 16, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]

    def call():
        q, k, v, dout = (weft.shard_sequence(t, dim=2, layout=layout) for t in whole)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = weft.context_attention(
            *leaves, causal=causal, method=method, layout=layout, deterministic=deterministic
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = call()
    with on_a_gpu():
        found = call()
    for result, right in zip(found, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2)
    alone = method != "ring" or (layout == "contiguous" and causal and rank == 0)
    backward = "flash backward" + " deterministic" * deterministic
    assert set(calls) == ({"flash", backward} if alone else set()), calls


class InHalf(Llama):
    """Its attention is called with bf16, as under autocast."""

    HEAD = 16


def in_a_model(rank):
    """`weft.explain` says what computed each attention; the option reaches it."""
    for deterministic in (True, False):
        context = {"method": "all_gather", "deterministic": deterministic}
        model = weft.parallelize(InHalf(1), weft.init_mesh(cp=2, device_type="cpu"), context=context)
        with on_a_gpu(), torch.autocast("cpu", torch.bfloat16):
            model(torch.arange(24).view(2, 12)).float().sum().backward()
        assert "flash backward" + " deterministic" * deterministic in calls
        (row,) = [row for row in weft.explain(model).sequence if row.kind == "attention"]
        assert row.text.endswith("ATen: the kernels run on CUDA devices, the tensors are on the CPU")


def test_a_models_option_chooses_between_the_two_backwards():
    run_ranks(in_a_model, 2)


def test_of_a_type_that_neither_takes_explain_says_that_the_blocks_computed_it(monkeypatch):
    monkeypatch.setattr(kernel_choice, "on_kernel", lambda device: True)
    monkeypatch.setattr(attention_chunk, "uses_kernel", lambda q: False)
    q = draw(1, 2, 9, 16, dtype=torch.float32)
    with on_a_gpu():
        attention_chunk.forward(
            q, q, q, AttentionChunk(Rules(), Positions(0, 9), Positions(0, 9), library="any"), None, True
        )
    assert str(attention_chunk.last_algorithm()) == "ATen: torch's functions do not take torch.float32"


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_context_attention_takes_them_where_it_needs_no_state(method):
    for layout, causal, deterministic in itertools.product(("zigzag", "contiguous"), (True, False), (True, False)):
        run_ranks(of_every_method, 2, method, layout, causal, deterministic)


def test_sinks_and_units_of_a_model_with_the_same_bits_do_not_take_them():
    q, k, v = (draw(1, 2, 8, 16).requires_grad_() for _ in range(3))
    rules = Rules(right=0)
    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "_ROWS", 4)
        unit_attention(q, k, v, rules, 0).sum().backward()
    assert not calls


@pytest.mark.kernel
def test_without_a_kernel_and_without_flash_attention_the_blocks_need_nothing_of_the_cpu(device):
    """WEFT_KERNELS=library with documents, say: no function that only the CPU has."""
    chunk = AttentionChunk(Rules(right=0), Positions(0, 9), Positions(0, 9))
    kinds = {block.kind for block in attention_blocks.blocks_of(chunk, torch.device("cuda"))}
    assert kinds == {"masked"}
    q = draw(1, 2, 9, 16, device=device)
    with kernel_choice.prefer("library"):
        out, _ = attention_chunk.forward(q, q, q, chunk, None, last=True)
    expected, _ = attention(q.double(), q.double(), q.double(), Rules(right=0))
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=2e-2, atol=2e-2)
    assert launch.INTERPRETED or out.is_cuda
