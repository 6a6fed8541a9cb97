"""warm_up: the products of a step are measured once, on one rank, and every rank takes what was measured."""

import contextlib
import logging
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.kernels import config, launch
from weft.kernels.matmul_tiles import Problem, listed
from weft.ops import kernel_choice
from weft.ops.matmul import FusedLinearFunction, GatedLinearFunction
from weft.testing.ranks import run_ranks
from weft.tools import tuning

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="CPU tensors, which kernels take interpreted")


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """Let products on the CPU follow measurements, as on a GPU, and forget these afterwards."""
    follow_measurements(monkeypatch.setattr, tmp_path)
    yield
    tuning.use([], "interpreter")
    config._added.clear()


def follow_measurements(setattr, cache):
    os.environ["XDG_CACHE_HOME"] = str(cache)
    setattr(kernel_choice, "on_kernel", lambda device: kernel_choice._preference != "library")


def times(faster):
    """Return what stands for the clock: weft's kernel takes 1 us where `faster`, else 3, and the library 2."""

    def medians_us(calls, device):
        for call in calls.values():
            call()
        return {name: 2.0 if name == "library" else (1.0 if faster else 3.0) for name in calls}

    return medians_us


@pytest.mark.kernel
@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_the_products_of_backward_are_those_that_a_step_asks_for(as_on_a_gpu, gated):
    x, weight = torch.randn(6, 24, requires_grad=True), torch.randn(32, 24, requires_grad=True)
    function, operands = (
        (GatedLinearFunction, (*weight.chunk(2), None, "silu"))
        if gated
        else (FusedLinearFunction, (weight, None, "gelu"))
    )
    with kernel_choice.asked() as forward:
        y = function.apply(x, *operands)
    with kernel_choice.asked() as backward:
        y.sum().backward()
    (problem,) = (problem for problem, _ in forward)
    assert set(tuning.backward_of(problem, False)) == {problem for problem, _ in backward}


@pytest.mark.kernel
@interpreted
def test_a_product_follows_its_newest_measurement(as_on_a_gpu, monkeypatch):
    fast = Problem(6, 32, 24, "nt", False, torch.float32)
    assert "not measured" in kernel_choice.algorithm(fast, CPU).reason
    monkeypatch.setattr(tuning, "medians_us", times(faster=True))
    entry = tuning.measured(fast, CPU)
    assert (entry.ours_us, entry.peer_us) == (1.0, 2.0) and entry.config.compiled() in listed(
        "interpreter", torch.float32
    )
    tuning.use([entry], "interpreter")
    assert str(kernel_choice.algorithm(fast, CPU)).startswith("weft kernel: the kernel has 2.00 times ATen's speed")
    monkeypatch.setattr(tuning, "medians_us", times(faster=False))
    tuning.use([tuning.measured(fast, CPU)], "interpreter")
    assert str(kernel_choice.algorithm(fast, CPU)).startswith("ATen: the kernel has 0.67 times ATen's speed")


PROBLEMS = [
    Problem(5, 9, 7, "nt", False, torch.float32),
    Problem(16, 24, 32, "nn", True, torch.bfloat16),
    Problem(9, 7, 5, "tn", False, torch.float32, "main_grad"),
    Problem(16, 16, 16, "tn", True, torch.bfloat16, "main_grad"),
    Problem(5, 9, 7, "nt", False, torch.float32, "gelu"),
    Problem(8, 16, 24, "nt", True, torch.bfloat16, "silu_gated"),
]


