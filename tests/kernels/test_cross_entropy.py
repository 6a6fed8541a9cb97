"""The loss's kernels: a shard's statistics against plain PyTorch, and shards merged by hand against the whole loss."""

import math

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.kernels import cross_entropy as module
from weft.kernels import launch
from weft.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_losses, cross_entropy_statistics
from weft.testing import cases, reference
from weft.testing.tolerance import assert_close, error_in_tolerances

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Classes of a shard: one, odd, around an access, around a block of 4096, several blocks.
WIDTHS = [1, 2, 7, 8, 33, 4095, 4096, 4097, 16_033]
IGNORED = -100


def draw(device, *shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 5).to(device, dtype)


def targets(device, rows, vocabulary, seed=0):
    """Some of every part of the vocabulary; the first is the first class, the last the last, the middle is ignored."""
    target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    target[0] = 0
    target[-1] = vocabulary - 1
    if rows > 2:
        target[rows // 2] = IGNORED
    return target.to(device)


def statistics_of(logits, target, offset, smoothing, ignore_index=IGNORED):
    """The same from whole passes, in the type of the logits or fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    local = target - offset
    here = (local >= 0) & (local < logits.size(1)) & (target != ignore_index)
    highest = wide.amax(1)
    shift = highest.masked_fill(highest == -torch.inf, 0)
    exponentials = (wide - shift.unsqueeze(1)).exp().sum(1)
    total = wide.sum(1) if smoothing else torch.zeros_like(highest)
    at_target = wide.gather(1, local.masked_fill(~here, 0).unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    return torch.stack([highest, exponentials, total, at_target])


def check_statistics(logits, target, offset, smoothing, pieces=None):
    got = cross_entropy_statistics(
        logits, target, offset=offset, ignore_index=IGNORED, smoothing=smoothing, pieces=pieces
    )
    assert got.shape == (4, len(logits)) and got.dtype == torch.float32
    plain = statistics_of(logits, target, offset, smoothing)
    exact = statistics_of(logits.double(), target, offset, smoothing)
    assert torch.equal(got[0], plain[0]) and torch.equal(got[3], plain[3])
    assert_close(got[1], plain[1], exact[1], "sum of exponentials")
    assert (got[2].double() - exact[2]).abs().max() <= 1e-6 * logits.double().abs().sum(1).max()
    return got


@pytest.mark.parametrize(("width", "dtype"), cases.covering(WIDTHS, DTYPES), ids=str)
def test_statistics_of_shards_of_any_width(device, dtype, width):
    logits, offset = draw(device, 5, width, dtype=dtype), 10
    target = targets(device, 5, width) + offset
    target[1] = offset - 1  # on another shard, before and after this one
    target[3] = offset + width
    target[2] = IGNORED
    for smoothing in (False, True):
        check_statistics(logits, target, offset, smoothing)


@pytest.mark.sanitize
@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 100])
def test_cutting_rows_into_pieces_changes_roundings_only(device, pieces):
    logits = draw(device, 3, 16_033, dtype=torch.bfloat16)
    logits[1, :9000] = -torch.inf  # every logit of whole pieces is masked
    target = targets(device, 3, 16_033)
    got = cross_entropy_statistics(logits, target, offset=0, ignore_index=IGNORED, smoothing=False, pieces=pieces)
    plain = statistics_of(logits, target, 0, False)
    assert torch.equal(got[[0, 3]], plain[[0, 3]])
    assert_close(got[1], plain[1], statistics_of(logits.double(), target, 0, False)[1])
    again = cross_entropy_statistics(logits, target, offset=0, ignore_index=IGNORED, smoothing=False, pieces=pieces)
    assert torch.equal(got, again)
    check_statistics(draw(device, 3, 16_033), target, 0, True, pieces)


def test_many_rows_are_not_cut_and_few_are():
    def pieces(rows, columns):
        with launch.recording("sm_90") as launches:
            cross_entropy_statistics(
                torch.empty(rows, columns, device="meta"),
                torch.empty(rows, dtype=torch.int64, device="meta"),
                offset=0,
                ignore_index=IGNORED,
                smoothing=False,
            )
        assert len(launches) == (1 if launches[0].grid[0] == rows else 2)
        return launches[0].grid[0] // rows

    assert pieces(4096, 16_032) == 1
    assert pieces(1, 128_256) == 16
    assert pieces(1, 100) == 1


EXTREMES = {
    "all masked": [-torch.inf] * 6,
    "all but one masked": [-torch.inf] * 5 + [3.0],
    "one masked": [-torch.inf, 1.0, 2.0, 3.0, 2.0, 1.0],
    "large": [1e4, -1e4, 0.0, 1.0, 2.0, 3.0],
    "very negative": [-1e4] * 5 + [-2e4],
    "all equal": [0.5] * 6,
    "an infinity": [1.0, torch.inf, 2.0, 3.0, 4.0, 5.0],
    "two infinities": [torch.inf, 1.0, 2.0, 3.0, 4.0, torch.inf],
    "both infinities": [-torch.inf, 1.0, 2.0, torch.inf, 4.0, 5.0],
    "a nan": [1.0, 2.0, torch.nan, 3.0, 4.0, 5.0],
    "a nan and an infinity": [torch.inf, 2.0, torch.nan, 3.0, 4.0, 5.0],
}


@pytest.mark.parametrize("copies", [1, 1500])
@pytest.mark.parametrize("row", EXTREMES)
def test_extreme_logits_give_what_whole_passes_give(device, row, copies):
    """With copies, every lane meets every logit, in changing company."""
    logits = torch.tensor([EXTREMES[row] * copies], device=device)
    target = torch.tensor([2], device=device)
    expected = statistics_of(logits, target, 0, True)
    for pieces in (1, 2):
        got = cross_entropy_statistics(logits, target, offset=0, ignore_index=IGNORED, smoothing=True, pieces=pieces)
        if expected[0].isnan():  # the maximum passes over it, the sum does not
            assert got[1].isnan() and got[2].isnan()
            continue
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_a_masked_row_has_maximum_minus_infinity_and_sum_zero(device):
    logits = torch.full((2, 5000), -torch.inf, device=device)
    target = torch.tensor([3, 4999], device=device)
    got = cross_entropy_statistics(logits, target, offset=0, ignore_index=IGNORED, smoothing=False)
    assert (got[0] == -torch.inf).all() and (got[1] == 0).all() and (got[2] == 0).all()
    empty = cross_entropy_statistics(logits[:, :0], target, offset=9, ignore_index=IGNORED, smoothing=True)
    assert (empty[0] == -torch.inf).all() and (empty[1:] == 0).all()


LAYOUTS = {
    "rows": lambda t: t.clone(),
    "padded rows": lambda t: F.pad(t, (0, -t.size(1) % 8 + 8), value=9)[:, : t.size(1)],
    "oddly padded rows": lambda t: F.pad(t, (0, t.size(1) % 2 + 1), value=9)[:, : t.size(1)],
    "an odd offset": lambda t: F.pad(t, (3, 0), value=9)[:, 3:],
    "every second row": lambda t: torch.stack([t, t + 9], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "one row for all"])
def test_statistics_of_rows_anywhere(device, layout):
    logits = draw(device, 4, 4099, dtype=torch.bfloat16)
    logits = logits[:1].expand(4, -1) if layout == "one row for all" else LAYOUTS[layout](logits)
    strided = torch.stack([targets(device, 4, 4099)] * 2, 1)[:, 0]
    check_statistics(logits, strided, 0, True)


def whole_loss(logits, target, smoothing, ignore_index=IGNORED):
    """Losses and gradient of torch's loss, of the losses weighted unevenly."""
    logits = logits.detach().clone().requires_grad_()
    losses = reference.cross_entropy(
        logits, target, label_smoothing=smoothing, ignore_index=ignore_index, reduction="none"
    )
    (losses * weights(losses)).sum().backward()
    return losses.detach(), logits.grad


def weights(losses):
    return torch.linspace(0.5, 2, len(losses), dtype=losses.dtype, device=losses.device)


def sharded_loss(logits, target, smoothing, world, ignore_index=IGNORED, change=None):
    """The same from shards: statistics of each, the losses of all, and the gradient of each."""
    vocabulary = logits.size(1)
    shards = logits.split(weft.split_sizes(vocabulary, world), 1)
    offsets = [sum(shard.size(1) for shard in shards[:rank]) for rank in range(world)]
    ranks = torch.stack(
        [
            cross_entropy_statistics(shard, target, offset=offset, ignore_index=ignore_index, smoothing=smoothing > 0)
            for shard, offset in zip(shards, offsets, strict=True)
        ]
    )
    arguments = dict(vocabulary=vocabulary, ignore_index=ignore_index, smoothing=smoothing)
    losses, highest, log_sum, loss, count, valid = cross_entropy_losses(ranks, target, **arguments, mean=True)
    assert count == (target != ignore_index).sum() and valid == 1
    torch.testing.assert_close(loss, losses.double().sum().float() / count, rtol=1e-6, atol=1e-6)
    if change:
        arguments |= change
    gradients = [
        cross_entropy_gradient(shard, target, highest, log_sum, weights(losses), offset=offset, **arguments)
        for shard, offset in zip(shards, offsets, strict=True)
    ]
    return losses, torch.cat(gradients, 1)


SHARDED = [(1, 13), (2, 13), (3, 257), (5, 5), (2, 8200)]  # ranks, words


@pytest.mark.parametrize(
    ("sizes", "smoothing", "dtype"),
    cases.covering(SHARDED, [0.1, 0.0, 1.0], DTYPES) + cases.covering(SHARDED[2:3], [0.0, 0.1, 1.0], reversed(DTYPES)),
    ids=str,
)
def test_merged_shards_have_the_loss_and_gradient_of_the_whole(device, sizes, smoothing, dtype):
    world, vocabulary = sizes
    logits, target = draw(device, 4, vocabulary, dtype=dtype), targets(device, 4, vocabulary)
    exact = whole_loss(logits.double(), target, smoothing)
    plain = whole_loss(logits.float(), target, smoothing)
    losses, gradient = sharded_loss(logits, target, smoothing, world)
    assert_close(losses, plain[0], exact[0], "losses")
    assert gradient.dtype == dtype and (gradient[target == IGNORED] == 0).all()
    assert_close(gradient, plain[1].to(dtype), exact[1], "gradient")


@pytest.mark.parametrize("rows", [1, 127, 300])
@pytest.mark.parametrize("mean", [True, False])
def test_sum_mean_and_check_of_the_losses_of_many_programs(device, rows, mean):
    target = targets(device, rows, 50)
    statistics = cross_entropy_statistics(
        draw(device, rows, 50), target, offset=0, ignore_index=IGNORED, smoothing=True
    ).unsqueeze(0)
    options = dict(ignore_index=IGNORED, smoothing=0.1, mean=mean)
    for _ in range(2):  # the ticket is back at zero
        losses, _, _, loss, count, valid = cross_entropy_losses(statistics, target, vocabulary=50, **options)
        assert count == (target != IGNORED).sum() and valid == 1
        expected = losses.double().sum() / (count if mean else 1)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    *_, invalid = cross_entropy_losses(statistics, target, vocabulary=49, **options)
    assert invalid == 0  # the last target is class 49
    target[0] = -1
    *_, invalid = cross_entropy_losses(statistics, target, vocabulary=50, **options)
    assert invalid == 0


def test_losses_refuse_other_statistics(device):
    target = targets(device, 3, 5)
    arguments = dict(vocabulary=5, ignore_index=IGNORED, smoothing=0.0, mean=True)
    with pytest.raises(ValueError, match=r"must be \[R, 4, M\] and contiguous"):
        cross_entropy_losses(torch.zeros(2, 3, 3, device=device), target, **arguments)
    with pytest.raises(ValueError, match="target"):
        cross_entropy_losses(torch.zeros(2, 4, 4, device=device), target, **arguments)
    with pytest.raises(TypeError, match="statistics"):
        cross_entropy_losses(torch.zeros(2, 4, 3, device=device, dtype=torch.float64), target, **arguments)


def test_a_class_may_be_the_ignored_one(device):
    logits, target = draw(device, 6, 9), torch.tensor([0, 4, 4, 8, 1, 4], device=device)
    losses, gradient = sharded_loss(logits, target, 0.1, 2, ignore_index=4)
    expected = whole_loss(logits, target, 0.1, ignore_index=4)
    torch.testing.assert_close((losses, gradient), expected)
    assert (gradient[[1, 2, 5]] == 0).all()


def arguments_of(device, logits, smoothing=0.1):
    """What the gradient takes, of logits that are the whole vocabulary."""
    rows, columns = logits.shape
    target = targets(device, rows, columns)
    highest, exponentials, _, _ = cross_entropy_statistics(
        logits, target, offset=0, ignore_index=IGNORED, smoothing=False
    )
    dlosses = draw(device, rows, seed=3)
    options = dict(offset=0, vocabulary=columns, ignore_index=IGNORED, smoothing=smoothing)
    return (target, highest, exponentials.log(), dlosses), options


@pytest.mark.sanitize
@pytest.mark.parametrize(("width", "dtype"), cases.covering([1, 9, 4099], DTYPES), ids=str)
def test_in_place_gives_the_same_bits(device, dtype, width):
    for layout in LAYOUTS.values():
        logits = layout(draw(device, 5, width, dtype=dtype))
        tensors, options = arguments_of(device, logits)
        base = logits._base if logits._base is not None else logits
        before = base.clone()
        expected = cross_entropy_gradient(logits, *tensors, **options)
        assert torch.equal(base, before)
        assert cross_entropy_gradient(logits, *tensors, **options, out=logits) is logits
        assert torch.equal(logits, expected)
        rest = torch.ones_like(base, dtype=torch.bool)
        rest.as_strided(logits.shape, logits.stride(), logits.storage_offset()).fill_(False)
        assert torch.equal(base[rest], before[rest])


@pytest.mark.parametrize(
    ("of_logits", "of_out"), cases.covering(LAYOUTS, [*LAYOUTS][1:]) + cases.covering(LAYOUTS, LAYOUTS)
)
def test_rows_of_logits_and_gradient_may_lie_differently(device, of_logits, of_out):
    logits = draw(device, 3, 8200, dtype=torch.bfloat16)
    tensors, options = arguments_of(device, logits)
    expected = cross_entropy_gradient(logits, *tensors, **options)
    out = LAYOUTS[of_out](logits)
    base = out._base if out._base is not None else out
    base.fill_(torch.nan)
    cross_entropy_gradient(LAYOUTS[of_logits](logits), *tensors, **options, out=out)
    assert torch.equal(out, expected)
    assert base.numel() - int(base.isnan().sum()) == out.numel()


def test_two_groups_of_columns_of_one_matrix_may_be_logits_and_gradient(device):
    both = draw(device, 4, 20)
    logits, out = both[:, :10], both[:, 10:]
    tensors, options = arguments_of(device, logits)
    expected = cross_entropy_gradient(logits.clone(), *tensors, **options)
    assert torch.equal(cross_entropy_gradient(logits, *tensors, **options, out=out), expected)


def test_one_gradient_for_all_losses_may_be_expanded(device):
    logits = draw(device, 5, 33)
    (target, highest, log_sum, _), options = arguments_of(device, logits)
    one = torch.tensor(0.25, device=device)
    expected = cross_entropy_gradient(logits, target, highest, log_sum, one.repeat(5), **options)
    assert torch.equal(cross_entropy_gradient(logits, target, highest, log_sum, one.expand(5), **options), expected)


def test_masked_logits_have_gradient_zero_and_ignored_rows_too_whatever_they_hold(device):
    logits = draw(device, 4, 4100)
    logits[0, 1:4000] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    target = torch.tensor([0, IGNORED, IGNORED, 7], device=device)
    highest, exponentials, _, _ = cross_entropy_statistics(
        logits, target, offset=0, ignore_index=IGNORED, smoothing=False
    )
    gradient = cross_entropy_gradient(
        logits,
        target,
        highest,
        exponentials.log(),
        torch.ones(4, device=device),
        offset=0,
        vocabulary=4100,
        ignore_index=IGNORED,
        smoothing=0.0,
    )
    assert not gradient.isnan().any()
    assert (gradient[0, 1:4000] == 0).all() and (gradient[1:3] == 0).all()
    assert gradient[3].sum().abs() < 1e-5 and gradient[3, 7] < 0


def test_a_shard_that_is_masked_whole_beside_one_that_is_not(device):
    logits = torch.cat([torch.full((1, 4), -torch.inf, device=device), draw(device, 1, 3)], 1)
    target = torch.tensor([5], device=device)
    losses, gradient = sharded_loss(logits, target, 0.0, 2)
    expected = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert (gradient[0, :4] == 0).all() and not gradient.isnan().any()


@pytest.mark.parametrize("change", [{"vocabulary": 1000}, {"smoothing": 0.0}, {"ignore_index": 0}])
def test_the_tolerance_would_catch_a_wrong_gradient(device, change):
    """Smoothing over a shard's share, none at all, an ignored row that should not be."""
    logits, target = draw(device, 7, 500), targets(device, 7, 500)
    plain, exact = whole_loss(logits, target, 0.5), whole_loss(logits.double(), target, 0.5)
    _, right = sharded_loss(logits, target, 0.5, 2)
    _, wrong = sharded_loss(logits, target, 0.5, 2, change=change)
    assert error_in_tolerances(right, plain[1], exact[1]) <= 1
    assert error_in_tolerances(wrong, plain[1], exact[1]) > 10


def test_nothing_gives_nothing(device):
    none, no_target = draw(device, 0, 7), torch.empty(0, dtype=torch.int64, device=device)
    of_rows = draw(device, 0)
    assert cross_entropy_statistics(none, no_target, offset=0, ignore_index=-1, smoothing=True).shape == (4, 0)
    options = dict(offset=0, vocabulary=7, ignore_index=-1, smoothing=0.0)
    assert cross_entropy_gradient(none, no_target, of_rows, of_rows, of_rows, **options).shape == (0, 7)
    no_columns = draw(device, 3, 7)[:, :0]
    target, of_rows = targets(device, 3, 7), draw(device, 3)
    assert cross_entropy_gradient(no_columns, target, of_rows, of_rows, of_rows, **options).shape == (3, 0)


def test_bad_input_is_refused_with_the_value_and_the_way_out(device):
    logits, target, of_rows = draw(device, 4, 6), targets(device, 4, 6), draw(device, 4)
    wide = draw(device, 4, 12)

    def statistics(logits=logits, target=target, **options):
        return cross_entropy_statistics(
            logits, target, **{"offset": 0, "ignore_index": IGNORED, "smoothing": False, **options}
        )

    def gradient(logits=logits, target=target, highest=of_rows, log_sum=of_rows, dlosses=of_rows, **options):
        options = {"offset": 0, "vocabulary": 6, "ignore_index": IGNORED, "smoothing": 0.0, **options}
        return cross_entropy_gradient(logits, target, highest, log_sum, dlosses, **options)

    for call in (statistics, gradient):
        for error, text, options in [
            (TypeError, "logits_shard is torch.float64; it must be one of", dict(logits=logits.double())),
            (ValueError, r"has shape \(4,\).*must be \[M, V_r\] with contiguous columns", dict(logits=of_rows)),
            (ValueError, r"strides \(1, 4\); it must be .*make it contiguous", dict(logits=draw(device, 6, 4).t())),
            (TypeError, "target is torch.int32; it must be one of torch.int64", dict(target=target.int())),
            (ValueError, r"target has shape \(3,\); it must be \(4,\)", dict(target=target[1:])),
            (ValueError, "the tensors must be on one device", dict(target=target.to("meta"))),
        ]:
            with pytest.raises(error, match=text):
                call(**options)
    for error, text, options in [
        (TypeError, "highest is torch.float64; it must be one of torch.float32", dict(highest=of_rows.double())),
        (ValueError, r"dlosses has shape \(1,\); it must be \(4,\)", dict(dlosses=of_rows[:1])),
        (TypeError, "out is torch.bfloat16", dict(out=logits.bfloat16())),
        (ValueError, r"out has shape \(4, 12\)", dict(out=wide)),
        (ValueError, "share memory", dict(out=logits[:1].expand(4, 6))),
        (ValueError, "out overlaps logits_shard", dict(logits=wide[:, :6], out=wide[:, 1:7])),
        (ValueError, "out overlaps logits_shard", dict(logits=wide[:, :6], out=wide.view(8, 6)[:4])),
        (ValueError, "out overlaps logits_shard", dict(logits=wide.view(8, 6)[:4], out=wide.view(8, 6)[1:5])),
        (ValueError, "smoothing=1.5 must lie between 0 and 1", dict(smoothing=1.5)),
        (ValueError, "vocabulary=6 ends before the shard's classes 1 to 7", dict(offset=1)),
    ]:
        with pytest.raises(error, match=text):
            gradient(**options)
    with pytest.raises(ValueError, match="pieces=0 must be at least 1"):
        statistics(pieces=0)


def test_every_type_and_switch_is_listed_for_the_static_gate():
    with launch.recording("sm_90") as launches:
        module.variants("sm_90")
    kernels = [launched.kernel.__name__ for launched in launches]
    assert {kernels.count(name) for name in ("_statistics_kernel", "_gradient_kernel", "_merge_kernel")} == {13, 6, 1}


def test_sums_stay_accurate_where_the_maximum_grows_all_the_way(device):
    """Each block above the one before: every sum is rescaled at every step."""
    logits = torch.linspace(-30, 30, 5 * 4096, device=device).unsqueeze(0)
    target = torch.tensor([0], device=device)
    got = check_statistics(logits, target, 0, False, pieces=1)
    assert math.isclose(got[1].item(), logits.double().sub(30.0).exp().sum().item(), rel_tol=1e-5)
