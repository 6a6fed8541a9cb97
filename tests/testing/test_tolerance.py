"""The tolerance is not vacuous: it passes the plain op's own rounding, and no real fault."""

import math

import pytest
import torch

from weft.testing.tolerance import assert_close, error_in_tolerances, plain_dtype

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def sharded(x, weight, bias, world, dtype):
    parts = [a @ b.t() for a, b in zip(x.chunk(world, -1), weight.chunk(world, -1), strict=True)]
    return torch.stack([part.float() if dtype != torch.float64 else part for part in parts]).sum(0).to(dtype) + bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_right_result_passes_and_each_fault_does_not(dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((9, 64), (33, 64), (33,)))
    coarse = plain_dtype(dtype)
    plain = x.to(coarse) @ weight.t().to(coarse) + bias.to(coarse)
    exact = x.double() @ weight.double().t() + bias.double()
    right = sharded(x, weight, bias, 4, dtype)
    assert_close(right, plain, exact)
    faults = {
        "a bias added on two ranks": right + bias,
        "a rank's part left out": right - x[:, :16] @ weight[:, :16].t(),
        "two shards exchanged": sharded(x.roll(16, -1), weight, bias, 4, dtype),
        "an average for a sum": (right - bias) / 4 + bias,
        "one element wrong": torch.where(right == right.max(), right * 1.05, right),
        "a NaN": right.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.nan, dtype=dtype)),
    }
    for fault, result in faults.items():
        assert error_in_tolerances(result, plain, exact) > 1, fault


def test_another_shape_is_a_fault():
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="expected shape"):
        assert_close(torch.ones(3, 1), x, x)


def test_an_exact_op_must_be_met_exactly_up_to_its_rounding():
    zeros = torch.zeros(3)
    assert error_in_tolerances(zeros, zeros, zeros) == 0
    assert error_in_tolerances(zeros + 1e-30, zeros, zeros) == math.inf
