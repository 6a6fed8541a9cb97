"""Rows of tokens in the order of experts, and the sums of a token's rows."""

import pytest
import torch

from weft.kernels.permute import permute, unpermute, unpermute_backward
from weft.testing import cases
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("dtype", "to"), cases.covering(DTYPES, [None, *DTYPES]), ids=str)
def test_rows_are_those_of_their_tokens_in_the_wanted_type(device, dtype, to):
    x = draw(device, 7, 1031, dtype=dtype)
    token = torch.tensor([3, 3, 0, 6, 5], device=device)
    assert torch.equal(permute(x, token, to), x[token].to(to or dtype))
    turned = draw(device, 1031, 7, dtype=dtype).t()
    assert torch.equal(permute(turned, token), turned[token])
    assert permute(x, token[:0]).shape == (0, 1031)


@pytest.mark.parametrize(("dtype", "to"), cases.covering(DTYPES, [None, *DTYPES]), ids=str)
def test_a_token_is_the_sum_of_its_rows_in_order_rounded_once(device, dtype, to):
    rows = draw(device, 9, 1031, dtype=dtype)
    place = torch.tensor([[0, 3, 8], [-1, -1, 5], [-1, -1, -1], [1, 2, 4]], device=device)
    y = unpermute(rows, place, to)
    total = torch.zeros(4, 1031, device=device)
    for k in range(3):
        total += torch.where(place[:, k : k + 1] >= 0, rows[place[:, k]].float(), 0)
    assert torch.equal(y, total.to(to or dtype))
    exact = torch.stack([rows[[place for place in places if place >= 0]].double().sum(0) for places in place.tolist()])
    assert_close(y.float(), total.to(to or dtype).float(), exact)


@pytest.mark.parametrize(("dtype", "of_scale"), cases.covering(DTYPES, DTYPES), ids=str)
def test_a_token_is_the_weighted_sum_of_its_rows_with_both_gradients(device, dtype, of_scale):
    rows, scale, dy = draw(device, 5, 1031, dtype=dtype), draw(device, 5, dtype=of_scale), draw(device, 3, 1031, seed=1)
    place = torch.tensor([[0, 3], [-1, 2], [1, 4]], device=device)
    token = torch.tensor([0, 2, 1, 0, 2], device=device)
    dy = dy.to(dtype)

    def plain(rows, scale):
        rows, scale = rows.clone().requires_grad_(), scale.clone().requires_grad_()
        y = torch.zeros(3, 1031, dtype=rows.dtype, device=device).index_add(
            0, token, rows * scale[:, None].to(rows.dtype)
        )
        y.backward(dy.to(y.dtype))
        return y.detach(), rows.grad, scale.grad

    found = unpermute(rows, place, scale=scale), *unpermute_backward(dy, rows, token, scale)
    of_type, exact = plain(rows, scale), plain(rows.double(), scale.double())
    for name, result, other, true in zip(("y", "drows", "dscale"), found, of_type, exact, strict=True):
        assert result.dtype == other.dtype
        assert_close(result, other, true, name)
    again = unpermute(rows, place, scale=scale), *unpermute_backward(dy, rows, token, scale)
    assert all(map(torch.equal, found, again))


def test_what_the_kernels_do_not_take_is_refused(device):
    x, index = draw(device, 4, 3), torch.zeros(4, dtype=torch.int64, device=device)
    for error, message, call in (
        (TypeError, "index is torch.int32", lambda: permute(x, index.int())),
        (ValueError, "must be a matrix and 1 contiguous", lambda: permute(x, index.view(2, 2))),
        (ValueError, "must be a matrix and 2 contiguous", lambda: unpermute(x, index.view(2, 2).t())),
        (TypeError, "x is torch.float64", lambda: unpermute(x.double(), index.view(2, 2))),
        (TypeError, "dtype=torch.float64", lambda: permute(x, index, torch.float64)),
        (ValueError, "scale has shape", lambda: unpermute(x, index.view(2, 2), scale=x[0])),
        (ValueError, "scale has strides", lambda: unpermute(x, index.view(2, 2), scale=x[:, 0])),
        (ValueError, "rows has shape", lambda: unpermute_backward(x, x[:2], index, x[:2, 0].clone())),
    ):
        with pytest.raises(error, match=message):
            call()
