"""The matmul kernel against a product in fp64."""

from dataclasses import replace

import pytest
import torch

from weft.kernels import launch, signal
from weft.kernels.activation import ACTIVATIONS, gated_backward, gated_forward
from weft.kernels.chunks import Rows
from weft.kernels.config import MatmulConfig, table
from weft.kernels.matmul import Arrivals, matmul
from weft.kernels.matmul_tiles import Problem, _heuristic, choose_tile, listed
from weft.ops.activation import ACTIVATIONS as PLAIN
from weft.testing import cases, reference
from weft.testing.peers import abandoned
from weft.testing.tolerance import assert_close, error_in_tolerances

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def operands(device, m, n, k, dtype=torch.float32):
    """x [M, K], w [N, K], bias [N]."""
    return (draw(device, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(m, k), (n, k), (n,)]))


def check(result, function, *inputs, what="result"):
    """result against function of the inputs in fp64; the tolerance is from function in their own type."""
    plain = function(*(t if t is None else t.clone() for t in inputs))
    exact = function(*(t if t is None else t.double() for t in inputs))
    assert_close(result, plain, exact, what)


@pytest.mark.parametrize(("size", "dtype"), cases.covering(cases.MATMULS, DTYPES), ids=str)
def test_forward_dgrad_and_wgrad_of_any_size(device, size, dtype):
    m, n, k = size
    x, w, bias = operands(device, m, n, k, dtype)
    y, z = matmul(x, w.t(), bias=bias)
    assert z is None
    check(y, reference.linear, x, w, bias)
    dy = draw(device, m, n, dtype=dtype, seed=7)
    check(matmul(dy, w)[0], torch.matmul, dy, w)
    check(matmul(dy.t(), x)[0], torch.matmul, dy.t(), x)


@pytest.mark.sanitize
@pytest.mark.parametrize("split_k", [1, 3])
def test_every_configuration_gives_the_product(device, split_k):
    x, w, bias = operands(device, 70, 67, 136, torch.bfloat16)
    for aligned in (True, False):
        a, b = (x, w) if aligned else (x[:, 1:], w[:, 1:])
        for config in listed(launch.architecture_of(device), x.dtype, narrow=not aligned):
            config = replace(config, split_k=split_k, group_m=3)
            check(matmul(a, b.t(), bias=bias, config=config)[0], reference.linear, a, b, bias, what=str(config))


def tile_of_two_sums(device):
    for tile in listed(launch.architecture_of(device), torch.bfloat16):
        if tile.rest_n:
            return tile
    pytest.skip("only sm_90 and the interpreter have a tile of two sums")


@pytest.mark.parametrize(("layout", "split_k"), cases.covering(["nt", "nn", "tn"], [1, 3]))
def test_a_tile_of_two_sums_has_every_layout_and_epilogue(device, layout, split_k):
    """The last tile ends in its first sum, at the border, or in its second sum."""
    config = replace(tile_of_two_sums(device), split_k=split_k)
    border = 2 * config.block_n - config.rest_n
    for n in (border - 8, border, border + 8):
        n += layout == "nt"  # no row of the weight lies at 16 bytes then, nor of the result
        a, b = draw(device, 72, 136, dtype=torch.bfloat16), draw(device, 136, n, dtype=torch.bfloat16, seed=1)
        a, b = (LAYOUTS["columns" if letter == "t" else "rows"](x) for letter, x in zip(layout, (a, b), strict=True))
        bias, main_grad = draw(device, n, dtype=torch.bfloat16, seed=2), draw(device, 72, n, seed=3)
        check(matmul(a, b, config=config)[0], torch.matmul, a, b)
        y, z = matmul(a, b, bias=bias, activation="silu", keep_z=True, config=config)
        check(y, lambda a, b, bias: reference.linear(a, b.t(), bias, activation="silu"), a, b, bias)
        check(z, lambda a, b, bias: reference.linear(a, b.t(), bias), a, b, bias, what="z")
        before, exact = main_grad.clone(), main_grad.double() + a.double() @ b.double()
        matmul(a, b, addend=main_grad, out=main_grad, config=config)
        assert_close(main_grad, before + a.float() @ b.float(), exact)