@pytest.mark.kernel
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_operands_are_of_the_kind_that_was_asked_for(device, problem, monkeypatch):
    """The contest asks for just this product, and our result is the library's."""
    calls = tuning.product_calls(problem, device)
    tile = listed(launch.architecture_of(device), problem.dtype, problem.narrow)[0]
    with kernel_choice.asked() as asked:
        monkeypatch.setattr(kernel_choice, "on_kernel", lambda device: True)
        if problem.fused == "main_grad":
            monkeypatch.setattr(kernel_choice, "prefer", lambda preference: contextlib.nullcontext())
            calls.library()
            assert {found for found, _ in asked} == {problem}
    for call in (lambda: calls.ours(tile), calls.library):
        rows, exact = calls.first_rows(call).double(), calls.exact
        torch.testing.assert_close(rows, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.kernel
@interpreted
def test_a_wrong_configuration_is_left_out(as_on_a_gpu, monkeypatch, caplog):
    problem = Problem(40, 32, 24, "nt", True, torch.float32)
    wrong, *_ = listed("interpreter", torch.float32)

    def product_calls(problem, device):
        calls = real(problem, device)
        return replace(calls, ours=lambda tile: calls.ours(tile) + (tile.compiled() == wrong))

    real = tuning.product_calls
    monkeypatch.setattr(tuning, "product_calls", product_calls)
    with caplog.at_level(logging.WARNING, "weft"):
        assert tuning.measured(problem, CPU).config.compiled() != wrong
    assert "left out: MatmulConfig(" in caplog.text


class Normed(nn.Module):
    """A split MLP with a buffer that forward changes, and random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(24), nn.Dropout(0.5)
        self.up = weft.ColumnParallelLinear(24, 32, activation="gelu")
        self.down = weft.RowParallelLinear(32, 24)

    def forward(self, x):
        return self.down(self.up(self.drop(self.norm(x))))


def check_warm_up(rank, cache, setting):
    follow_measurements(lambda owner, name, value: setattr(owner, name, value), cache)
    measured = []
    tuning.medians_us = times(faster=True)
    real = tuning.measured
    tuning.measured = lambda problem, device: (measured.append(problem), real(problem, device))[1]
    tuning._SETTING = setting
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(8, 24)
    before = [*(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
    weft.warm_up(model, x)
    for old, new in zip(before, [*model.buffers(), torch.get_rng_state()], strict=True):
        assert torch.equal(old, new)
    assert all(parameter.grad is None for parameter in model.parameters())
    if setting == "0":
        assert not measured and not config._added
        return None
    entries = config._added["matmul", "interpreter"]
    for problem in (
        Problem(8, 16, 24, "nt", True, torch.float32, "gelu"),
        Problem(8, 24, 16, "nt", True, torch.float32),
    ):
        for product in (problem, *tuning.backward_of(problem, False)):
            assert kernel_choice.algorithm(product, CPU).kernel, product
    assert "2.00 times ATen's speed" in str(weft.explain(model, tokens=8))
    first = [len(measured), len(entries)]
    weft.warm_up(model, x)  # from disk, or by the first rank's word
    assert [len(measured), len(config._added["matmul", "interpreter"])] == [first[0], 2 * first[1]]
    return first


@pytest.mark.kernel
@interpreted
def test_one_rank_measures_for_all_and_only_once(tmp_path):
    (measured, entries), (by_other, entries_there) = run_ranks(check_warm_up, 2, str(tmp_path), "")
    assert measured == entries == entries_there == 6 and by_other == 0
    kept = run_ranks(check_warm_up, 2, str(tmp_path), "")
    assert kept == [[0, 6], [0, 6]]  # another run finds them


@pytest.mark.kernel
@interpreted
def test_weft_tune_0_measures_nothing(tmp_path):
    run_ranks(check_warm_up, 2, str(tmp_path), "0")
    assert not list(tmp_path.iterdir())


def check_first_call(rank, cache):
    follow_measurements(lambda owner, name, value: setattr(owner, name, value), cache)
    tuning.medians_us = times(faster=False)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = weft.parallelize(model, weft.init_mesh(tp=2), tune=True)
    assert not config._added
    model(torch.ones(4, 8)).sum().backward()
    found = config._added["matmul", "interpreter"]
    model(torch.ones(4, 8)).sum().backward()
    assert config._added["matmul", "interpreter"] is found and found
    model = weft.parallelize(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), weft.init_mesh(tp=2))
    model(torch.ones(40, 8))
    assert config._added["matmul", "interpreter"] is found  # not asked for


@pytest.mark.kernel
@interpreted
def test_parallelize_measures_in_the_first_call_where_it_is_asked_to(tmp_path):
    run_ranks(check_first_call, 2, str(tmp_path))


def check_other_gpus(rank):
    tuning._name_of = lambda device: f"GPU {rank}"
    with pytest.raises(ValueError, match="the ranks have GPU 0 and GPU 1"):
        weft.warm_up(weft.ColumnParallelLinear(4, 8), torch.ones(2, 4))
    dist.barrier()


def test_ranks_with_different_gpus_are_refused():
    run_ranks(check_other_gpus, 2)


def test_on_the_cpu_nothing_is_measured():
    weft.warm_up(nn.Linear(4, 4), torch.ones(2, 4))
    assert not config._added
