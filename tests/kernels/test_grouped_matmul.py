"""The grouped products against a loop over the experts in fp64."""

import pytest
import torch

from weft.kernels import launch
from weft.kernels.grouped_matmul import grouped_matmul, grouped_wgrad, tiles_of
from weft.ops.activation import ACTIVATIONS
from weft.testing import cases
from weft.testing.tolerance import assert_close

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows of each group: uneven, some empty, all in one, none at all, a single expert.
LOADS = [(5, 0, 33, 1, 17), (0, 0, 70, 0), (0, 0, 0), (41,), (16, 16, 32)]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def offsets_of(load, device):
    return torch.tensor([0, *load], device=device).cumsum(0).to(torch.int32)


def groups_of(load):
    start = 0
    for group, rows in enumerate(load):
        yield group, slice(start, start + rows)
        start += rows


def plain_product(a, b, bias, load):
    parts = [a[rows] @ b[group] + (0 if bias is None else bias[group]) for group, rows in groups_of(load)]
    return torch.cat(parts)


def wgrad_of(load):
    return lambda dy, x: torch.stack([dy[rows].t() @ x[rows] for _, rows in groups_of(load)])


def check(result, function, *inputs, what="result"):
    plain = function(*(t if t is None else t.clone() for t in inputs))
    exact = function(*(t if t is None else t.double() for t in inputs))
    assert_close(result, plain, exact, what)


@pytest.mark.parametrize(
    ("load", "dtype", "shape"), cases.covering(LOADS, DTYPES, [(43, 37), (48, 32), (40, 24)]), ids=str
)
def test_forward_dgrad_and_wgrad_of_any_load(device, load, dtype, shape):
    rows, (n, k) = sum(load), shape
    x, w = draw(device, rows, k, dtype=dtype), draw(device, len(load), n, k, dtype=dtype, seed=1)
    bias, dy = draw(device, len(load), n, dtype=dtype, seed=2), draw(device, rows, n, dtype=dtype, seed=3)
    offsets = offsets_of(load, device)
    y, z = grouped_matmul(x, w.transpose(1, 2), offsets, bias=bias)
    assert z is None
    check(y, lambda x, w, bias: plain_product(x, w.transpose(1, 2), bias, load), x, w, bias)
    check(grouped_matmul(dy, w, offsets)[0], lambda dy, w: plain_product(dy, w, None, load), dy, w)

    wgrad = wgrad_of(load)
    check(grouped_wgrad(dy, x, offsets), wgrad, dy, x)
    main_grad = draw(device, len(load), n, k, seed=4)
    before = main_grad.clone()
    assert grouped_wgrad(dy, x, offsets, main_grad=main_grad) is main_grad
    exact = before.double() + wgrad(dy.double(), x.double())
    assert_close(main_grad, before + wgrad(dy.float(), x.float()), exact)
    for group, part in groups_of(load):
        assert part.start < part.stop or torch.equal(main_grad[group], before[group])


@pytest.mark.parametrize(
    ("activation", "dtype", "shape"), cases.covering(ACTIVATIONS, DTYPES, [(21, 40), (32, 48)]), ids=str
)
def test_the_epilogue_applies_gate_and_activation_to_the_biased_sums(device, activation, dtype, shape):
    load, (n, k) = LOADS[0], shape
    x, w = draw(device, sum(load), k, dtype=dtype), draw(device, len(load), 2 * n, k, dtype=dtype, seed=1)
    bias, offsets = draw(device, len(load), 2 * n, dtype=dtype, seed=2), offsets_of(load, device)
    gate, up = (half.transpose(1, 2) for half in w.chunk(2, 1))
    y, z = grouped_matmul(x, gate, offsets, b_up=up, bias=bias, activation=activation, keep_z=True)

    def plain_z(x, w, bias):
        return plain_product(x, w.transpose(1, 2), bias, load)

    def plain_y(x, w, bias):
        gate, up = plain_z(x, w, bias).chunk(2, 1)
        return ACTIVATIONS[activation].apply(gate) * up

    check(z, plain_z, x, w, bias, what="z")
    check(y, plain_y, x, w, bias)
    y, z = grouped_matmul(x, gate, offsets, activation=activation, keep_z=True)  # without a gate
    check(y, lambda x, w: ACTIVATIONS[activation].apply(plain_product(x, w, None, load)), x, gate)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (50, 70)), (torch.bfloat16, (64, 80))], ids=str)