def test_a_tile_of_two_sums_waits_for_its_rows(device):
    tile = tile_of_two_sums(device)
    x, w, _ = operands(device, 2 * tile.block_m, tile.block_n, 40, torch.bfloat16)
    rows = Rows(1, (tile.block_m, tile.block_m), tile.block_m)
    peers = abandoned(device, rank=0, timeout_s=0.3, bytes=signal.DATA_OFFSET)
    for there in (1, 0):
        flags = torch.tensor([1, there], dtype=torch.int32, device=device)
        y, _ = matmul(x, w.t(), arrivals=Arrivals(peers, rows, flags), config=tile)
        if there:
            assert torch.equal(y, matmul(x, w.t(), config=tile)[0])
        else:
            assert y[tile.block_m :].isnan().all(), "rows that never come are NaN"


def test_a_gated_product_and_one_that_is_not_aligned_have_no_tile_of_two_sums(device):
    x, w, _ = operands(device, 40, 48, 32, torch.bfloat16)
    tile = tile_of_two_sums(device)
    with pytest.raises(ValueError, match="does not exist"):
        matmul(x, w.t(), b_up=w.t(), activation="silu", config=tile)
    with pytest.raises(ValueError, match="does not exist"):
        matmul(x[:, 1:], w.t()[1:], config=tile)


@pytest.mark.parametrize(("activation", "split_k"), cases.covering([None, *ACTIVATIONS], [1, 3]))
def test_epilogues_apply_the_activation_once_to_the_biased_sum(device, activation, split_k):
    x, w, bias = operands(device, 37, 41, 70)
    config = replace(listed(launch.architecture_of(device), x.dtype, narrow=True)[0], split_k=split_k)
    y, z = matmul(x, w.t(), bias=bias, activation=activation, keep_z=True, config=config)
    check(y, lambda *t: reference.linear(*t, activation=activation), x, w, bias)
    check(z, reference.linear, x, w, bias, what="z")


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "split_k"), cases.covering(DTYPES, [2, 1]), ids=str)
def test_gated_products_are_those_of_a_fused_weight_and_of_a_split_one(device, dtype, split_k):
    x, gate, _ = operands(device, 35, 43, 67, dtype)
    up, bias = draw(device, 43, 67, dtype=dtype, seed=3), draw(device, 86, dtype=dtype, seed=4)
    fused = torch.cat([gate, up])
    config = replace(listed(launch.architecture_of(device), dtype, narrow=True)[0], split_k=split_k)
    y, z = matmul(x, gate.t(), b_up=up.t(), bias=bias, activation="silu", keep_z=True, config=config)
    check(y, reference.gated_linear, x, gate, up, bias)
    check(z, reference.linear, x, fused, bias, what="z")
    from_fused, _ = matmul(x, fused[:43].t(), b_up=fused[43:].t(), bias=bias, activation="silu", config=config)
    assert torch.equal(y, from_fused)


@pytest.mark.parametrize(("activation", "dtype"), cases.covering(ACTIVATIONS, DTYPES), ids=str)
def test_gated_forward_is_the_product_of_activation_and_up(device, activation, dtype):
    z = draw(device, 2 * 1031, 5, dtype=dtype).t()

    def plain(z):
        gate, up = z.chunk(2, 1)
        return PLAIN[activation].apply(gate) * up

    check(gated_forward(z, activation), plain, z)


@pytest.mark.parametrize(("activation", "dtype"), cases.covering(ACTIVATIONS, DTYPES), ids=str)
def test_gated_backward_is_the_gradient(device, activation, dtype):
    z, dy = draw(device, 5, 2 * 1031, dtype=dtype), draw(device, 1031, 5, dtype=dtype, seed=1).t()

    def gradient(z, dy):
        z = z.detach().requires_grad_()
        gate, up = z.chunk(2, 1)
        return torch.autograd.grad(PLAIN[activation].apply(gate) * up, z, dy)[0]

    check(gated_backward(dy, z, activation), gradient, z, dy)


@pytest.mark.parametrize(("dtype", "split_k"), cases.covering(DTYPES, [1, 4]), ids=str)
def test_main_grad_accumulates_in_fp32(device, dtype, split_k):
    """Steps whose products are far smaller than the sum: a bf16 accumulator would lose them."""
    main_grad = torch.full((33, 20), 256.0, device=device)
    expected = main_grad.double()
    config = replace(listed(launch.architecture_of(device), dtype, narrow=True)[0], split_k=split_k)
    for step in range(3):
        dy, x = draw(device, 70, 33, dtype=dtype, seed=step) / 64, draw(device, 70, 20, dtype=dtype, seed=9 + step)
        out, _ = matmul(dy.t(), x, addend=main_grad, out=main_grad, config=config)
        assert out is main_grad
        expected += dy.t().double() @ x.double()
    assert (main_grad.double() - expected).abs().max() < 3 * torch.finfo(torch.float32).eps * 256
    assert ((main_grad.bfloat16() - 256).abs().max() > 0) and not torch.equal(main_grad, main_grad.bfloat16().float())


LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: torch.stack([t, t + 9], 1).flatten(0, 1)[::2],
    "every second column": lambda t: torch.stack([t, t + 9], 2).flatten(1)[:, ::2],
    "an odd offset": lambda t: torch.cat([t[:, :1] + 9, t], 1)[:, 1:],
    "one row for all": lambda t: t[:1].expand(*t.shape),
}


@pytest.mark.parametrize(("of_a", "of_b"), cases.covering(LAYOUTS, [*LAYOUTS][1:]) + cases.covering(LAYOUTS, LAYOUTS))
def test_any_strides_and_offsets(device, of_a, of_b):
    a, b = LAYOUTS[of_a](draw(device, 33, 48)), LAYOUTS[of_b](draw(device, 48, 40, seed=1))
    check(matmul(a, b)[0], torch.matmul, a, b)


@pytest.mark.parametrize("of_out", [name for name in LAYOUTS if name != "one row for all"])
def test_any_output_is_written_whole_and_nothing_else(device, of_out):
    x, w, bias = operands(device, 33, 40, 48)
    backing = LAYOUTS[of_out](torch.full((33, 40), torch.nan, device=device))
    matmul(x, w.t(), bias=bias, out=backing)
    check(backing, reference.linear, x, w, bias)
    base = backing._base if backing._base is not None else backing
    assert base.numel() - int(base.isnan().sum()) == backing.numel()


def test_empty_products_are_zeros_or_nothing(device):
    bias = draw(device, 4)
    assert torch.equal(matmul(draw(device, 3, 0), draw(device, 0, 4), bias=bias)[0], bias.expand(3, 4))
    assert matmul(draw(device, 0, 5), draw(device, 5, 4))[0].shape == (0, 4)
    assert matmul(draw(device, 3, 5), draw(device, 5, 0))[0].shape == (3, 0)


def test_the_sum_over_k_is_in_order_and_in_fp32(device):
    """In fp32 and in this order 2^24 + 1 + ... - 2^24 loses each 1; in another order, or in pieces, it would not."""
    tile = max(listed(launch.architecture_of(device), torch.bfloat16, narrow=True), key=lambda tile: tile.block_k)
    block, k = tile.block_k, 4 * tile.block_k
    a = torch.zeros(1, k, device=device, dtype=torch.bfloat16)
    a[0, 0], a[0, block], a[0, 2 * block], a[0, 3 * block] = 2.0**24, 1.0, 1.0, -(2.0**24)
    ones = torch.ones(k, 1, device=device, dtype=torch.bfloat16)
    assert matmul(a, ones, out_dtype=torch.float32, config=tile)[0].item() == 0.0
    # In two pieces: (2^24 + 1) + (1 - 2^24) = 2^24 + (1 - 2^24) = 1.
    assert matmul(a, ones, out_dtype=torch.float32, config=replace(tile, split_k=2))[0].item() == 1.0
    # An accumulator in bf16 would stop at 256.
    many = torch.ones(1, 300, device=device, dtype=torch.bfloat16)
    assert matmul(many, many.t(), out_dtype=torch.float32)[0].item() == 300.0


