"""The benches that measure on a GPU, as far as they run without one: their problems are checked before they are timed,
and tuning keeps winners only."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from dataclasses import replace

import on_gpu
import pytest
import torch
from attention_reference import attention
from interpreter import compiling

import weft
from weft.bench import attention_chunk as attention_bench
from weft.bench import (
    attention_peers,
    communicating,
    copy_interference,
    device_time,
    flag_tax,
    from_host_memory,
    grouped_matmul,
    host_time,
    kernels,
    llama_step,
    peer_collectives,
    several_gpus,
    several_gpus_rank,
    tune,
)
from weft.bench import cross_entropy as loss_bench
from weft.bench import matmul as matmul_bench
from weft.bench.matmul import products, shards
from weft.bench.measure import Quantiles
from weft.bench.peer_collectives import Peer
from weft.bench.table import Row, not_measured, table
from weft.comm.registry import communicator
from weft.kernels import attention_tiles, config, launch
from weft.kernels.attention import attention_backward
from weft.ops import library_attention
from weft.testing import cases
from weft.testing.models import Llama
from weft.testing.peers import abandoned, run_as_ranks
from weft.testing.ranks import RanksFailedError, run_ranks
from weft.tools import tuning

pytestmark = pytest.mark.kernel


LAYERS = [
    cases.LinearLayer("plain", 24, 20),
    cases.LinearLayer("rise", 20, 16, "gelu_tanh"),
    cases.LinearLayer("gated", 20, 16, "silu", gated=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_matmul_bench_measures_right_results(device, layer, dtype):
    for kind, problem in products(layer, 70, dtype).items():
        made = matmul_bench.contest(kind, problem, "label", device)
        made.check()
        shape = {"forward": (70, layer.n), "dgrad": (70, layer.k)}.get(kind)
        ours, *peers = made.ours(), *(peer() for peer in made.peers.values())
        assert {peer.shape for peer in peers} == {ours.shape} == {shape or ours.shape}
        assert made.operations > 0 and made.moved_bytes > 0 and "of the heuristic" in made.facts["tile"]
        assert len(peers) == (2 if layer.gated and kind == "forward" else 1), "the gate in ATen, and in our kernel"


def test_every_tile_is_a_contender_that_is_checked(device, monkeypatch):
    problem = products(LAYERS[0], 70, torch.float32)["wgrad"]
    made = matmul_bench.contest("wgrad", problem, "label", device, tiles=True)
    tiles = tuning.tiles_of(problem, device)
    assert made.op == "matmul wgrad, tiles", "no line of the page"
    assert list(made.peers) == ["torch.matmul", *(f"ours {tile}" for tile in tiles)] and len(tiles) > 1
    made.check()
    wrong = replace(
        tuning.product_calls(problem, device), ours=lambda tile: made.ours() * (1.0 if tile is None else 2.0)
    )
    monkeypatch.setattr(tuning, "product_calls", lambda *_: wrong)
    with pytest.raises(AssertionError, match=f"ours {re.escape(str(tiles[0]))}"):
        matmul_bench.contest("wgrad", problem, "label", device, tiles=True).check()


def test_a_product_of_invariant_is_measured_beside_the_ordinary_ones(device):
    options = argparse.Namespace(only="", tiles=False, invariant=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_bench.torch, "device", lambda name: device)
        made = list(matmul_bench.contests([("label", LAYERS[2], 70)], options))
    assert [contest.op for contest in made] == ["invariant forward", "invariant dgrad", "invariant wgrad"]
    for contest in made:
        contest.check()
        assert list(contest.peers) == ["torch.matmul", "ours ordinary"]


ATTENTION = cases.AttentionCase(4, 2, 48, 16, causal=True)


def test_the_attention_bench_measures_right_results_beside_peers_in_both_orders(device):
    forward, backward = attention_bench.both_ways(ATTENTION, 1, device, torch.float32, compiled=False)
    forward.check()
    assert {"cuDNN", "flash"} <= set(forward.peers) and {"cuDNN", "flash", "flash ordered"} <= set(backward.peers)
    for made, ours in ((forward, (1, 4, 48, 16)), (backward, None)):
        result = made.ours()
        assert ours is None or result.shape == ours


def test_a_ring_step_is_beside_the_libraries_with_a_merge(device):
    full = replace(ATTENTION, causal=False)
    made = attention_bench.ring_step(full, 1, device, torch.float32)
    made.check()
    assert list(made.peers) == ["cuDNN and a merge", "flash and a merge", "ours and a merge"]


def test_every_tile_of_attention_is_a_contender_that_is_checked(device, monkeypatch):
    made = attention_bench.by_tiles(ATTENTION, 1, device, torch.float32)
    tiles = attention_tiles.listed("forward", launch.architecture_of(device), 16)
    assert list(made.peers)[: len(tiles)] == [f"ours {tile}" for tile in tiles]
    made.check()


def test_the_losses_bench_measures_right_results(device):
    logits = loss_bench.contest(40, 48, device, compiled=False)
    logits.check()
    layer = loss_bench.contest_with_layer(40, 32, 48, device, compiled=False)
    layer.check()
    assert "eager" in logits.peers and {"eager", "ours in chunks"} <= set(layer.peers)
    whole, chunks = layer.ours(), layer.peers["ours in chunks"]()
    for name, ours, theirs in zip(("dx", "dw"), whole, chunks, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3, msg=name)


def test_peers_of_other_packages_are_called_as_they_are_published(monkeypatch):
    """FlashAttention's tensors are [B, S, H, D], and its third version returns a tuple."""
    asked = []

    def flash_attn_func(q, k, v, causal, deterministic):
        asked.append((tuple(q.shape), tuple(k.shape), causal, deterministic))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        return out.transpose(1, 2), None

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    q, k, v = (torch.randn(1, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    dout = torch.randn_like(q)
    out = attention_peers.functions(True)["FlashAttention 3"](q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    found = attention_peers.ordered_backwards(True, q, k, v, dout)["FlashAttention 3 ordered"]()
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), dout))
    assert asked == [((1, 6, 4, 8), (1, 6, 2, 8), True, ordered) for ordered in (False, True)]


