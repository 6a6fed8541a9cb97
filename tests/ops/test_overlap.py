"""Layers whose communication overlaps with their products: the bits are those of one after the other."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from interpreter import in_the_interpreter

import weft
from weft.kernels import interpreted
from weft.ops import kernel_choice
from weft.testing.peers import delay_meetings
from weft.testing.ranks import run_ranks, try_ranks

pytestmark = [pytest.mark.kernel, in_the_interpreter]


def step(overlap, style, sequence_parallel, shape, dim, activation, dtype, frozen=False):
    """y, and the gradients of x, weight and bias, of this rank's part of a layer with 37 outputs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    options = dict(sequence_parallel=sequence_parallel, sequence_dim=dim, activation=activation, overlap=overlap)
    layer = weft.ParallelLinear(shape[-1], 37, style=style, dtype=dtype, **options)
    layer.requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(1)

    def split(whole, along):
        return whole.split(weft.split_sizes(whole.size(along), world), along)[rank]

    x = torch.randn(*shape, generator=generator).to(dtype)
    if style == "row":
        x = split(x, -1)
    elif sequence_parallel:
        x = split(x, dim)
    x = x.clone().requires_grad_()
    y = layer(x)
    dy = torch.randn(*shape[:-1], 37, generator=generator).to(dtype)
    if style == "column":
        dy = split(dy, -1)
    elif sequence_parallel:
        dy = split(dy, dim)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def compare(rank, style, sequence_parallel, cases):
    delay_meetings(rank, longest_s=0.003)
    with kernel_choice.prefer("kernel"):
        for case in cases:
            apart = step("never", style, sequence_parallel, *case)
            for _ in range(2):
                together = step("always", style, sequence_parallel, *case)
                for name, one, other in zip(["y", "dx", "dw", "db"], apart, together, strict=True):
                    same = f"{name} of {case}: {{}}".format
                    torch.testing.assert_close(other, one, rtol=0, atol=0, msg=same)


@pytest.mark.parametrize(
    ("world", "sequence_parallel"),
    [(2, True), (3, False), pytest.param(5, True, marks=pytest.mark.slow("pytorch_ext/ops", "kernels"))],
)
@pytest.mark.parametrize("style", ["column", "row"])
def test_overlapping_changes_no_bit_of_a_result_or_a_gradient(world, style, sequence_parallel):
    cases = [((2, 7, 24), 1, "gelu", torch.bfloat16), ((23, 17), 0, None, torch.float32)]
    if world == 2:
        cases += [((5, 3, 8), 0, None, torch.float16), ((700, 64), 0, "gelu", torch.float16, True)]
    run_ranks(compare, world, style, sequence_parallel, cases, timeout_s=200)


def dies(rank, style, meeting):
    count = 0

    def die() -> None:
        nonlocal count
        count += 1
        if count == meeting:
            os._exit(7)

    if rank == 1:
        interpreted.at_meeting = die
    torch.manual_seed(0)
    layer = weft.ParallelLinear(12, 20, style=style, sequence_parallel=True, overlap="always")
    x = torch.randn(4, 12 if style == "column" else layer.weight.size(1)).requires_grad_()
    expected, start = None, time.monotonic()
    try:
        while time.monotonic() - start < 20:
            y = layer(x)
            expected = y.detach() if expected is None and not y.isnan().any() else expected
            assert y.isnan().any() or torch.equal(y, expected)
            y.sum().backward()
    except weft.RankLostError as error:
        return str(error), time.monotonic() - start
    return "no error", 0


@pytest.mark.parametrize(("style", "meeting"), [("column", 3), ("column", 8), ("row", 1), ("row", 6)])
def test_a_rank_that_dies_is_named_by_the_others_and_no_sum_is_wrong(style, meeting):
    outcomes = try_ranks(dies, 3, style, meeting, timeout_s=60)
    assert outcomes[1].exit_code == 7
    for survivor in (outcomes[0], outcomes[2]):
        text, seconds = survivor.value
        assert re.match(r"ranks? (0, |)1\b|ranks? 1\b", text) and seconds < 15, survivor


def disagrees(rank):
    layer = weft.ParallelLinear(12, 20, style="column", sequence_parallel=True, overlap="always")
    layer(torch.randn(4, 12))  # the windows are there
    try:
        # 8 rows on one rank, 4 on the other, but both believe that the other has as many
        layer.communicator.all_sizes = lambda x, dim: [x.size(dim)] * 2
        for _ in range(2):
            y = layer(torch.randn(8 if rank else 4, 12))
            assert y.isnan().all()
    except weft.CollectiveMismatchError as error:
        dist.barrier()  # a rank that left would be one that was lost
        return str(error)
    return "no error"


def test_ranks_that_pass_different_sizes_raise():
    for text in run_ranks(disagrees, 2):
        assert "all_gather + matmul" in text


def cannot(rank):
    layer = weft.ParallelLinear(12, 20, style="row", overlap="always", dtype=torch.float64)
    with pytest.raises(ValueError, match='overlap="always": the communicating kernels do not take torch.float64'):
        layer(torch.randn(4, layer.weight.size(1), dtype=torch.float64))
    with pytest.raises(ValueError, match="overlap='yes' is not one of 'auto', 'never', 'always'"):
        weft.ParallelLinear(12, 20, style="row", overlap="yes")
    found = weft.explain(torch.nn.Sequential(layer, weft.ColumnParallelLinear(8, 8, sequence_parallel=True)))
    assert "do not take torch.float64" in found.layers[0].communication["forward"]
    assert found.layers[1].communication == {
        "forward": f"all_gather, one after the other: {CPU}",
        "dgrad": f"reduce_scatter, one after the other: {CPU}",
    }
    with kernel_choice.prefer("kernel"):
        layer = weft.ColumnParallelLinear(2048, 2048)
        small, large = (weft.explain(layer, tokens=tokens).layers[0].communication["dgrad"] for tokens in (8, 1024))
    assert small == "all_reduce, one after the other: 0.1 MiB travel, the crossover is 8 MiB (estimated)"
    assert large == (
        "all_reduce, overlapped: 16.0 MiB travel, the crossover is 8 MiB (estimated); if the ranks reach each other's "
        "memory, which the first such call finds out"
    )
    cpu = torch.device("cpu")
    with kernel_choice.prefer("kernel"):
        layer.communicator.unreached[cpu] = "they are far apart"
        message = weft.explain(layer, tokens=1024).layers[0].communication["dgrad"]
        assert message == "all_reduce, one after the other: they are far apart"
        layer.communicator.unreached.clear()
        message = weft.explain(weft.RowParallelLinear(65536, 16), tokens=16).layers[0].communication["forward"]
    assert "one after the other: the product splits K in" in message, "then the bits would be others"


CPU = "the product is not our kernel's (ATen: the kernels run on CUDA devices, the tensors are on the CPU)"


def test_what_cannot_overlap_says_why():
    run_ranks(cannot, 2)


def one_rank(rank):
    layer = weft.ColumnParallelLinear(4, 6, overlap="always")
    assert layer(torch.ones(2, 4)).shape == (2, 6)
    assert weft.explain(layer).layers[0].communication["dgrad"] == "all_reduce, one after the other: there is one rank"


def test_one_rank_has_nothing_to_overlap():
    run_ranks(one_rank, 1)