def test_split_sums_have_the_same_bits_each_time(device):
    x, w, bias = operands(device, 20, 24, 200, torch.bfloat16)
    config = replace(listed(launch.architecture_of(device), x.dtype, narrow=False)[0], split_k=5)
    first = matmul(x, w.t(), bias=bias, config=config)[0]
    for _ in range(3):
        assert torch.equal(first, matmul(x, w.t(), bias=bias, config=config)[0])


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_a_plain_result_leaves_a_tile_at_a_time_where_shared_memory_has_room(architecture):
    """Each strip waits for the one before it."""
    a, w = (torch.empty(512, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for tile in listed(architecture, torch.bfloat16):
        with launch.recording(architecture) as launches:
            matmul(a, w.t(), config=tile)
            matmul(a, w.t(), config=tile, bias=w[0])
        plain, biased = (recorded.constants["STRIP"] for recorded in launches)
        operands = tile.stages * (tile.block_m + tile.block_n) * tile.block_k * 2
        resident = 2 if tile.block_m * tile.block_n <= 64 * 128 else 1
        assert plain >= biased and (operands + tile.block_m * plain * 2) * resident <= 227 * 1024
    with launch.recording(architecture) as launches:
        matmul(a, w.t(), config=listed(architecture, torch.bfloat16)[0])
    assert launches[0].constants["STRIP"] == 256, "one store for the largest tile"


def test_infinities_and_nans_come_through(device):
    x, w, _ = operands(device, 33, 20, 40)
    x[2, 3], x[4, 5] = torch.inf, torch.nan
    y, _ = matmul(x, w.t())
    expected = x @ w.t()
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())


def test_the_tolerance_would_catch_a_missing_last_column(device):
    x, w, bias = operands(device, 33, 31, 65)
    wrong = reference.linear(x[:, :-1], w[:, :-1], bias)
    assert (
        error_in_tolerances(
            wrong, reference.linear(x, w, bias), reference.linear(x.double(), w.double(), bias.double())
        )
        > 10
    )


def test_the_heuristic_splits_what_cannot_fill_the_device(device):
    def split(m, n, k):
        return choose_tile(Problem(m, n, k, "nt", True, torch.bfloat16), device).config.split_k

    with launch.recording("sm_90"):
        assert split(64, 1024, 8192) > 1
        assert split(8192, 8192, 8192) == 1


def test_the_heuristic_takes_the_tile_that_makes_one_wave_of_a_thin_gradient():
    """132 tiles of 128 x 192 for 132 multiprocessors; no table has this depth."""
    with launch.recording("sm_90"):
        problem = Problem(768, 4096, 65536, "tn", True, torch.bfloat16, "main_grad")
        choice = choose_tile(problem, torch.device("meta"))
        assert choice.source == "heuristic" and (choice.config.block_m, choice.config.block_n) == (128, 192)


def test_the_heuristic_takes_most_tiles_that_were_measured_as_the_fastest():
    rows = table("matmul", "sm_90", MatmulConfig)
    measured = {row.config.compiled() for row in rows}
    agreeing = 0
    for row in rows:
        m, n, k = (row.problem[size] for size in "mnk")
        narrow = row.problem["fused"].endswith("_gated") or not row.problem["aligned"]
        tiles = [tile for tile in listed("sm_90", torch.bfloat16, narrow) if tile in measured]
        agreeing += _heuristic(m, n, k, tiles, 132, "sm_90") == row.config
    assert agreeing >= 0.9 * len(rows)


def test_bad_input_is_refused_with_the_value_and_the_way_out(device):
    x, w = draw(device, 4, 6), draw(device, 6, 5)
    tile = listed(launch.architecture_of(device), torch.float32, narrow=True)[0]
    wide = torch.float64
    for error, text, call in [
        (ValueError, r"a \(4, 6\) and b \(5, 6\) must be \[M, K\] and \[K, N\]", lambda: matmul(x, w.t())),
        (ValueError, "flatten leading dimensions", lambda: matmul(x[None], w)),
        (TypeError, "a is torch.float64; it must be one of", lambda: matmul(x.to(wide), w.to(wide))),
        (TypeError, "b is torch.bfloat16", lambda: matmul(x, w.bfloat16())),
        (ValueError, "one device", lambda: matmul(x, w.to("meta"))),
        (ValueError, r"bias has shape \(4,\); it must be \(5,\)", lambda: matmul(x, w, bias=x[:, 0])),
        (ValueError, r"bias has shape \(5,\); it must be \(10,\)", lambda: matmul(x, w, b_up=w, bias=w[0])),
        (ValueError, r"b_up has shape", lambda: matmul(x, w, b_up=w[:, 1:])),
        (ValueError, "takes no addend", lambda: matmul(x, w, b_up=w, addend=draw(device, 4, 5))),
        (ValueError, r"out has shape \(5, 4\)", lambda: matmul(x, w, out=draw(device, 5, 4))),
        (ValueError, "activation='swish' is not one of None, 'gelu'", lambda: matmul(x, w, activation="swish")),
        (ValueError, "precision='bf16x3' is not one of 'ieee', 'tf32'", lambda: matmul(x, w, precision="bf16x3")),
        (ValueError, "does not exist on .*; there are", lambda: matmul(x, w, config=replace(tile, block_m=48))),
        (ValueError, "share memory", lambda: matmul(x, w, out=draw(device, 5).expand(4, 5))),
        (ValueError, "split_k=0 must be 1 to 16", lambda: matmul(x, w, config=replace(tile, split_k=0))),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_tensors_where_no_kernel_runs_are_refused():
    a = torch.empty(2, 2, device="meta")
    with pytest.raises(ValueError, match="the kernel runs on .*; the tensors are on meta. Move them"):
        matmul(a, a)