def test_every_tile_gives_the_product_and_a_group_has_its_own_bits(device, dtype, shape):
    load, (n, k) = (3, 40, 0, 19), shape
    x, w = draw(device, sum(load), k, dtype=dtype), draw(device, len(load), n, k, dtype=dtype, seed=1)
    dy, main_grad = draw(device, sum(load), n, dtype=dtype, seed=2), draw(device, len(load), n, k, seed=3)
    offsets = offsets_of(load, device)
    for config in tiles_of(launch.architecture_of(device), dtype, descriptors=k % 16 == 0):
        dw = grouped_wgrad(dy, x, offsets, config=config)
        check(dw, wgrad_of(load), dy, x, what=str(config))
        sum_ = grouped_wgrad(dy, x, offsets, main_grad=main_grad.clone(), config=config)
        assert_close(sum_, main_grad + dw, main_grad.double() + wgrad_of(load)(dy.double(), x.double()), str(config))
        y, _ = grouped_matmul(x, w.transpose(1, 2), offsets, config=config)
        check(y, lambda x, w: plain_product(x, w.transpose(1, 2), None, load), x, w, what=str(config))
        for group, rows in groups_of(load):
            alone = offsets_of([len(x[rows])], device)
            own = grouped_matmul(x[rows], w[group : group + 1].transpose(1, 2), alone, config=config)[0]
            assert torch.equal(own, y[rows]), "other experts' rows change nothing"
            assert torch.equal(grouped_wgrad(dy[rows], x[rows], alone, config=config), dw[group : group + 1])


@pytest.mark.parametrize("columns", [5, 16])
def test_nothing_is_read_or_written_beyond_the_last_group(device, columns):
    x, w = draw(device, 20, 16), draw(device, 2, columns, 16, seed=1)
    offsets = offsets_of((4, 7), device)
    x[11:] = float("nan")
    y, _ = grouped_matmul(x, w.transpose(1, 2), offsets)
    assert torch.isfinite(y[:11]).all()
    w[1] = float("nan")  # another expert's weight
    assert torch.isfinite(grouped_matmul(x, w.transpose(1, 2), offsets)[0][:4]).all()
    assert torch.isfinite(grouped_wgrad(x, x, offsets)).all()


@pytest.mark.parametrize("columns", [5, 32])
def test_a_gradient_has_nothing_of_the_groups_beside_it(device, columns):
    """A block of rows may begin before its group: those count as zeros, in both operands."""
    load = (4, 7, 0, 9)
    for group, rows in groups_of(load):
        x = torch.full((sum(load), columns), float("nan"), device=device, dtype=torch.bfloat16)
        x[rows] = draw(device, rows.stop - rows.start, columns, dtype=x.dtype)
        dw = grouped_wgrad(x, x, offsets_of(load, device))
        check(dw[group], lambda x: x.t() @ x, x[rows])


@pytest.mark.parametrize("architecture", launch.ARCHITECTURES)
def test_the_copy_engine_loads_what_lies_at_16_elements_and_large_groups_have_large_tiles(architecture):
    """Others take the smallest tile, in the variants that serve any size."""
    has_engine = architecture in ("sm_90", "sm_100")
    for (n, k), even in (((512, 256), True), ((520, 264), False)):
        for rows in (16, 1024):
            x, w = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((8 * rows, k), (8, n, k)))
            offsets = torch.empty(9, dtype=torch.int32, device="meta")
            with launch.recording(architecture) as launches:
                grouped_matmul(x, w.transpose(1, 2), offsets)
                grouped_wgrad(x.new_empty(8 * rows, n), x, offsets)
            assert {recorded.constants["DESCRIPTORS"] for recorded in launches} == {has_engine and even}
            forward = launches[0].constants
            large = forward["BLOCK_M"] * forward["BLOCK_N"] > 64 * 64
            assert large == (even and rows == 1024) or architecture == "sm_100", "whose smallest has 128 rows"


def test_what_the_kernels_do_not_take_is_refused(device):
    x, w, offsets = draw(device, 6, 4), draw(device, 2, 4, 3), offsets_of((2, 4), device)
    for error, message, call in (
        (ValueError, r"must be \[R, K\] and \[E, K, N\]", lambda: grouped_matmul(x, w[0], offsets)),
        (TypeError, "offsets is torch.int64", lambda: grouped_matmul(x, w, offsets.long())),
        (ValueError, r"offsets has shape \(2,\); it must be \(3,\)", lambda: grouped_matmul(x, w, offsets[:2])),
        (TypeError, "b is torch.float64", lambda: grouped_matmul(x, w.double(), offsets)),
        (ValueError, "a has strides", lambda: grouped_matmul(x.t().contiguous().t(), w, offsets)),
        (ValueError, "bias has shape", lambda: grouped_matmul(x, w, offsets, bias=w[0])),
        (ValueError, "activation='tanh'", lambda: grouped_matmul(x, w, offsets, activation="tanh")),
        (ValueError, "b_up has strides", lambda: grouped_matmul(x, w, offsets, b_up=w.transpose(0, 1).contiguous().transpose(0, 1))),
        (ValueError, "main_grad has shape", lambda: grouped_wgrad(x, x, offsets, main_grad=w)),
        (ValueError, r"must be \[R, N\] and \[R, K\]", lambda: grouped_wgrad(x, x[1:], offsets)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_without_rows_nothing_is_launched_whatever_the_tile():
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((0, 80), (1, 64, 80)))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    with launch.recording("sm_90") as launches:
        for tile in tiles_of("sm_90", torch.bfloat16):
            assert grouped_matmul(x, w.transpose(1, 2), offsets, config=tile)[0].shape == (0, 64)
    assert not launches