def test_other_tiles_of_ours_are_no_peer_of_a_row(monkeypatch):
    times = {"ours": 4.0, "ours big": 1.0, "library": 2.0}
    monkeypatch.setattr(
        device_time, "alternate", lambda calls, rounds: {name: quantiles(times[name]) for name in calls}
    )
    monkeypatch.setattr(device_time, "_captured", lambda call: None)
    monkeypatch.setattr(device_time, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = dict.fromkeys(("library", "ours big"), list)
    contest = device_time.Contest("op", "shape", list, calls, list, 1e6, 1.0, facts={"tile": "that"})
    row = device_time._measure(contest, device_time.Ceilings(1.0, 1.0), 3)
    assert row.peer == "library" and row.ratio == 0.5 and row.facts["tile"] == "that"
    assert set(row.facts["host_us"]) == {"ours", "library", "ours big"}


def test_the_device_is_kept_busy_for_longer_than_the_host_takes(monkeypatch):
    """Of a call that takes the host 2 ms and one that takes it none; the pause comes from the rounds that warm up."""
    slept: dict[str, list[int]] = {"slow": [], "fast": []}
    order: list[int] = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", order.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(tuning.torch, "empty", lambda *_, **__: torch.zeros(1))
    calls = {
        "slow": lambda: slept["slow"].append(order.pop()) or time.sleep(0.002),
        "fast": lambda: slept["fast"].append(order.pop()),
    }
    tuning.device_us(calls, torch.device("cuda"), 3)
    assert slept["slow"][0] == 0 and min(slept["slow"][2:]) >= 4000 * tuning._CYCLES_PER_US
    assert max(slept["fast"][2:]) < min(slept["slow"][2:])


def test_a_step_of_llama_is_checked_beside_the_plain_model(monkeypatch):
    monkeypatch.setattr(llama_step, "peak_bytes", lambda step: 1)
    made = run_ranks(step_of_llama, 1)[0]
    assert list(made) == [f"step of four layers, {case.name}" for case in ON_CPU]
    assert all(facts["tokens_per_s"]["ours"] == 16 / 10 * 1e6 and facts["calls"]["ours"] > 0 for facts in made.values())


ON_CPU = [case for case in llama_step.CASES if case.prefer != "kernel"]


class SmallLlama(Llama):
    KV_HEADS, GROUP, HIDDEN, WORDS = 4, 4, 32, 40  # so that four units are equal


def step_of_llama(rank):
    options = argparse.Namespace(batch=4, sequence=4, rounds=1)
    device, fixed = torch.device("cpu"), lambda steps, rounds: {name: quantiles(10.0) for name in steps}
    llama_step.peak_bytes = lambda step: 1
    rows = [llama_step.row_of(case, SmallLlama, options, device, fixed) for case in ON_CPU]
    return {row.of["op"]: row.facts for row in rows}


def test_tuning_leaves_out_what_is_not_compiled_ahead_of_time(device, monkeypatch, caplog):
    problem = products(LAYERS[0], 33, torch.float32)["forward"]
    first, *rest = tuning.tiles_of(problem, device)
    calls = tuning.product_calls(problem, device)

    def ours(tile):
        if tile == first:
            raise launch.NotCompiledError("matmul cannot be launched: the archive has no such variant")
        return calls.ours(tile)

    monkeypatch.setattr(tuning, "medians_us", lambda calls, device: dict.fromkeys(calls, 1.0))
    entry = tuning.fastest(problem.key(), problem.dtype, [first, *rest], replace(calls, ours=ours), device)
    assert entry is not None and entry.config == rest[0] and "no such variant" in caplog.text


def test_the_shards_are_those_of_the_published_models():
    found = {label: (layer, m) for label, layer, m in shards(["llama-3-8b"], [8], [1024])}
    layer, _ = found["llama-3-8b tp=8 qkv 1024x768x4096"]  # (32 + 2 x 8) heads of 128, over 8 ranks
    assert (layer.n, layer.k) == (768, 4096)
    rise, _ = found["llama-3-8b tp=8 rise 1024x1792x4096"]
    assert rise.gated and rise.activation == "silu"
    assert len(list(shards(None, cases.TENSOR_PARALLEL, cases.TOKENS))) == 4 * 4 * 4 * 5


def test_tuning_keeps_the_fastest_right_configuration_of_each_product(device, monkeypatch):
    measured = []

    def medians(calls, device):
        measured.append(calls)
        for call in calls.values():
            call()
        return {name: 10.0 - number for number, name in enumerate(calls)}

    monkeypatch.setattr(tuning, "medians_us", medians)
    entries = [entry for _, entry in tune.layers([("label", LAYERS[0], 33)], device, torch.float32)]
    assert [entry.problem["layout"] for entry in entries] == ["nt", "nn", "tn", "tn"]
    assert entries[-1].problem["fused"] == "main_grad"
    for entry, calls in zip(entries, measured, strict=True):
        *ours, library = calls
        assert library == "library" and str(entry.config) == ours[-1] and entry.ours_us == 11.0 - len(ours)
        assert entry.peer_us == 10.0 - len(ours)
    text = config.table_text(entries, {"device": "none"})
    assert [row["problem"] for row in json.loads(text)["rows"]] == [entry.problem for entry in entries]


def test_tuning_measures_experts_and_attention_beside_torchs_functions(device, monkeypatch):
    """Rehearsed in the interpreter: results are compared, and times are made up."""
    calls_of: list[int] = []

    def medians(calls, device):
        calls_of.append(len(calls))
        return {name: 10.0 - number for number, name in enumerate(calls)}

    monkeypatch.setattr(tuning, "medians_us", medians)
    entries = [entry for _, entry in tune.experts([(3, 2, 48, 32)], [40], device, torch.bfloat16)]
    kinds = ["nt", "nt", "nn", "nn", "wgrad", "wgrad"]
    assert [entry.problem["kind"] for entry in entries] == kinds and entries[0].problem["fused"] == "silu_gated"
    assert min(calls_of) >= 2, "a tile and the library"
    case = cases.AttentionCase(4, 2, 80, 16, causal=True)
    if device.type == "cpu":
        monkeypatch.setattr(library_attention, "choose", lambda *_: ((WHOLE,), None))
        monkeypatch.setattr(library_attention, "forward", as_flash)
        monkeypatch.setattr(library_attention, "part_backward", as_flash_backward)
    tables = dict(tune.attentions([case], device, torch.bfloat16, 80))
    assert set(tables) == {"attention_forward", "attention_dkdv", "attention_dq"}
    for entry in tables.values():
        assert (entry.problem["queries"], entry.problem["head_dim"], entry.problem["bounded"]) == (80, 16, True)
    dkdv, dq = tables["attention_dkdv"], tables["attention_dq"]
    assert (dkdv.ours_us, dkdv.peer_us) == (dq.ours_us, dq.peer_us), "of the whole backward"
    monkeypatch.setattr(tune, "attention_backward", wrong_dk)
    tables = dict(tune.attentions([case], device, torch.bfloat16, 80))
    assert tables["attention_dkdv"] is None and tables["attention_dq"] is not None, "a tile is checked by what it makes"


def wrong_dk(*arguments, **options):
    dq, dk, dv = attention_backward(*arguments, **options)
    return dq, dk * 1.1, dv


WHOLE = library_attention.Part(slice(0, 80), slice(0, 80), True, -1)


def as_flash(q, k, v, chunk, parts):
    out, lse = attention(q.double(), k.double(), v.double(), chunk.rules)
    return out.to(q.dtype), lse.float()


def as_flash_backward(of_rows, of_keys, part, chunk):
    q, dout, *_ = of_rows
    leaves = [t.double().requires_grad_() for t in (q, *of_keys)]
    out, _ = attention(*leaves, chunk.rules)
    return [gradient.to(q.dtype) for gradient in torch.autograd.grad(out, leaves, dout.double())]


def test_without_a_gpu_nothing_is_measured_and_that_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    from weft.cli import main

    benches = ["matmul", "communicating", "kernels"]
    for command in (
        *(["tune", op] for op in ("matmul", "attention", "grouped")),
        *(["bench", bench] for bench in benches),
    ):
        with pytest.raises(SystemExit, match="there is no CUDA device here"):
            main(command)


@pytest.fixture
def virtual(device, monkeypatch):
    """Ranks of a bench that uses virtual ones, where there is no GPU to make them on: two of them."""
    if device.type == "cpu":

        def two(world, bytes, device):
            assert world == 2
            first = abandoned(device, rank=0, timeout_s=5, bytes=bytes)
            return [first, replace(first, rank=1, memory=first.memory._base[1])]

        monkeypatch.setattr(flag_tax, "virtual_peers", two)


COMMUNICATING = [(70, 24, 16), (64, 32, 32), (33, 20, 40)]


@pytest.mark.parametrize("shape", COMMUNICATING, ids=str)
@pytest.mark.parametrize("contest", [flag_tax.arriving, flag_tax.departing])
def test_what_flags_cost_is_measured_of_right_results(device, virtual, contest, shape):
    made = contest("label", *shape, 2, device, torch.bfloat16)
    for _ in range(2):
        made.check()
    assert list(made.peers) == [flag_tax.WITHOUT, flag_tax.LIBRARY]
    assert made.operations == 2 * shape[0] * shape[1] * shape[2] and made.moved_bytes > 0


@pytest.mark.parametrize(("contest", "kernel"), [("arriving", "all_gather_matmul"), ("departing", "matmul_to_peers")])
def test_a_communicating_kernel_that_does_nothing_is_not_timed(device, virtual, monkeypatch, contest, kernel):
    monkeypatch.setattr(flag_tax, kernel, lambda a, b, *rest, **options: (a.new_zeros(a.size(0), b.size(1)), None))
    with pytest.raises(AssertionError, match="label: the bits are not those of matmul"):
        getattr(flag_tax, contest)("label", 70, 24, 16, 2, device, torch.bfloat16).check()


def test_the_taxed_products_are_those_of_the_published_models(monkeypatch):
    made = []
    for name in ("arriving", "departing"):
        monkeypatch.setattr(flag_tax, name, lambda *arguments, name=name: made.append((name, *arguments[:5])))
    for names in (flag_tax.COLUMN, flag_tax.ROW):
        list(flag_tax.contests(names, torch.device("meta"), torch.bfloat16))
    assert len(made) == 2 * 2 * 4 * 2  # models, splits, layers, tokens
    assert ("arriving", "llama-3-70b tp=8 rise 8192x7168x8192", 8192, 7168, 8192, 8) in made
    assert ("departing", "llama-3-8b tp=4 fall 4096x4096x3584", 4096, 4096, 3584, 4) in made


def quantiles(us):
    return Quantiles(us, us, us)


def row(ours_us, graph_us, **peers_us):
    peers = {name: quantiles(us) for name, us in peers_us.items()}
    best = min(peers_us, key=peers_us.get)
    times = {"ours": quantiles(ours_us), **peers}
    return Row({"op": "op", "shape": "shape"}, times, best, {"graph_us": graph_us, "of_ceiling": 0.5})


def test_the_tax_is_of_graphs_and_of_eager_calls_where_there_are_none():
    free = flag_tax.WITHOUT
    measured = row(10.0, {"ours": 6.0, free: 5.0, "library": 9.0}, **{free: 4.0, "library": 20.0})
    assert flag_tax.tax_of(measured) == 6.0 / 5.0 and measured.peer == free
    assert flag_tax.tax_of(row(10.0, {"ours": 6.0, free: None}, **{free: 8.0})) == 10.0 / 8.0
    one, other = (replace(measured, peer="library", facts={"tax": tax}) for tax in (1.2, 1.2 * 4))
    (mean,) = communicating.tax_rows([one, other, not_measured("other", "s", "why")])
    assert mean.facts["tax"] == pytest.approx(2.4) and mean.remark.startswith("2.00x library")


def test_a_row_that_was_not_measured_says_so_and_is_in_no_mean():
    one = row(10.0, {"ours": None}, library=20.0)
    none = not_measured("op", "shape", "there is nothing")
    headings, (first, second) = table([one, none])
    assert dict(zip(headings, first, strict=True))["ratio"] == "2.00x"
    assert dict(zip(headings, second, strict=True))["remark"] == "not measured: there is nothing"
    assert set(second[2:-1]) == {"-"}
    rows = [each.as_dict() for each in (one, none, Row({"op": "op"}, {"ours": quantiles(9.0)}, facts={"tax": 3.0}))]
    assert on_gpu.means(rows, "ratio") == {"op": pytest.approx(2.0)} and on_gpu.means(rows, "tax") == {}
    assert on_gpu.figures(rows[0]) == "      10.0 us  2.00x library  50% of ceiling"
    assert on_gpu.figures(rows[1]) == "not measured: there is nothing"
    assert on_gpu.figures(row(10.0, {}, library=5.0).as_dict()) == "      10.0 us  0.50x library  50% of ceiling"


def test_blocks_copy_round_and_round_until_they_are_reported_to_stop(device):
    steps_each = 5
    copier = copy_interference.Copier(device, 4 * copy_interference._STEP, steps_each)
    copier.target.fill_(-1)
    copier.start(1)
    assert torch.equal(copier.target, copier._source)
    assert copier.copied_bytes(1) is None, "it came to its end by itself"
    copier.target.fill_(-1)
    copier.start(2)
    assert torch.equal(copier.target, copier._source) and copier.steps[:2].tolist() == [steps_each] * 2
    copier.stop.fill_(1)
    copier.target.fill_(-1)
    copier.start(2)
    assert (copier.target == -1).all() and copier.copied_bytes(2) == 0


def test_a_product_that_leaves_multiprocessors_to_the_copy_has_the_same_bits(device, virtual):
    x, w = (torch.randn(size, 32, device=device).bfloat16() for size in (70, 24))
    calls = copy_interference.products(x, w)
    processors = launch.multiprocessors(device)
    leaving = [blocks for name, blocks in calls if name == copy_interference.LEAVING]
    assert leaving == [blocks for blocks in copy_interference.BLOCKS if 0 < blocks < processors]
    assert {blocks for name, blocks in calls if name == copy_interference.FULL} == set(copy_interference.BLOCKS)
    for call in calls.values():
        call()


@pytest.mark.slow("bench")
def test_the_copy_compiles_without_spilling():
    code = """
import gate
for row in gate.check(["weft.bench.copy_interference"]):
    assert row.registers and not row.fault and not row.spilled_bytes, row
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=compiling())
    assert done.returncode == 0, done.stderr


def make_collectives(rank, sizes):
    gloo = torch.distributed.new_group(backend="gloo")
    ranks, made = communicator(None), 0
    for op in several_gpus.COLLECTIVES:
        for bytes in sizes:
            work = several_gpus.Collective(op, bytes, ranks.world_size)
            count, shard = work.count, work.count // ranks.world_size

            def both(new, count=count, shard=shard):
                return several_gpus_rank.Buffers(new(count, dtype=torch.bfloat16), new(shard, dtype=torch.bfloat16))

            buffers = {
                "ordinary": both(torch.empty),
                "symmetric": both(weft.empty_symmetric),
                "symmetric, any order": both(weft.empty_symmetric),
                "gloo": both(torch.empty),
            }
            calls, missing = several_gpus_rank.collective_calls(work, ranks, gloo, buffers)
            wanted = [kind for kind in buffers if op == "all_reduce" or kind != "symmetric, any order"]
            assert list(calls) == wanted and not missing
            for call in calls.values():
                call()
            made += len(calls)
    return made


@pytest.mark.parametrize("world", [2, 3])
def test_the_collectives_of_several_gpus_are_checked_before_they_are_timed(world):
    assert run_ranks(make_collectives, world, [1, 4096, 65536]) == [3 * (4 + 3 + 3)] * world


def make_a_wrong_collective(rank):
    several_gpus_rank._ours = lambda op, ranks, on, deterministic: lambda: on.whole.fill_(1)
    work = several_gpus.Collective("all_reduce", 4096, 2)
    buffers = several_gpus_rank.Buffers(torch.empty(work.count), torch.empty(work.count // 2))
    several_gpus_rank.collective_calls(work, communicator(None), None, {"ordinary": buffers})


def test_a_wrong_collective_is_not_timed():
    with pytest.raises(RanksFailedError, match="all_reduce of 4096 bytes, ordinary: [0-9]+ elements are wrong"):
        run_ranks(make_a_wrong_collective, 2)


def only_on_rank_1(x):
    if torch.distributed.get_rank() == 1:
        raise OSError("no peer memory\non this rank")
    return x


def peers_of_others(rank):
    """What of the packages that are there is measured."""
    ranks, gloo = communicator(None), torch.distributed.new_group(backend="gloo")

    def reduced(x):
        x = x.clone()
        torch.distributed.all_reduce(x, group=gloo)
        return x

    def norm(partial, residual, weight, eps):
        total = residual + reduced(partial)
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total

    def cannot(group, device):
        raise RuntimeError("no NVLink" if rank == 1 else "another rank cannot")

    makers = {
        "right": lambda group, device: Peer(reduced, norm),
        "wrong": lambda group, device: Peer(lambda x: x + 1, lambda *given: (given[0], given[1])),
        "of one rank": lambda group, device: Peer(only_on_rank_1),
        "cannot": cannot,
    }
    peer_collectives.MAKERS.update(makers)
    peers, absent = peer_collectives.open_peers(ranks, gloo, torch.device("cpu"))
    found = []
    for op in ("all_reduce", "all_gather"):
        work = several_gpus.Collective(op, 4096, ranks.world_size)
        buffers = several_gpus_rank.Buffers(
            torch.empty(2048, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.bfloat16)
        )
        calls, missing = several_gpus_rank.collective_calls(work, ranks, gloo, {"ordinary": buffers}, peers)
        found.append((list(calls), missing))
    calls, missing = several_gpus_rank.norm_calls(several_gpus.Norm(3, 33, 2), ranks, gloo, peers, torch.device("cpu"))
    for call in calls.values():
        assert call()[0].shape == (3, 33)
    return [*found, (list(calls), missing)], absent


def test_a_package_that_is_absent_or_fails_costs_its_own_figures_only():
    for (all_reduce, all_gather, norm), absent in run_ranks(peers_of_others, 2):
        calls, missing = all_reduce
        assert calls == ["ordinary", "right"] and list(missing) == ["wrong", "of one rank"]
        assert all(reason.endswith("elements are wrong") for reason in missing.values()), "of rank 0, on every rank"
        assert all_gather == (["ordinary"], {})
        calls, missing = norm
        assert calls == ["one kernel", "weft.all_reduce, add, rms_norm", "NCCL, add, rms_norm", "right"]
        assert list(missing) == ["wrong"] and missing["wrong"].endswith("elements are wrong")
        assert absent.pop("cannot") == "another rank cannot"
        assert set(absent) == {"vLLM", "FlashInfer"} and all("not installed" in reason for reason in absent.values())


def fails_our_norm(rank):
    weft.all_reduce_rms_norm = lambda partial, *given, group: (partial, partial)
    several_gpus_rank.norm_calls(several_gpus.Norm(1, 8, 2), communicator(None), None, {}, torch.device("cpu"))


def test_a_wrong_norm_is_not_timed():
    with pytest.raises(RanksFailedError, match="all_reduce_rms_norm of 1x8 bfloat16 W=2, one kernel: 1?[0-9] elements"):
        run_ranks(fails_our_norm, 2)


def make_products(rank, shapes):
    gloo = torch.distributed.new_group(backend="gloo")
    ranks, names = communicator(None), []
    for how in several_gpus_rank.LAYERS:
        for m, n, k in shapes:
            work = several_gpus.Product(how, "label", m, n, k)
            calls, missing = several_gpus_rank.product_calls(work, ranks, gloo, torch.device("cpu"))
            shapes_of = {tuple(call().shape) for call in calls.values()}
            assert shapes_of == {(m // ranks.world_size if how == "reduce_scatter" else m, n)} and not missing
            names.append(list(calls))
    return names


INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes in the interpreter"
)


@INTERPRETED
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow("bench"))])
def test_the_overlapped_products_of_several_gpus_are_checked_before_they_are_timed(world):
    names = run_ranks(make_products, world, [(12, 16, 24), (150, 40, 16)], timeout_s=200)
    expected = [several_gpus_rank.OVERLAPPED, several_gpus_rank.APART, several_gpus_rank.LIBRARY]
    assert names == [[expected] * 6] * world


def refuse_to_overlap(rank):
    def decline(place, x, sizes, b):
        if place.overlap == "always":
            raise ValueError("they do not reach each other")
        return original(place, x, sizes, b)

    original, several_gpus_rank.products.all_gather_matmul = several_gpus_rank.products.all_gather_matmul, decline
    gloo = torch.distributed.new_group(backend="gloo")
    work = several_gpus.Product("all_gather", "label", 8, 8, 8)
    return several_gpus_rank.product_calls(work, communicator(None), gloo, torch.device("cpu"))[1]


def test_products_that_cannot_overlap_say_why():
    assert run_ranks(refuse_to_overlap, 2) == [{several_gpus_rank.OVERLAPPED: "they do not reach each other"}] * 2


def test_the_slowest_rank_counts_and_what_is_missing_is_said():
    work = several_gpus.Collective("all_reduce", 4096, 2)
    missing = {"NCCL symmetric": "it is too old"}
    ranks = [
        several_gpus_rank.RankReport(
            "",
            [
                several_gpus_rank.RankResult(
                    {"ordinary": [a], "symmetric": [4.0], "symmetric, any order": [5.0], "NCCL": [12.0]},
                    {"NCCL": [b]},
                    missing,
                )
            ],
        )
        for a, b in [(3.0, 8.0), (6.0, 7.0)]
    ]
    ordinary, symmetric, _ = several_gpus.of_ranks(work, 0, ranks)
    assert (ordinary.ours.p50_us, ordinary.ratio, symmetric.ratio) == (6.0, 2.0, 3.0)
    assert ordinary.facts["graph_us"] == {"ours": None, "NCCL": 8.0}
    assert ordinary.remark == "NCCL symmetric not measured: it is too old"
    lacking = several_gpus_rank.RankResult({"ordinary": [1.0], "NCCL": [2.0]}, {}, {"symmetric": "no peer access"})
    work = several_gpus.Collective("all_gather", 4096, 2)
    _, symmetric = several_gpus.of_ranks(work, 0, [several_gpus_rank.RankReport("", [lacking])] * 2)
    assert symmetric.ours is None and symmetric.remark == "not measured: no peer access"


def test_a_norm_has_a_row_beside_separate_calls():
    result = several_gpus_rank.RankResult(
        {"one kernel": [4.0], "weft.all_reduce, add, rms_norm": [9.0], "NCCL, add, rms_norm": [12.0]},
        {"one kernel": [3.0]},
        {"FlashInfer": "not installed", "vLLM": "not installed"},
    )
    work = several_gpus.Norm(1, 4096, 2)
    (row,) = several_gpus.of_ranks(work, 0, [several_gpus_rank.RankReport("", [result])] * 2)
    assert row.ratio == 2.25 and row.of == {"op": "all_reduce_rms_norm", "shape": "1x4096 bfloat16 W=2"}
    assert row.remark == "FlashInfer not measured: not installed" and row.facts["graph_us"]["ours"] == 3.0


def test_without_several_gpus_every_row_says_that_it_was_not_measured(tmp_path, capsys):
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs here")
    from weft.cli import main

    file = tmp_path / "rows.json"
    assert main(["bench", "several_gpus", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["op"] for row in rows} == {
        *several_gpus.COLLECTIVES,
        "all_reduce_rms_norm",
        *several_gpus_rank._TITLES.values(),
    }
    assert {row["remark"] for row in rows} == {"not measured: needs several GPUs"}
    assert len(rows) == 9 * (3 + 2 + 2) + 4 + 3 * 2 * 2 * 2 and not any(row["times"] for row in rows)
    shapes = [row["shape"] for row in rows if row["op"] == "all_gather"]
    assert shapes[0] == "4 KiB bfloat16 W=2 ordinary" and shapes[-1] == "256 MiB bfloat16 W=2 symmetric"
    assert main(["bench", "several_gpus", "--only", "products"]) == 0
    assert "all_reduce" in capsys.readouterr().out


def test_a_contest_of_which_nothing_can_be_captured_has_no_replays():
    assert device_time.alternate({}, rounds=3) == {}


def test_more_ranks_than_gpus_are_refused_by_their_number():
    assert several_gpus.why_not(4, 2) == "needs 4 GPUs, and there are 2"
    assert several_gpus.why_not(None, 1) == several_gpus.why_not(1, 8) == "needs several GPUs"
    assert several_gpus.why_not(None, 2) is several_gpus.why_not(2, 8) is None


def test_the_kernels_benches_are_run_with_arguments_that_they_take(monkeypatch):
    asked = []
    for name in (*kernels.SUITES, *kernels.COMMUNICATING):
        suite = importlib.import_module(f"weft.bench.{name}")
        monkeypatch.setattr(suite, "run", lambda options, name=name: asked.append((name, vars(options))) or [name])
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    for arguments, names in (([], list(kernels.SUITES)), (["--communicating"], ["communicating"])):
        options = parser.parse_args(arguments)
        options.rounds = 5
        assert kernels.run(options) == names
    assert all(options["rounds"] == 5 for _, options in asked)
    given = {"rounds": 5, "model": None, "tp": [1, 8], "tokens": [1024, 16384]}
    assert asked[0] == ("matmul", given | {"only": "", "tiles": False, "invariant": False})


@pytest.mark.parametrize("name", host_time.OURS)
@pytest.mark.parametrize("world", [1, 2])
def test_the_calls_whose_host_time_is_taken_are_whole_ones(device, monkeypatch, name, world):
    for size in ("TOKENS", "WIDTH", "DEPTH"):
        monkeypatch.setattr(host_time, size, 48)
    bytes, call = host_time.OURS[name](device, world)
    results = run_as_ranks(call, world, bytes, device)
    for result in results:
        if name == host_time.GATHERED:
            y, whole = result
            assert y.shape == whole.shape == (48, 48) and y.isfinite().all()
        else:
            assert result.shape == (48 // world, 48) and result.isfinite().all()


def test_the_hosts_time_is_until_the_call_returns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.01))
    met = []
    samples = host_time.host_us({"slow": lambda: time.sleep(0.002), "fast": lambda: None}, 3, lambda: met.append(1))
    assert len(samples["slow"]) == len(samples["fast"]) == 3 and len(met) == 2 * (3 + host_time._WARM_UP)
    assert min(samples["slow"]) >= 2000 and sorted(samples["fast"])[1] < 2000


def test_without_a_gpu_the_host_time_of_the_peer_is_missing_with_a_reason():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert host_time.theirs(3) == ({}, "there is no CUDA device here")


def test_a_peer_that_raises_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def full():
        raise torch.OutOfMemoryError("40 GiB\nmore")

    found, remark = device_time._that_run({"library": dict, "FlexAttention": full})
    assert list(found) == ["library"] and remark == "FlexAttention left out: OutOfMemoryError: 40 GiB"


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_the_grouped_bench_measures_right_results(device):
    for contest in grouped_matmul.contests(device, {"tiny": (4, 2, 32, 16)}, tokens=24):
        contest.check()
        for peer in contest.peers.values():
            assert peer().shape[-2:] == contest.ours().shape[-2:] and contest.operations > 0


@pytest.mark.gpu
def test_a_tiny_tax_is_measured(device):
    for contest in (flag_tax.arriving, flag_tax.departing):
        made = contest("label", 512, 256, 256, 2, device, torch.bfloat16)
        (measured,) = device_time.measure([made], rounds=3)
        assert flag_tax.tax_of(measured) > 0 and measured.ratio > 0 and None not in measured.facts["graph_us"].values()


@pytest.mark.gpu
def test_a_product_beside_a_copy_is_measured_while_blocks_copy(device):
    x, w = (torch.randn(2048, 1024, device=device).bfloat16() for _ in range(2))
    calls = {key: call for key, call in copy_interference.products(x, w).items() if key[1] in (0, 8)}
    copier = copy_interference.Copier(device, copy_interference._BUFFER, copy_interference._MOST)
    found = copy_interference.times(calls, copier, rounds=3)
    assert found.keys() == calls.keys()
    for (_, blocks), (times, rate) in found.items():
        assert times.p50_us > 0 and (rate > 0) == (blocks > 0)


@pytest.mark.gpu
def test_a_product_whose_rows_come_from_host_memory_is_measured():
    (found,) = from_host_memory.lines(rounds=3, m=2048, k=1024)
    assert found.ours.p50_us > 0 and found.ratio > 0


@pytest.mark.gpu
def test_the_hosts_time_is_measured():
    found = host_time.ours(rounds=3)
    assert found.keys() == host_time.OURS.keys() and all(times.p50_us > 0 for times in found.values())
    theirs, reason = host_time.theirs(rounds=3)
    assert (theirs.keys() == host_time.OURS.keys()) != bool(reason)
